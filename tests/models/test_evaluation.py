from __future__ import annotations

import json

import numpy as np
import pytest

from peakcast.models.calibration.regressors import GroupMedian, Ridge, Zero
from peakcast.models.evaluation.evaluation import evaluate
from peakcast.models.evaluation.metrics import Scored, summarise


def quick():
    return [Zero(), GroupMedian(), Ridge(alpha=1.0)]


def cell(measured, point, lower, upper, weight=1.0, **changes):
    facts = {
        "key": "k",
        "case": "c",
        "source": "s",
        "gpu": "H100-80GB",
        "architecture": "a",
        "layout": "single",
        "framework": "torch",
        "quantity": "peak_allocated_bytes",
        "baseline": measured,
        "upper_95": upper,
    }
    return Scored(
        **{**facts, "measured": measured, "point": point, "lower": lower, "upper": upper, "weight": weight, **changes}
    )


def test_the_figures_of_three_rows_by_hand():
    summary = summarise(
        [cell(100, 99, 98, 100), cell(100, 102, 101, 103), cell(100, 110, 90, 130, weight=0.5, architecture="b")]
    )
    assert summary.errors.median == pytest.approx(0.02)
    assert summary.errors.mean == pytest.approx((0.01 + 0.02 + 0.05) / 2.5)
    assert summary.errors.worst == pytest.approx(0.10)
    assert summary.errors.under_predicted == pytest.approx(1 / 2.5)
    assert summary.errors.within_one_percent == pytest.approx(1 / 2.5)
    assert summary.coverage == pytest.approx(1.5 / 2.5)  # the second interval misses
    assert summary.baseline_errors.worst == 0
    assert (summary.num_rows, summary.num_configurations, summary.num_architectures) == (3, 2.5, 2)


@pytest.fixture(scope="module")
def evaluation(fakes):
    rows = fakes.rows(
        num_architectures=16,
        rows_each=4,
        noise=0.002,
        hidden=lambda random, unit: 0.02,
        gpus=("H100-80GB", "A100-80GB"),
    )
    return evaluate(rows, make_candidates=quick, **fakes.stand_ins)


def test_every_row_is_judged_once_in_each_table(evaluation):
    assert evaluation.num_rows == 64
    for split in ("architecture", "model_type", "layout", "gpu"):
        assert evaluation.table("peak_allocated_bytes", split).overall.num_rows == 64
    assert evaluation.table("peak_reserved_bytes") is None


def test_the_residual_beats_the_baseline_on_unseen_architectures(evaluation):
    overall = evaluation.table("peak_allocated_bytes").overall
    assert overall.baseline_errors.median == pytest.approx(0.02, abs=0.003)
    assert overall.errors.median < 0.003
    assert overall.coverage > 0.85
    assert overall.upper_coverage > 0.90


def test_unseen_layouts_and_gpus_get_wider_bars(evaluation):
    widths = {
        split: evaluation.table("peak_allocated_bytes", split).overall.median_half_width
        for split in ("architecture", "layout", "gpu")
    }
    assert widths["layout"] > widths["architecture"]
    assert widths["gpu"] > widths["architecture"]


def test_the_evaluation_is_json(evaluation):
    mapping = json.loads(json.dumps(evaluation.to_mapping(), allow_nan=False))
    assert mapping["tables"][0]["overall"]["errors"]["median"] >= 0


def test_rows_that_do_not_count_are_counted_by_reason(fakes):
    from dataclasses import replace

    good = fakes.rows(num_architectures=4, rows_each=2)
    bad = [
        replace(good[0], provenance="traced"),
        replace(good[0], outcome="out_of_memory"),
        replace(good[0], spoiled=("allocator retries",)),
        replace(good[0], out_of_scope="an encoder"),
        replace(good[0], peak_allocated_bytes=None),
    ]
    result = evaluate([*good, *bad], splits=("architecture",), make_candidates=quick, **fakes.stand_ins)
    assert result.num_rows == 8
    assert result.left_out == {
        "none of the four quantities was measured": 1,
        "out of scope: an encoder": 1,
        "outcome is out_of_memory": 1,
        "provenance is traced": 1,
        "spoiled: allocator retries": 1,
    }


def test_what_the_ledger_does_not_cover_is_left_out_with_its_reason(fakes):
    stand_ins = {**fakes.stand_ins, "scope_of": lambda job: "no." if job.sequence_length == 512 else ""}
    result = evaluate(fakes.rows(), splits=("architecture",), make_candidates=quick, **stand_ins)
    assert result.left_out == {"outside the ledger: no": 12}


def test_repeats_share_one_weight_and_set_the_floor(fakes):
    from dataclasses import replace

    rows = fakes.rows(num_architectures=6, rows_each=2, noise=0.0)
    doubled = replace(rows[0], case="again", peak_allocated_bytes=int(rows[0].peak_allocated_bytes * 1.05))
    result = evaluate([*rows, doubled], splits=("architecture",), make_candidates=quick, **fakes.stand_ins)
    table = result.table("peak_allocated_bytes")
    assert (result.num_rows, result.num_configurations) == (13, 12)
    assert table.overall.num_configurations == pytest.approx(12)
    assert result.floors["peak_allocated_bytes"].worst == pytest.approx(0.05, abs=1e-6)
    named = table.named
    assert [cell.case for cell in named] == ["again"]
    assert "2 runs of this configuration differ by 5.00%" in named[0].known


def test_an_architecture_is_never_on_both_sides(fakes, monkeypatch):
    seen = []

    class Spy(Zero):
        name = "spy"

        def fit(self, x, y, weights, groups):
            seen.append(len(y))
            return self

    evaluate(
        fakes.rows(num_architectures=5, rows_each=3),
        splits=("architecture",),
        make_candidates=lambda: [Spy()],
        **fakes.stand_ins,
    )
    assert set(seen) == {9, 12}  # of 15 rows 3 are held out, and 3 more where what is left is compared


def test_coverage_holds_end_to_end_on_grouped_data(fakes):
    """28 architectures that each sit at their own offset, as real ones do: bars of unseen ones cover 90 %."""
    rows = fakes.rows(
        num_architectures=28,
        rows_each=4,
        noise=0.003,
        hidden=lambda random, unit: 0.01 + 0.006 * float(np.random.default_rng(unit).normal()),
        seed=3,
    )
    result = evaluate(rows, splits=("architecture",), make_candidates=quick, **fakes.stand_ins)
    overall = result.table("peak_allocated_bytes").overall
    assert 0.84 <= overall.coverage <= 0.97
    assert overall.upper_coverage >= 0.90
