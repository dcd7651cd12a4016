"""DeepSpeed's engine really runs, one rank of several, each run in a process of its own: on this machine's CPU, and traced
on fake tensors of a GPU."""

import json
import subprocess
import sys

import pytest

from peakcast.collectors.stacks import build
from peakcast.collectors.stacks.deepspeed import check, configuration
from peakcast.collectors.tracing.trace import trace_job
from peakcast.core.errors import CollectorError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.spec import job_to_mapping
from peakcast.timelines.timeline import Category

pytest.importorskip("transformers")
TINY = {
    "model_type": "llama", "name": "tiny", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
PARAMETERS = 1000 * 256 * 2 + 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256
SMALL_BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}


def job(**changes):
    plain = {
        "architecture": TINY,
        "framework": "deepspeed",
        "sequence_length": 64,
        "precision": {"optimizer_states": "float32", "main_parameters": "float32"},
        "parallelism": {"data_parallel_size": 4, "zero_stage": 2},
        "framework_options": SMALL_BUCKETS,
    }
    return job_from_mapping(plain | changes)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.needs("deepspeed")
def test_a_traced_stage_keeps_what_zero_says_it_keeps(stage):
    ranks = 4
    found = trace_job(job(parallelism={"data_parallel_size": ranks, "zero_stage": stage}, gradient_accumulation_steps=2))
    steady = found["steady"]
    kept = steady.composition(len(steady.phases) - 1)
    states = 2 * 4 * PARAMETERS // ranks  # two fp32 states of this rank's part
    assert states <= kept[Category.OPTIMIZER_STATES] < states + 8 * 512
    main = 4 * PARAMETERS // ranks
    weights = 2 * PARAMETERS // (ranks if stage == 3 else 1)
    rest = int(steady.totals[-1]) - kept[Category.OPTIMIZER_STATES]
    buffers = 0
    if stage == 3:
        persistent = 2 * (2 * 4 * 256 * 256 + 5 * 256)  # weights of at most 100,000 elements stay whole
        buffers = persistent + 2 * PARAMETERS // ranks + 2 * SMALL_BUCKETS["reduce_bucket_size"]
    assert main + weights + buffers <= rest <= main + weights + buffers + 64 * 512
    assert steady.peak().num_bytes > found["first"].totals[-1]


RUN = """
import json, sys, torch
from peakcast.collectors.stacks import build, layouts
from peakcast.dialects.common.job_file import job_from_mapping
job = job_from_mapping(json.loads(sys.argv[1]))
layouts.start_group(job)
training = build(job, "cpu")
before = [p.clone() for p in training.optimizer.param_groups[0]["params"]]
for _ in range(2):
    for _ in range(job.gradient_accumulation_steps):
        loss = training.forward(lambda: None)
        training.backward(loss)
    training.clip(); training.step(); training.zero_grad()
states = [t for state in training.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
print("FOUND", json.dumps({"states": sum(t.numel() for t in states), "dtypes": sorted({str(t.dtype) for t in states}),
                           "steps": training.engine.global_steps, "facts": training.facts(), "loss": float(loss)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "offload"), [(2, {"optimizer": True}), (3, {"optimizer": True}), (3, {"optimizer": True, "parameters": True})]
)
@pytest.mark.needs("deepspeed")
def test_offloaded_stages_train(stage, offload):
    asked = job(
        parallelism={"data_parallel_size": 2, "zero_stage": stage}, offload=offload, gradient_accumulation_steps=2
    )
    command = [sys.executable, "-P", "-c", RUN, json.dumps(job_to_mapping(asked))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:])
    assert found["steps"] == 2
    assert 2 * PARAMETERS // 2 <= found["states"] < 2 * PARAMETERS // 2 + 4 * 64
    assert found["dtypes"] == ["torch.float32"]
    assert 0 < found["loss"] < 20
    assert "ZeroOptimizer" in found["facts"]["optimizer"]
    assert found["facts"]["optimizer"].endswith("of AdamW")


def test_the_configuration_says_what_the_job_says():
    asked = job(
        parallelism={"data_parallel_size": 8, "zero_stage": 3},
        offload={"optimizer": True, "parameters": True},
        gradient_accumulation_steps=3,
        framework_options={"reduce_bucket_size": 7, "overlap_comm": False},
    )
    found = configuration(asked)
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["overlap_comm"]) == (3, 7, False)
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    assert (found["gradient_accumulation_steps"], found["bf16"]) == (3, {"enabled": True})
    plain = configuration(job())
    assert "overlap_comm" not in plain["zero_optimization"]
    assert "offload_optimizer" not in plain["zero_optimization"]


@pytest.mark.parametrize(
    ("parameter", "changes"),
    [
        ("parallelism.zero_stage", {"parallelism": {"data_parallel_size": 2}}),
        ("parallelism.sharding", {"parallelism": {"data_parallel_size": 2, "zero_stage": 1, "sharding": "no_shard"}}),
        ("parallelism", {"parallelism": {"data_parallel_size": 2, "zero_stage": 1, "tensor_parallel_size": 2}}),
        ("precision.optimizer_states", {"precision": {"main_parameters": "float32"}}),
        ("precision.main_parameters", {"precision": {"optimizer_states": "float32"}}),
        ("offload.parameters", {"offload": {"parameters": True}}),
        ("optimizer.name", {"optimizer": {"name": "lion"}, "offload": {"optimizer": True}}),
        ("compile", {"compile": True}),
        ("framework_options.loop", {"framework_options": {"loop": "trainer"}}),
    ],
)
def test_what_deepspeed_runs_otherwise_is_refused_by_name(parameter, changes):
    with pytest.raises(CollectorError, match="is not what DeepSpeed runs; measure") as caught:
        check(job(**changes))
    assert caught.value.parameter == parameter


def test_without_the_package_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(CollectorError, match=r"'deepspeed' needs a package .* pip install deepspeed\."):
        build(job(), "cpu")
