"""`peakcast watch`: a real run's snapshot beside its prediction, and the row that it makes. There is no GPU here; the
recording is of a real one (docs/examples), and what the script's own hook asks of torch is looked at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import peakcast
from peakcast import api
from peakcast.collectors.machine import probes
from peakcast.collectors.stacks.steps import observing
from peakcast.commands import cli
from peakcast.core.errors import RecordError
from peakcast.doors.proposing import _doubts
from peakcast.histories.files import read_histories
from peakcast.measurements import store

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
STEP, DECODER = EXAMPLES / "recorded_step.jsonl.gz", EXAMPLES / "decoder.yaml"


def test_the_recorded_peaks_are_those_of_the_history_and_the_bars_those_of_predict() -> None:
    found = api.watch(DECODER, "A100-80GB", snapshot=STEP)
    (replayed,) = api.replay(STEP).gpus
    predicted = api.predict(DECODER, "A100-80GB")
    assert found.row.peak_reserved_bytes == replayed.recorded_peak_reserved_bytes
    assert found.row.peak_allocated_bytes == replayed.peak_allocated_bytes
    assert found.prediction.peak_allocated_bytes == predicted.peak_allocated_bytes
    assert not found.inside["peak_allocated_bytes"]  # its softmax is written by hand
    bar, recorded = predicted.peak_reserved_bytes, replayed.recorded_peak_reserved_bytes
    assert found.inside["peak_reserved_bytes"] == (bar.lower <= recorded <= bar.upper)
    assert (found.row.provenance, found.row.gpu, found.row.case) == ("measured", "A100-80GB", STEP.name)


def test_nothing_is_stored_unless_a_file_is_named_and_then_it_reads_back(tmp_path: Path) -> None:
    api.watch(DECODER, "A100-80GB", snapshot=STEP)
    assert list(tmp_path.iterdir()) == []
    shard = tmp_path / "mine.shard.jsonl"
    found = api.watch(DECODER, "A100-80GB", snapshot=STEP, append_to=shard)
    assert store.read_shard(shard) == ([found.row], [])


def test_one_step_is_no_row_that_counts() -> None:
    """The optimizer's states are made at the end of the first step, so the peak comes in the second."""
    row = api.watch(DECODER, "A100-80GB", snapshot=STEP).row
    assert not row.counts
    (doubt,) = row.spoiled
    assert doubt.startswith("one optimizer step is seen in the recording")


def test_a_recording_of_two_steps_that_the_simulation_follows_has_nothing_against_it() -> None:
    (once,) = read_histories(STEP)
    (replayed,) = api.replay(STEP).gpus
    assert replayed.agrees
    assert _doubts(replace(once, events=once.events * 2), replayed) == []
    (doubt,) = _doubts(replace(once, events=once.events * 2), replace(replayed, same_place=0))
    assert doubt.startswith("the simulated allocator does not do what was recorded")


def test_the_command_exits_with_3_outside_the_bar_and_prints_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["watch", str(DECODER), "--snapshot", str(STEP), "--gpu", "A100-80GB"]
    assert cli._run(asked) == 3
    assert "OUTSIDE the bar" in capsys.readouterr().out
    assert cli._run([*asked, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["row"]["peak_allocated_bytes"] == found["peak_allocated_bytes"]["recorded"]
    assert cli._run(["watch", str(DECODER), "--snapshot", "nothing.pickle", "--gpu", "A100-80GB"]) == 2


def test_a_watched_run_writes_its_history_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(observing.Observation, "gpu_name", staticmethod(lambda: "NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(probes, "allocator_peaks", lambda: {"allocated": 2**31, "reserved": 2**31})
    monkeypatch.setattr(probes, "allocator_counts", lambda: {"num_alloc_retries": 0, "num_ooms": 0})
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda **options: asked.append(("record", options)))
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda file: asked.append(("dump", file)))
    lines: list[str] = []
    with peakcast.watch("gpt2", snapshot=tmp_path / "run.pickle", say=lines.append):
        assert asked == [("record", {"max_entries": observing.MOST_EVENTS})]
    assert asked[1:] == [("dump", str(tmp_path / "run.pickle")), ("record", {"enabled": None})]
    assert str(tmp_path / "run.pickle") in lines[-1]
    with pytest.raises(RecordError, match="give a file in a folder that is there"):
        peakcast.watch("gpt2", snapshot=tmp_path / "nowhere" / "run.pickle")
