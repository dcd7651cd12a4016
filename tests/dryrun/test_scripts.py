"""Whole scripts, unmodified, on fake tensors: what they need is what a trace of the same job needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import peakcast
from peakcast import catalog
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Category, Phase

LLAMA = {
    "name": "small llama",
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def test_a_plain_loop_needs_what_the_trace_of_its_job_needs(run_script, traced, of_tensors):
    """The same network, batch and optimizer, by a script and by a job, under the same answer; the script's tensors have the
    names of its own modules."""
    found = run_script("plain_loop.py", "--layers", "3", "--hidden", "256", "--length", "128", gpu="A100-80GB")
    loop = {"framework": "torch", "framework_options": {"outputs_dropped": True}}  # it keeps the loss alone
    job = job_from_mapping({"architecture": LLAMA, "micro_batch_size": 2, "sequence_length": 128, **loop})
    for step, timeline in traced(job).items():
        ours, theirs = of_tensors(found.timelines[step]).peak(), of_tensors(timeline).peak()
        assert ours.num_bytes == pytest.approx(theirs.num_bytes, rel=1e-3)
        assert ours.phase == theirs.phase
    assert replace(found.job, architecture=job.architecture, versions=job.versions) == job
    assert found.job.architecture.hidden_size == 256
    steps, predicted = found.answer.first_to_try, peakcast.predict(job, "A100-80GB", rank=0).first_to_try
    assert [step.name for step in steps] == [step.name for step in predicted] != []
    assert steps[0].peak_bytes + steps[0].saved_bytes == found.answer.peak_allocated_bytes.point
    steady = found.timelines["steady"]
    named = set(zip(steady.names, map(Category, steady.categories), strict=True))
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert {
        (weight, Category.PARAMETERS),
        (f"{weight}.grad", Category.GRADIENTS),
        (f"{weight}.exp_avg", Category.OPTIMIZER_STATES),
    } <= named
    (said,) = [finding for finding in found.answer.findings if finding.code == "value_assumed"]
    assert "plain_loop.py:35 reads a float32" in said.sentence


@pytest.mark.benchmarks
def test_a_gpt_of_one_file_reads_its_data_and_steps_with_two_optimizers(run_script, tmp_path, monkeypatch):
    """nanoGPT's loader of memory-mapped tokens, autocast, a scaler, evaluation first, Muon and AdamW."""
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    found = run_script("small_gpt.py", "--muon")
    assert found.steps == 3
    assert (found.job.micro_batch_size, found.job.sequence_length) == (8, 256)
    assert found.job.gradient_accumulation_steps == 2
    assert found.job.precision.compute == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["train.bin"]  # the checkpoint was not saved
    assert any("torch.save" in warning for warning in found.answer.warnings)


def test_the_trainer_of_transformers(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # as a Trainer on the CPU leaves it behind in its process
    found = run_script("trainer.py", "--per_device_train_batch_size", "2", "--bf16", "--save_steps", "1")
    assert found.steps == 3
    assert (found.job.micro_batch_size, found.job.sequence_length) == (2, 256)
    weights = sum(
        size
        for category, size in found.timelines["steady"].composition(0).items()
        if category in (Category.PARAMETERS, Category.OPTIMIZER_STATES)
    )
    assert weights == pytest.approx(3 * 4 * 18_352_384, rel=1e-3)  # weights and two states, four bytes each
    assert list(tmp_path.iterdir()) == []


@pytest.mark.benchmarks
def test_accelerates_loop_trains_the_parameters_that_it_moved(run_script, tmp_path, monkeypatch):
    """The optimizer is made before the network is on the GPU, and holds the same parameters afterwards."""
    monkeypatch.chdir(tmp_path)
    found = run_script("accelerate_loop.py")
    composition = found.timelines["steady"].composition(0)
    assert composition[Category.OPTIMIZER_STATES] == pytest.approx(2 * composition[Category.PARAMETERS], rel=1e-3)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_sent_its_batches_reads_them_itself(run_script):
    """accelerate reads iterable data sets on rank 0 alone; any rank has as many rows."""
    found = run_script("accelerate_loop.py", "--stream", rank=1, world_size=2)
    assert (found.job.micro_batch_size, found.job.sequence_length) == (4, 128)
    assert found.job.parallelism.data_parallel_size == 2


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("--fsdp",), {"outputs_dropped": True}),
        pytest.param(("--fsdp", "--keep", "--held"), {"fsdp_reshard_after_forward": False}, marks=pytest.mark.whole),
        pytest.param(
            ("--views",), {"outputs_dropped": True, "ddp_gradient_as_bucket_view": True}, marks=pytest.mark.whole
        ),
    ],
)
def test_predict_expects_of_the_job_that_was_seen_what_the_script_needs(run_script, words, options):
    found = run_script("distributed.py", *words, world_size=4)
    assert found.job.framework == "torch"
    assert found.job.framework_options == options  # those that are not the defaults of such loops
    expected = ledger(found.job, device=catalog.gpu("H100-80GB"), rank=0, step="steady").peak()
    assert expected.num_bytes == pytest.approx(found.timelines["steady"].peak().num_bytes, rel=1e-3)
    assert not [finding for finding in found.answer.findings if finding.code == "job_differs"]


def test_an_answer_says_that_its_job_is_not_all_that_the_script_does(run_script):
    found = run_script("plain_loop.py", "--layers", "3", "--hidden", "256", "--extra", str(2**28))
    (said,) = [finding for finding in found.answer.findings if finding.code == "job_differs"]
    needed = found.timelines["steady"].peak().num_bytes
    less = 1 - ledger(found.job, device=catalog.gpu("H100-80GB"), rank=0, step="steady").peak().num_bytes / needed
    assert less == pytest.approx(2**28 / needed, abs=0.01)
    assert f"predict expects {less:.0%} less" in said.sentence


@pytest.mark.benchmarks
def test_ranks_share_what_fsdp2_shards_and_hold_what_ddp_copies(run_script):
    sharded = run_script("distributed.py", "--fsdp", rank=5, world_size=8)
    copied = run_script("distributed.py", rank=5, world_size=8)
    assert sharded.job.parallelism.sharding == "fsdp2"
    assert copied.job.parallelism.sharding == "none"
    assert (sharded.job.precision.compute, sharded.job.precision.gradients) == ("bfloat16", "float32")
    assert copied.job.precision.compute == "float32"
    assert len(set(sharded.timelines["run"].streams.tolist())) == 3  # it computes, gathers and reduces
    assert set(copied.timelines["run"].streams.tolist()) == {0}
    held = {
        name: found.timelines["steady"].composition(0)[Category.OPTIMIZER_STATES]
        for name, found in (("sharded", sharded), ("copied", copied))
    }
    assert held["copied"] == pytest.approx(8 * held["sharded"], rel=1e-2)
    assert copied.timelines["steady"].peak(Phase.BACKWARD).num_bytes > sharded.timelines["steady"].peak().num_bytes


@pytest.mark.benchmarks
def test_a_checkpoint_by_its_name_is_its_shapes_alone(run_script):
    found = run_script("pretrained.py", "HuggingFaceTB/SmolLM2-135M")
    assert found.answer.composition["parameters"] == pytest.approx(2 * 134_515_008, rel=1e-3)


def test_a_plain_script_does_not_wait_for_transformers(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "weight = torch.nn.Parameter(torch.ones(1024, device='cuda'))\n"
        "optimizer = torch.optim.SGD([weight])\n"
        "for _ in range(4):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
        "    assert 'transformers' not in sys.modules\n"
    )
    monkeypatch.chdir(tmp_path)
    assert peakcast.dryrun(["python", "train.py"], "H100-80GB").steps == 3


@pytest.mark.whole
def test_a_network_that_transformers_splits_as_it_loads_it(run_script):
    """A third of each matrix and of the tied token table (134,515,008 parameters in bfloat16, 35,136 in norms), with
    both moments."""
    pytest.importorskip("transformers.distributed.tensor_parallel")
    found = run_script("split.py", world_size=3)
    weights = 2 * ((134_515_008 - 35_136) // 3 + 35_136)
    held = found.answer.composition
    assert held["parameters"] == pytest.approx(weights, rel=0.01)
    assert held["optimizer_states"] == pytest.approx(2 * weights, rel=0.01)
    assert "communication_buffers" not in held  # which copies of the whole network would have
    assert (found.job.parallelism.tensor_parallel_size, found.job.parallelism.data_parallel_size) == (3, 1)

LAUNCHED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
network = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
for _ in range(4):
    accelerator.backward(network(torch.ones(8, 1024, device="cuda")).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_one_rank_that_accelerate_launches_with_fsdp_shards_and_updates_as_many_do(tmp_path):
    """`accelerate launch` starts FSDP as a distributed program on one GPU too. The first step makes the states, once."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    flags = ["--num_processes", "1", "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "NO_WRAP"]
    found = peakcast.dryrun(["accelerate", "launch", *flags, str(script)], "H100-80GB")
    first = found.timelines["first"]
    weights = 4 * 2 * 1024 * 1025
    made = first.composition(first.peak(Phase.OPTIMIZER_STEP).instant)
    assert made[Category.OPTIMIZER_STATES] == pytest.approx(2 * weights, rel=0.01)
    assert made[Category.OPTIMIZER_TEMPORARIES] <= 1.01 * weights
