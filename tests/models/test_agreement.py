"""The ledger beside traced rows: what is compared, and what counts as agreement."""

import dataclasses

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.core.findings import found
from peakcast.measurements.records import Measurement
from peakcast.models.baseline import agreement
from peakcast.models.baseline.agreement import agreements
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.recorded.covering import without_kernels
from peakcast.reports.agreement import agreement_markdown, agreement_text

(JOB,) = expand({"include": [{"architecture": {"name": "gpt2", "num_hidden_layers": 2}, "sequence_length": 128}]})


@pytest.fixture
def row():
    """A row that says of `JOB` what the ledger says."""
    first, steady = ledger(JOB, step="first"), ledger(JOB)
    return Measurement(
        job=JOB,
        gpu="A100-80GB",
        provenance="traced",
        source="peakcast",
        first_step_peak_allocated_bytes=first.peak().num_bytes,
        steady_allocated_bytes=int(steady.totals[-1]),
        phase_peaks={phase.name.lower(): size for phase, size in steady.phase_peaks().items()},
    )


def test_equal_bytes_agree_in_every_phase_and_measured_rows_are_not_asked(row):
    (cell,) = agreements([row, dataclasses.replace(row, provenance="measured")])
    assert set(cell.errors.values()) == {0.0}
    assert len(cell.errors) == 7  # five phases, the first step, and between steps
    assert cell.holds
    assert "1 of 1 cells on one GPU within 0.1%" in agreement_text([cell])


def test_one_phase_that_is_further_off_is_a_miss_that_is_named(row):
    more = row.phase_peaks | {"loss": round(row.phase_peaks["loss"] / 0.99)}
    (cell,) = agreements([dataclasses.replace(row, phase_peaks=more)])
    assert cell.worst == pytest.approx(-0.01, rel=1e-3)
    assert not cell.holds
    text = agreement_text([cell])
    assert "-1.000 %" in text
    assert "loss" in text
    assert "| no |" in agreement_markdown([cell], "agreement")


def test_a_trace_that_failed_or_a_job_out_of_scope_holds_nothing_and_says_why(row):
    failed = dataclasses.replace(row, outcome="failed", environment={"reason": "no such package"})
    compiled = dataclasses.replace(row, job=JOB.replace(compile=True, attention="eager"))
    cells = agreements([failed, compiled])
    assert [cell.holds for cell in cells] == [False, False]
    assert "no such package" in cells[0].reason
    assert "compile=true" in cells[1].reason
    assert "2 cells could not be compared" in agreement_text(cells)


def test_kernels_that_a_recipe_lacks_are_lacked_by_the_trace_too(row, monkeypatch):
    """LFM2's causal_conv1d, for one: what else is not covered still counts."""
    lacked = without_kernels([("causal_conv1d_fn", "causal_conv1d")])
    monkeypatch.setattr(agreement, "lacked_kernels", lambda job: lacked)
    other = found("its images are not counted.", "images")
    for findings, reason in ((lacked, ""), ((*lacked, other), other.sentence)):
        monkeypatch.setattr(agreement, "scope_findings", lambda job, findings=findings: findings)
        (cell,) = agreements([row])
        assert cell.reason == reason
        assert cell.holds == (not reason)
