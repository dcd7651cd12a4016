"""The stack that makes the Trainer's calls, beside transformers' own Trainer: both really run, on this machine's CPU."""

import json
import subprocess
import sys

import pytest

from peakcast.collectors.grid import expand
from peakcast.spec import job_to_mapping

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
RUN = """
import gc, json, sys
import torch, transformers
from peakcast.collectors.frameworks import build
from peakcast.collectors.frameworks.huggingface import model_of
from peakcast.collectors.tracing.tracer import Tracer
from peakcast.collectors.tracing.trace import run_step
from peakcast.dialects.job_file import job_from_mapping

STEPS = 3
job = job_from_mapping(json.loads(sys.argv[1]))
checkpointed = job.activation_checkpointing.mode == "full"

def ours():
    with Tracer("cpu") as tracer:
        training, starts = build(job, "cpu"), []
        for _ in range(STEPS):
            starts.append(tracer.now)
            run_step(training, tracer)
        starts.append(tracer.now)
    return tracer, starts, training.optimizer

class Marks(transformers.TrainerCallback):
    def __init__(self, tracer):
        self.tracer, self.starts = tracer, []
    def on_step_begin(self, *args, **given):
        self.starts.append(self.tracer.now)
    def on_step_end(self, *args, **given):
        self.end = self.tracer.now

def theirs():
    data = []  # made before the tracer looks: the samples would count as the GPU's, which they are not
    for _ in range(64):
        ids = torch.randint(job.architecture.vocab_size, (job.sequence_length,))
        data.append({"input_ids": ids, "labels": ids})
    with Tracer("cpu") as tracer:
        marks = Marks(tracer)
        model = model_of(job)
        arguments = transformers.TrainingArguments(
            output_dir=sys.argv[2], max_steps=STEPS, per_device_train_batch_size=job.micro_batch_size, use_cpu=True,
            gradient_accumulation_steps=job.gradient_accumulation_steps, optim="adamw_torch_fused", report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, gradient_checkpointing=checkpointed,
            gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointed else None,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[marks])
        trainer.train()
    return tracer, [*marks.starts, marks.end], trainer.optimizer

found = {}
for name, run in (("ours", ours), ("theirs", theirs)):
    tracer, starts, optimizer = run()
    gc.collect()
    steps = [tracer.timeline(*span).peak().num_bytes for span in zip(starts, starts[1:])]
    before = int(tracer.timeline(starts[0], starts[-1]).totals[0])
    fused = bool(optimizer.defaults.get("fused"))
    found[name] = {"steps": steps, "before": before, "groups": len(optimizer.param_groups), "fused": fused}
print("FOUND", json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation_steps": 2, "micro_batch_size": 2}, {"activation_checkpointing.mode": "full"}],
)
def test_each_step_peaks_as_high_as_the_trainers(tmp_path, changes):
    network = {
        "model_type": "llama", "name": "tiny", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 4000, "tie_word_embeddings": False,
    }  # fmt: skip
    cell = {"architecture": network, "sequence_length": 128, "optimizer.implementation": "fused", **changes}
    (job,) = expand({"include": [cell]})
    command = [sys.executable, "-P", "-c", RUN, json.dumps(job_to_mapping(job)), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:])
    ours, theirs = found["ours"], found["theirs"]
    assert ours["groups"] == theirs["groups"] == 2
    assert ours["fused"] is theirs["fused"] is True
    assert theirs["steps"] == pytest.approx(ours["steps"], rel=1e-3)
