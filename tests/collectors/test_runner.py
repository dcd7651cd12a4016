"""The runner keeps every finished row and survives what a cell may do. The cells here are small programs."""


import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.runner import collect
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.core.errors import CollectorError
from peakcast.measurements import store

JOBS = expand({"axes": {"architecture": ["gpt2", "pythia-160m", "opt-125m"]}, "base": {"sequence_length": 128}})
GOOD = "print('noise'); return row(question)"


def test_each_row_is_on_disk_before_the_next_cell_and_a_second_run_skips_them(tmp_path, cell):
    shard = tmp_path / "cells.jsonl"
    seen = []

    def progress(cell, done, total):
        seen.append((done, total, len(store.read_shard(shard)[0]) if shard.exists() else 0))

    first = collect(JOBS, shard, CollectSettings(trace=True, processes=1), work=cell(GOOD), progress=progress)
    assert (first.total, first.finished, first.failed) == (3, 3, 0)
    assert seen == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    again = collect(JOBS, shard, CollectSettings(trace=True), work=cell(GOOD))
    assert (again.skipped, again.finished) == (3, 0)


def test_repeats_come_after_all_first_runs_and_are_rows_of_their_own(tmp_path, cell):
    shard = tmp_path / "cells.jsonl"
    collect(JOBS[:2], shard, CollectSettings(trace=True, processes=1), work=cell(GOOD))
    again = collect(JOBS[:2], shard, CollectSettings(trace=True, processes=1, repeats=3), work=cell(GOOD))
    assert (again.total, again.skipped, again.finished) == (6, 2, 4)
    rows, _ = store.read_shard(shard)
    assert [row.case for row in rows] == ["", "", "repeat 2", "repeat 2", "repeat 3", "repeat 3"]
    assert len({row.key for row in rows}) == 6  # a table keeps each


def test_a_cell_does_not_search_what_its_parent_has_imported_for_cycles(tmp_path, cell):
    text = "import gc; assert gc.isenabled() and gc.get_freeze_count() > 9 * len(gc.get_objects()); return row(question)"
    assert collect(JOBS[:1], tmp_path / "cells.jsonl", CollectSettings(trace=True), work=cell(text)).finished == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("time.sleep(60)", "no answer within 1 s"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)", "ended with exit code -9"),
        ("raise CollectorError('this cannot be.')", "this cannot be."),
        ("sys.exit(7)", "SystemExit: 7"),
        ("os._exit(7)", "exit code 7 and its answer cannot be read"),
        ("return 'no row at all'", "AttributeError"),
    ],
)
def test_a_cell_that_hangs_dies_or_answers_nonsense_is_a_row_that_says_so(tmp_path, cell, text, reason):
    shard = tmp_path / "cells.jsonl"
    summary = collect(JOBS[:1], shard, CollectSettings(trace=True, timeout_seconds=1), work=cell(text))
    rows, bad = store.read_shard(shard)
    assert (summary.failed, len(rows), bad) == (1, 1, [])
    assert rows[0].outcome == "failed"
    assert reason in rows[0].environment["reason"]
    # a failed cell is tried again
    assert collect(JOBS[:1], shard, CollectSettings(trace=True), work=cell(GOOD)).finished == 1


def test_a_hang_is_killed_with_its_children(tmp_path, cell, gone):
    mark = tmp_path / "child"
    text = f"""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path({str(mark)!r}).write_text(str(child.pid))
    time.sleep(600)
    """
    summary = collect(JOBS[:1], tmp_path / "cells.jsonl", CollectSettings(trace=True, timeout_seconds=2), work=cell(text))
    assert summary.failed == 1
    assert gone(int(mark.read_text()))


def test_the_budget_stops_between_cells(tmp_path, cell):
    slow = "time.sleep(0.6); return row(question)"
    settings = CollectSettings(trace=True, budget_minutes=0.005, processes=1)
    summary = collect(JOBS, tmp_path / "cells.jsonl", settings, work=cell(slow))
    assert summary.finished >= 1
    assert summary.left == 3 - summary.finished > 0


def test_bad_options_are_refused(tmp_path):
    with pytest.raises(CollectorError, match=r"budget_minutes=-1 must be above 0"):
        collect(JOBS, tmp_path / "x.jsonl", CollectSettings(budget_minutes=-1, trace=True))


@pytest.mark.usefixtures("from_the_warm_parent")
def test_without_a_gpu_nothing_is_recorded_and_the_message_says_what_to_do(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    shard = tmp_path / "cells.jsonl"
    with pytest.raises(CollectorError, match=r"no CUDA GPU is available here; trace instead"):
        collect(JOBS[:1], shard, CollectSettings())
    assert not shard.exists()
