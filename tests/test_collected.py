"""What a collection shows: time left, a table and a picture of measured against predicted."""

import pytest

from peakcast import catalog
from peakcast.collectors.measure.runner import CollectionSummary
from peakcast.core.errors import SpecError
from peakcast.doors import collected
from peakcast.doors.collected import Collected, telling_time
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.records import Measurement
from peakcast.models.baseline.ledger import ledger
from peakcast.models.prediction.predict import predict
from peakcast.printing import answers as render


def row(name="gpt2", **changes):
    job = TrainingJob(architecture=catalog.architecture(name), sequence_length=128)
    common = {"job": job, "gpu": "A100-80GB", "provenance": "measured", "source": "peakcast"}
    return Measurement(**common | changes)


def test_time_left_is_at_the_pace_of_the_cells_that_ran(monkeypatch):
    clock = iter([100.0, 110.0, 400.0])
    monkeypatch.setattr(collected.time, "monotonic", lambda: next(clock))
    said = []
    tell = telling_time(said.append)
    for done in (4, 5, 6):  # four were there already
        tell("gpt2", done, 24)
    assert said == [
        "5 of 24, 0 s gone: gpt2",
        "6 of 24, 10 s gone, about 3 min left: gpt2",
        "7 of 24, 5 min gone, about 45 min left: gpt2",
    ]


def test_errors_by_quantity_by_hand(tmp_path):
    point = predict(row().job, catalog.gpu("A100-80GB"), 0)
    truth = {name: getattr(point, name).point for name in ("peak_allocated_bytes", "peak_reserved_bytes")}
    shown = Collected(tmp_path / "a.png")
    shown.add(row(**truth))
    shown.add(row(peak_allocated_bytes=truth["peak_allocated_bytes"] // 2))
    shown.add(row(outcome="out_of_memory", peak_allocated_bytes=1))
    shown.add(row(outcome="failed"))
    shown.finish()
    allocated, reserved = shown.table()
    assert (allocated["quantity"], allocated["cells"], reserved["cells"]) == ("allocated", 2, 1)
    assert allocated["median_error"] == pytest.approx(0.5, abs=1e-6)
    assert allocated["worst_error"] == pytest.approx(1.0, abs=1e-6)
    assert (reserved["median_error"], reserved["worst_error"]) == (0, 0)
    text = render.summary_text(CollectionSummary(total=2, finished=2, errors=shown.table()), tmp_path / "x.jsonl")
    assert "allocated       2   50.00%   95.00% +100.00%  gpt2, sequence_length=128" in text
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_a_trace_is_laid_beside_the_analytical_peak_alone():
    job = row().job
    peak = max(ledger(job, step=step).peak().num_bytes for step in ("first", "steady"))
    traced = row(provenance="traced", peak_allocated_bytes=1)
    assert collected.predicted_bytes(traced) == {"peak_allocated_bytes": peak}


def test_the_picture_is_drawn_again_as_rows_come(tmp_path, monkeypatch):
    monkeypatch.setattr(collected, "REDRAW_SECONDS", 0.0)
    shown, seen = Collected(tmp_path / "a.svg"), []
    monkeypatch.setattr(collected, "replace_file", lambda path, data: seen.append(data.count(b"<use")))
    for size in (10**9, 2 * 10**9):
        shown.add(row(provenance="traced", peak_allocated_bytes=size))
    shown.finish()
    assert len(seen) == 3  # after each row, and at the end
    assert seen[0] < seen[1] == seen[2]


def test_a_picture_of_another_kind_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(SpecError, match=r"must end in \.png or \.svg"):
        Collected(tmp_path / "a.pdf")
