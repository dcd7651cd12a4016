"""Several collectors of one shard, a shard that cannot be written, and collectors that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.runner import collect
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.core.errors import CollectorError, RecordError, SpecError
from peakcast.measurements import store

GRID = {"axes": {"sequence_length": [64 * (i + 1) for i in range(12)]}, "base": {"architecture": "gpt2"}}
JOBS = expand(GRID)
COLLECTOR = """
import json, sys
from pathlib import Path
from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.runner import collect
from peakcast.collectors.measure.settings import CollectSettings
shard, work, grid = sys.argv[1:]
told = lambda row: print(row.job.sequence_length, flush=True)
settings = CollectSettings(trace=True, processes=2)
print(collect(expand(json.loads(grid)), Path(shard), settings, work=work, on_row=told).elsewhere)
"""


def collector(shard, work):
    """A collection in a process group of its own, which prints each row that it says is on disk."""
    command = [sys.executable, "-P", "-c", COLLECTOR, str(shard), work, json.dumps(GRID)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_two_collectors_share_the_cells(tmp_path, cell):
    shard, work = tmp_path / "cells.jsonl", cell("time.sleep(0.3); return row(question)")
    both = [collector(shard, work) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in both]
    rows, bad = store.read_shard(shard)
    assert bad == []
    assert Counter(row.job.sequence_length for row in rows) == dict.fromkeys((job.sequence_length for job in JOBS), 1)
    assert all(len(words) > 1 for words in said)  # neither did all of them


def test_what_cannot_be_written_is_noticed_before_the_first_cell(tmp_path, cell):
    began = []
    (tmp_path / "file").write_text("")
    for shard in (tmp_path, tmp_path / "file" / "x.jsonl", "/proc/x.jsonl", "/dev/full"):
        work = cell("return row(question)")
        with pytest.raises(RecordError, match=r"cannot be (read|written)"):
            collect(JOBS, type(tmp_path)(shard), CollectSettings(trace=True), work=work, progress=began.append)
    assert began == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"ranks": "99"}, CollectorError, "ranks='99' names no rank of gpt2, sequence_length=64, which has 1"),
        ({"timeout_seconds": float("inf")}, CollectorError, "timeout_seconds=inf must be above 0 and finite"),
        ({"timeout_seconds": float("nan")}, CollectorError, "timeout_seconds=nan must be above 0 and finite"),
        ({"budget_minutes": float("inf")}, CollectorError, "budget_minutes=inf must be above 0 and finite"),
        ({"processes": 100_000}, SpecError, "processes=100,000 must be from 1 to"),
        ({"engine_options": {"processes": 100_000}}, SpecError, "processes=100,000 must be from 1 to"),
    ],
)
def test_options_that_would_never_end_or_mean_nothing_are_refused(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        collect(JOBS, tmp_path / "x.jsonl", CollectSettings(trace=True, **options))


def test_ray_is_asked_for_no_gpu_by_a_trace_and_for_none_that_it_lacks(monkeypatch, tmp_path, cell):
    ray = pytest.importorskip("ray")
    from peakcast.collectors.measure import runner
    from peakcast.collectors.processes.engines import ray as engine

    asked = {}
    monkeypatch.setattr(runner, "find_engine", lambda name: lambda *_, **options: iter(asked.update(options) or ()))
    collect(JOBS, tmp_path / "x.jsonl", CollectSettings(trace=True, engine="ray"))
    assert asked["num_gpus"] == 0
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    with pytest.raises(CollectorError, match="needs num_gpus=1 and the Ray cluster has 0; trace instead"):
        engine._check_gpus(1.0)


@pytest.mark.attacks
def test_a_collector_killed_at_50_random_moments_loses_nothing(tmp_path, cell, record_property):
    """Every row that it said was on disk is there when it is killed, and whole; a last run completes the rest."""
    record_property("attacks", 50)
    record_property("kind", "collectors killed at random moments")
    draw = random.Random(0)
    shard, work = tmp_path / "cells.jsonl", cell("time.sleep(0.4); return row(question)")
    told: set[str] = set()
    for number in range(50):
        process = collector(shard, work)
        time.sleep(draw.uniform(0.2, 2.2))
        os.killpg(process.pid, signal.SIGKILL)
        told.update(process.communicate()[0].split()[:12])
        kept = [str(row.job.sequence_length) for row in store.read_shard(shard)[0]]
        assert told <= set(kept) | {"0"}, number
        assert len(kept) == len(set(kept)), number
        if len(kept) == len(JOBS):  # begin anew: the moments are what is tried
            shard.unlink()
            told = set()
    process = collector(shard, work)
    assert process.communicate(timeout=120)[0].split()[-1] == "0"
    assert {row.job.sequence_length for row in store.read_shard(shard)[0]} == {job.sequence_length for job in JOBS}
