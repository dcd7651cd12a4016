"""On a real GPU: the measurement against the ledger. Skipped without one (run with -m gpu)."""

import base64
import json
import subprocess
import sys

import pytest

from peakcast import catalog
from peakcast.collectors.measure.grid import expand, load_grid
from peakcast.collectors.processes.engines.local import run
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.spec import job_in_words, job_to_mapping
from peakcast.measurements.rows import from_row
from peakcast.models.allocator.replay import replay
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.files import timeline_from_mapping, unpack

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CELLS = [
    {"architecture": "gpt2"},
    {"architecture": {"name": "llama-3.1-8b", "num_hidden_layers": 2}},
    {"architecture": {"name": "llama-3.1-8b", "num_hidden_layers": 2}, "activation_checkpointing.mode": "full"},
    {"architecture": {"name": "llama-3.1-8b", "num_hidden_layers": 2}, "optimizer.implementation": "fused"},
    {"architecture": "qwen3-0.6b", "finetuning": {"method": "lora", "rank": 16}},
]


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
def test_a_measured_cell_is_within_two_percent_of_the_ledger(cell):
    (job,) = expand({"base": {"sequence_length": 1024, "micro_batch_size": 2}, "include": [cell]})
    ((_, answer),) = run([{"job": job_to_mapping(job)}], 300)
    assert "reason" not in answer
    row = from_row(answer["row"])
    assert row.outcome == "ok"
    assert row.spoiled == ()
    assert row.peak_allocated_bytes <= row.peak_reserved_bytes <= row.peak_device_bytes
    device = catalog.gpu(row.gpu)
    predicted = max(ledger(row.job, device=device, step=step).peak().num_bytes for step in ("first", "steady"))
    assert predicted == pytest.approx(row.peak_allocated_bytes, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("job", load_grid("stacks"), ids=job_in_words)
def test_every_stack_that_is_installed_measures(job):
    ((_, answer),) = run([{"job": job_to_mapping(job), "ranks": "one", "history": True}], 600)
    if "pip install" in answer.get("reason", ""):
        pytest.skip(answer["reason"])
    assert "reason" not in answer
    row = from_row(answer["row"])
    assert (row.outcome, row.spoiled, row.provenance) == ("ok", (), "measured")
    assert row.collectives == ("fake" if job.parallelism.world_size > 1 else "none")
    kept = unpack(base64.b64decode(answer["history"]))
    found = max(timeline_from_mapping(kept[step]).peak().num_bytes for step in ("first", "steady"))
    assert found == pytest.approx(row.peak_allocated_bytes, rel=0.02)  # but for what was not split from large blocks


@pytest.mark.gpu
def test_each_library_that_is_installed_says_what_it_takes(tmp_path):
    file = tmp_path / "first_uses.json"
    subprocess.run(
        [sys.executable, "-P", "-m", "peakcast.collectors.measure.first_uses", str(file)], check=True, timeout=300
    )
    answer = json.loads(file.read_text())
    assert answer["context_bytes"] > 100 * 2**20
    taken = {each["step"]: each for each in answer["steps"]}
    for step in ("cublas", "cublas in backward", "adamw: fused", "cross entropy"):
        assert "reason" not in taken[step], taken[step]
    assert taken["cublas"]["kept_bytes"] >= 2**20  # its workspace


@pytest.mark.gpu
@pytest.mark.parametrize("expandable", [False, True])
def test_pytorchs_own_allocator_reserves_what_the_simulated_one_does(expandable):
    from peakcast.collectors.measure.replaying import replayed

    (job,) = expand({"base": {"sequence_length": 256}, "include": [CELLS[1]]})
    timeline = ledger(job, step="steady")
    real = replayed(timeline, expandable_segments=expandable)
    simulated = replay(timeline, Allocator(expandable_segments=expandable))
    assert (real["peak_allocated_bytes"], real["peak_reserved_bytes"]) == (
        simulated.peak_allocated_bytes,
        simulated.peak_reserved_bytes,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("job", load_grid("campaign-layouts")[:12], ids=job_in_words)
def test_one_rank_of_many_never_holds_the_whole_network(job):
    ((_, answer),) = run([{"job": job_to_mapping(job), "ranks": "one"}], 300)
    if "pip install" in answer.get("reason", ""):
        pytest.skip(answer["reason"])
    row = from_row(answer["row"])
    assert (row.outcome, row.collectives, row.spoiled) == ("ok", "fake", ())
    steps = [phase["allocated"] for step in row.environment["readings"]["steps"] for phase in step.values()]
    assert row.peak_allocated_bytes == max(steps)  # not what building it took
