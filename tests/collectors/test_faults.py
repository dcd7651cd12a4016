"""What may befall a collection, each really done: nothing that was finished is lost, and the next run takes up the rest."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.runner import collect
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.measurements import store
from peakcast.printing import answers as render

NAMES = ["gpt2", "pythia-160m", "opt-125m"]
GRID = {"axes": {"architecture": NAMES}, "base": {"sequence_length": 128}}
JOBS = expand(GRID)
GOOD = "return row(question)"
COLLECTOR = """
import json, resource, sys
from pathlib import Path
from peakcast.core import errors
from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.runner import collect
from peakcast.collectors.measure.settings import CollectSettings
shard, work, grid, limit = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    settings = CollectSettings(trace=True, processes=1, timeout_seconds=60)
    print(collect(expand(json.loads(grid)), Path(shard), settings, work=work))
except errors.PeakcastError as error:
    sys.exit(f"peakcast: {error}")
"""


def collector(shard, work, *, limit=0):
    """A collection in a process of its own; `limit`: bytes that a file may have (as on a disk that is full)."""
    command = [sys.executable, "-P", "-c", COLLECTOR, str(shard), work, json.dumps(GRID), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names_in(shard):
    rows, bad = store.read_shard(shard)
    assert all(row.outcome == "ok" for row in rows), [row.environment for row in rows]
    return [row.job.architecture.name for row in rows], bad


def until(condition, seconds=20.0):
    """Whether `condition()` came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def held(folder):
    """A cell that answers for gpt2 and for the others writes its, its parent's and its child's pid, and waits."""
    return f"""
    if question["job"]["architecture"]["name"] != "gpt2":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        part = pathlib.Path({str(folder)!r}) / "part"
        part.write_text(f"{{os.getpid()}} {{os.getppid()}} {{child.pid}}")
        part.rename(part.with_name("pids"))
        time.sleep(60)
    return row(question)
    """


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
@pytest.mark.parametrize("killed", ["collector", "parent", "cell"])
def test_kill_9_loses_no_finished_row_and_leaves_no_process(tmp_path, cell, gone, killed):
    shard, work = tmp_path / "cells.jsonl", cell(held(tmp_path))
    with collector(shard, work) as process:
        assert until((tmp_path / "pids").exists)
        processes = dict(zip(("cell", "parent", "child"), map(int, (tmp_path / "pids").read_text().split()), strict=True))
        (tmp_path / "pids").unlink()
        os.kill({"collector": process.pid, **processes}[killed], signal.SIGKILL)
        if killed != "collector":  # the collector goes on to the third cell
            assert until((tmp_path / "pids").exists)
            assert until(lambda: gone(processes["cell"]) and gone(processes["child"]))
            third = (tmp_path / "pids").read_text().split()
            rows, bad = store.read_shard(shard)
            assert ([row.outcome for row in rows], bad) == (["ok", "failed"], [])
            processes |= {f"third {i}": int(pid) for i, pid in enumerate(third)}
            process.kill()
        process.communicate()
    assert until(lambda: all(map(gone, processes.values()))), processes
    again = collect(JOBS, shard, CollectSettings(trace=True), work=cell(GOOD))
    assert (again.skipped, again.finished) == (1, 2)


def test_a_hang_is_ended_with_everything_in_its_group_before_the_next_cell_runs(tmp_path, cell):
    text = f"""
    name, pids = question["job"]["architecture"]["name"], pathlib.Path({str(tmp_path)!r}) / "pids"
    if name == "pythia-160m":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pids.write_text(f"{{os.getpid()}} {{child.pid}}")
        time.sleep(60)
    if name == "opt-125m":
        alive = [pid for pid in pids.read_text().split() if pathlib.Path("/proc", pid).exists()
                 and "Z (zombie)" not in pathlib.Path("/proc", pid, "status").read_text()]
        if alive:
            raise CollectorError(f"{{alive}} still run")
    return row(question)
    """
    settings = CollectSettings(trace=True, timeout_seconds=1, processes=1)
    summary = collect(JOBS, tmp_path / "cells.jsonl", settings, work=cell(text))
    assert (summary.finished, summary.failed) == (2, 1), summary.reasons
    assert "no answer within 1 s" in summary.reasons[0]


def test_a_full_disk_ends_the_collection_in_a_sentence_with_whole_lines_and_room_resumes_it(tmp_path, cell):
    shard, work = tmp_path / "cells.jsonl", cell(GOOD)
    store.append(shard, store_row())
    limit = shard.stat().st_size * 5 // 2  # room for one more row and a half
    with collector(shard, work, limit=limit) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "cells.jsonl cannot be written: No space left on device" in said
    before = shard.read_bytes()
    assert before.endswith(b"\n")
    assert names_in(shard) == (["gpt2", "gpt2"], [])
    again = collect(JOBS, shard, CollectSettings(trace=True), work=work)
    assert (again.skipped, again.finished) == (1, 2)
    assert shard.read_bytes().startswith(before)


def store_row():
    """A row of another collection, to weigh."""
    from peakcast.measurements.records import Measurement

    return Measurement(job=JOBS[0], gpu="H100-80GB", provenance="traced", source="peakcast", peak_allocated_bytes=1)


@pytest.mark.parametrize(
    ("damage", "unreadable"),
    [
        (lambda data: data[: len(data) - len(data.splitlines()[-1]) // 2], 1),  # a reboot while the last line was written
        (lambda data: data[:-1], 0),  # the same, with only the line's end missing
        (lambda data: data.replace(b'"pythia-160m"', b'"pythia-16\x000m"', 1), 1),  # a block gone bad
        (lambda data: data.replace(b'"peak_allocated_bytes":1,', b'"peak_allocated_bytes":-1,', 1), 1),  # edited
    ],
)
def test_after_a_damaged_line_only_its_cell_runs_again(tmp_path, cell, damage, unreadable):
    shard, work = tmp_path / "cells.jsonl", cell(GOOD)
    collect(JOBS, shard, CollectSettings(trace=True, processes=1), work=work)
    shard.write_bytes(damage(shard.read_bytes()))
    readable = names_in(shard)[0]
    assert len(readable) == 3 - unreadable
    again = collect(JOBS, shard, CollectSettings(trace=True), work=work)
    assert (again.skipped, again.finished, again.unreadable) == (3 - unreadable, unreadable, unreadable)
    assert sorted(names_in(shard)[0]) == sorted(NAMES)
    assert ("1 line of it cannot be read" in render.summary_text(again, shard)) == bool(unreadable)


def test_two_collectors_on_one_file_lose_nothing_and_a_table_has_each_row_once(tmp_path, cell):
    shard, work = tmp_path / "cells.jsonl", cell("time.sleep(0.3); return row(question)")
    with collector(shard, work) as first, collector(shard, work) as second:
        for process in (first, second):
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0, said
    names, bad = names_in(shard)
    assert (set(names), bad) == (set(NAMES), [])
    assert collect(JOBS, shard, CollectSettings(trace=True), work=work).skipped == 3
    store.merge([shard], tmp_path / "table.csv")
    assert sorted(row.job.architecture.name for row in store.read_csv(tmp_path / "table.csv")) == sorted(NAMES)
