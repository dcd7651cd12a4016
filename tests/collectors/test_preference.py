"""TRL's losses: made without its trainers and within them, and the ledger beside their traces."""

import json
import subprocess
import sys

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.core.errors import CollectorError
from peakcast.jobs.spec import job_to_mapping

pytest.importorskip("transformers")
CUT = {"name": "llama-3.2-1b", "num_hidden_layers": 2}
ADAPTED = {"method": "lora", "rank": 16, "targets": ["all-linear"]}
CELLS = {
    "dpo": {"loss": {"kind": "dpo"}},
    "dpo_precomputed": {"loss": {"kind": "dpo", "reference": "precomputed"}, "activation_checkpointing.mode": "full"},
    "dpo_lora": {"loss": {"kind": "dpo"}, "finetuning": ADAPTED, "activation_checkpointing.mode": "full"},
    "dpo_autocast": {"loss": {"kind": "dpo"}, "precision.parameters": "float32", "framework_options": {"autocast": True}},
    "kto": {"loss": {"kind": "kto"}},
    "reward": {"loss": {"kind": "reward"}},
    "reward_lora": {"loss": {"kind": "reward"}, "finetuning": ADAPTED},
}


def job(name, **changes):
    base = {"architecture": CUT, "sequence_length": 128, "micro_batch_size": 2}
    return expand({"base": base, "include": [CELLS[name] | changes]})[0]


@pytest.mark.needs("trl")
@pytest.mark.parametrize("name", CELLS)
def test_the_ledger_equals_the_trace_phase_by_phase(ledger_equals_trace, name):
    """Within 0.1 % of the phase's peak, in the first and in a steady step, and between steps."""
    for step, (closed_form, trace) in ledger_equals_trace(job(name), rel=1e-3).items():
        assert int(closed_form.totals[-1]) == pytest.approx(int(trace.totals[-1]), rel=1e-3), step


def test_without_trl_a_run_says_what_to_install(monkeypatch):
    from peakcast.collectors.stacks import preference

    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(CollectorError, match="pip install trl"):
        preference._trl("utils", job("dpo"))


def test_what_is_not_run_with_trls_losses_is_refused_by_name():
    from peakcast.collectors.stacks import preference

    with pytest.raises(CollectorError, match=r"batch\.form='masked' has no collector yet with loss\.kind='dpo'"):
        preference._check(job("dpo", **{"batch.form": "masked"}))


RUN = """
import gc, json, sys
import torch, transformers, datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from peakcast.collectors.stacks import build
from peakcast.collectors.stacks.huggingface_model import model_of
from peakcast.collectors.tracing.tracer import Tracer
from peakcast.collectors.tracing.trace import StepFollower
from peakcast.collectors.stacks.steps.stepping import run_step
from peakcast.dialects.common.job_file import job_from_mapping
import trl

STEPS = 3
job = job_from_mapping(json.loads(sys.argv[1]))
checkpointed = job.activation_checkpointing.mode == "full"
length, pairs = job.sequence_length, job.micro_batch_size // (1 if job.loss.kind == "kto" else 2)

def ours():
    with Tracer("cpu") as tracer:
        training, starts = build(job, "cpu"), []
        gc.collect()
        for _ in range(STEPS):
            starts.append(tracer.now)
            run_step(training, StepFollower(training, tracer))
        starts.append(tracer.now)
    return tracer, starts

class Marks(transformers.TrainerCallback):
    def __init__(self, tracer):
        self.tracer, self.starts = tracer, []
    def on_step_begin(self, *args, **given):
        self.starts.append(self.tracer.now)
    def on_step_end(self, *args, **given):
        self.end = self.tracer.now

def theirs():
    words = {str(word): word for word in range(job.architecture.vocab_size)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0", eos_token="1")
    tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    words = lambda: " ".join(map(str, [*torch.randint(2, job.architecture.vocab_size, (length - 2,)).tolist(), 1]))
    rows = [{"prompt": "7 ", "chosen": words(), "rejected": words()} for _ in range(64)]
    if job.loss.kind == "reward":
        ids = torch.randint(2, job.architecture.vocab_size, (64, 2, length)).tolist()
        rows = [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in ids]
    if job.loss.kind == "kto":  # of an answer each, with and without a liking
        rows = [{"prompt": "7 ", "completion": words(), "label": n % 2 == 0} for n in range(64)]
    data = datasets.Dataset.from_list(rows)
    kind = {"dpo": "DPO", "reward": "Reward", "kto": "KTO"}[job.loss.kind]
    config, trainer = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
    arguments = config(
        output_dir=sys.argv[2], max_steps=STEPS, per_device_train_batch_size=pairs, use_cpu=True, bf16=False,
        gradient_accumulation_steps=job.gradient_accumulation_steps, optim="adamw_torch_fused", report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, gradient_checkpointing=checkpointed,
        max_length=length, dataloader_pin_memory=False,
    )
    with Tracer("cpu") as tracer:
        marks = Marks(tracer)
        more = {"ref_model": model_of(job).eval()} if job.reference == "model" else {}
        run = trainer(
            model=model_of(job), args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[marks], **more)
        run.train()
    return tracer, [*marks.starts, marks.end]

found = {}
for name, run in (("ours", ours), ("theirs", theirs)):
    tracer, starts = run()
    gc.collect()
    found[name] = [tracer.timeline(*span).peak().num_bytes for span in zip(starts, starts[1:])]
print("FOUND", json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.needs("trl")
@pytest.mark.parametrize("name", ["dpo", "reward", "kto"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_each_step_peaks_as_high_as_in_trls_own_trainer(tmp_path, name, checkpointing):
    """Both really run, on this machine's CPU; the peaks lie in the layers, where all that lives beside the loss counts."""
    network = {
        "model_type": "llama", "name": "tiny", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False,
    }  # fmt: skip
    changes = {"architecture": network, "optimizer.implementation": "fused", "activation_checkpointing.mode": checkpointing}
    command = [sys.executable, "-P", "-c", RUN, json.dumps(job_to_mapping(job(name, **changes))), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:])
    assert found["theirs"] == pytest.approx(found["ours"], rel=1e-3)
