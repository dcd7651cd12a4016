"""Cells of several real ranks: torchrun and gloo on this machine's CPU, every rank in a process of its own."""

import time

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.runner import collect, timelines_folder
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.collectors.measure.worker import has_ranks
from peakcast.collectors.processes import gang
from peakcast.core.errors import CollectorError
from peakcast.measurements import store
from peakcast.timelines.files import read_timelines

pytest.importorskip("transformers")
TINY = {
    "model_type": "llama", "name": "tiny", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 200, "tie_word_embeddings": False,
}  # fmt: skip


def cells(*layouts, **changes):
    base = {"architecture": TINY, "sequence_length": 32, **changes}
    return expand({"base": base, "include": [{"parallelism": {"data_parallel_size": 2, **x}} for x in layouts]})


STAGES = {"sharding": "fsdp2", "pipeline_parallel_size": 2}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("jobs", "ranks", "with_loss"),
    [
        (cells({}), 2, {0, 1}),
        # two stages of a pipeline, each sharded over two
        (cells(STAGES, framework="torch", gradient_accumulation_steps=2), 4, {2, 3}),
    ],
    ids=["replicas", "stages"],
)
def test_each_real_rank_is_traced_as_a_fake_one_would_be(tmp_path, jobs, ranks, with_loss):
    shard = tmp_path / "two.shard.jsonl"
    summary = collect(jobs, shard, CollectSettings(trace=True, ranks="real", history=True, timeout_seconds=200))
    assert (summary.finished, summary.failed) == (1, 0), summary.reasons
    rows, bad = store.read_shard(shard)
    assert sorted((row.rank, row.collectives) for row in rows) == [(rank, "gloo") for rank in range(ranks)]
    assert (len({row.key for row in rows}), bad) == (ranks, [])
    assert {row.rank for row in rows if "loss" in row.phase_peaks} == with_loss
    for row in rows:  # what one rank of fake ones would say is what each real one does, but for the rounding of its shard
        steps = read_timelines(timelines_folder(shard) / f"{row.key}.json.gz")
        assert max(steps[step].peak().num_bytes for step in steps) == row.peak_allocated_bytes
    assert collect(jobs, shard, CollectSettings(trace=True, ranks="real")).skipped == 1


RANK = """
import os, pathlib, signal, time
from peakcast.collectors.processes import gang
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.core.errors import CollectorError
from peakcast.measurements.records import Measurement

def ranks(question):
    return gang.run(question, 2, "several:one")

def one(question):
    folder = pathlib.Path({folder!r})
    written = folder / f"writing{{gang.rank()}}"
    written.write_text(str(os.getpid()))
    written.replace(folder / f"pid{{gang.rank()}}")
    while not (folder / "pid0").exists():  # a rank that fails at once would end the other before it began
        time.sleep(0.01)
    {begins}
    row = dict(job=job_from_mapping(question["job"]), gpu="A100-80GB", provenance="traced", source="peakcast",
               rank=gang.rank(), collectives="gloo")
    if gang.rank() == 1:
        {does}
    {waits}
    return Measurement(**row)
"""


@pytest.fixture
def several(tmp_path, monkeypatch):
    """The name of work in which rank 1 `does` something of its own while the other waits for it: in a collective, or in
    one that is `feigned`, for which no rank imports torch."""

    def written(does, feigned=True):
        begins = "" if feigned else "import torch.distributed as dist; dist.init_process_group('gloo')"
        waits = "while not (folder / 'done').exists(): time.sleep(0.01)" if feigned else "dist.barrier()"
        program = RANK.format(folder=str(tmp_path), begins=begins, does=does, waits=waits)
        (tmp_path / "several.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "several:ranks"

    return written


@pytest.mark.slow
@pytest.mark.parametrize("feigned", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_each_rank_hands_back_a_row_and_the_cell_is_not_run_again(tmp_path, several, feigned):
    shard = tmp_path / "two.shard.jsonl"
    work = several("(folder / 'done').touch()", feigned)
    summary = collect(cells({}), shard, CollectSettings(trace=True, timeout_seconds=120), work=work)
    assert (summary.finished, summary.failed) == (1, 0), summary.reasons
    rows, bad = store.read_shard(shard)
    assert sorted((row.rank, row.collectives) for row in rows) == [(0, "gloo"), (1, "gloo")]
    assert (len({row.key for row in rows}), bad) == (2, [])
    assert collect(cells({}), shard, CollectSettings(trace=True), work=work).skipped == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "feigned", "timeout_seconds", "reason"),
    [
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            False,
            120,
            "rank 1 ended with exit code -9; the others of 2 were ended",
            marks=pytest.mark.whole,
        ),
        ("raise CollectorError('this rank cannot.')", True, 120, "rank 1 of 2: this rank cannot."),
        pytest.param("time.sleep(600)", False, 15, "no answer within 15 s", marks=pytest.mark.whole),
    ],
)
def test_a_rank_that_is_killed_fails_or_hangs_ends_the_cell_and_the_other_rank(
    tmp_path, several, gone, does, feigned, timeout_seconds, reason
):
    started = time.monotonic()
    shard = tmp_path / "cells.jsonl"
    settings = CollectSettings(trace=True, timeout_seconds=timeout_seconds)
    summary = collect(cells({}), shard, settings, work=several(does, feigned))
    assert (summary.finished, summary.failed) == (0, 1)
    assert reason in summary.reasons[0]
    assert time.monotonic() - started < 90
    deadline = time.monotonic() + 20
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(map(gone, pids))
    (row,) = store.read_shard(shard)[0]
    assert row.outcome == "failed"


@pytest.mark.slow
def test_a_rank_out_of_memory_is_the_cells_row(tmp_path, several):
    shard = tmp_path / "cells.jsonl"
    work = several("return Measurement(**row, outcome='out_of_memory', peak_allocated_bytes=7)")
    summary = collect(cells({}), shard, CollectSettings(trace=True, timeout_seconds=120), work=work)
    assert (summary.finished, summary.out_of_memory, summary.failed) == (0, 1, 0), summary.reasons
    (row,) = store.read_shard(shard)[0]
    assert (row.rank, row.outcome, row.peak_allocated_bytes) == (1, "out_of_memory", 7)
    assert collect(cells({}), shard, CollectSettings(trace=True), work=work).skipped == 1


def test_all_ranks_run_only_where_there_are_gpus_enough(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert has_ranks({"ranks": "auto"}, 2)
    assert not has_ranks({"ranks": "one"}, 2)
    assert not has_ranks({}, 4)
    assert not has_ranks({"trace": True}, 2)
    assert has_ranks({"trace": True, "ranks": "real"}, 2)
    with pytest.raises(CollectorError, match="needs a GPU for each of 4 ranks and 2 are here; use 'auto'"):
        has_ranks({"ranks": "real"}, 4)
    with pytest.raises(CollectorError, match="ranks='all' must be one of auto, real, one, or numbers"):
        collect([], "x", CollectSettings(ranks="all"))


def test_a_process_that_torchrun_has_not_started_is_rank_0(monkeypatch):
    assert (gang.launched(), gang.rank(), gang.local_rank()) == (False, 0, 0)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (gang.launched(), gang.rank(), gang.local_rank()) == (True, 5, 1)
