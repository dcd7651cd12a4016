"""Decisions counted by hand, and the promise that a `yes` rests on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peakcast.answers.prediction import QUANTITIES, Interval
from peakcast.core.units import GIB
from peakcast.models.calibration.regressors import GroupMedian, Zero
from peakcast.models.calibration.samples import prepare
from peakcast.models.evaluation.decisions import OUTCOMES, decisions_of
from peakcast.models.evaluation.evaluation import evaluate

QUANTITY = "peak_allocated_bytes"


def bar(lower, upper):
    parts = {"baseline": lower, "point": lower, "lower": lower, "upper": upper, "upper_95": upper}
    return Interval(**{name: round(value * GIB) for name, value in parts.items()})


def answer(lower, upper):
    return dict.fromkeys(QUANTITIES, bar(lower, upper))


def test_a_table_of_four_rows_by_hand(fakes):
    rows = fakes.rows(num_architectures=4, rows_each=1)
    peaks = (1.2, 2.5, 3.5, 5.0)
    rows = [replace(row, peak_allocated_bytes=round(peak * GIB)) for row, peak in zip(rows, peaks, strict=True)]
    samples = sorted(prepare(rows, **fakes.stand_ins).samples, key=lambda sample: sample.row.peak_allocated_bytes or 0)
    bars = {0: answer(1.1, 1.4), 1: answer(1.5, 1.8), 2: answer(3.2, 4.5), 3: answer(4.2, 6.5)}
    (found,) = decisions_of(samples, bars, [QUANTITY])
    asked = [decision.capacity_bytes / GIB for decision in found.by_capacity]
    assert asked == [1.5, 2, 3, 4]
    at = dict(zip(asked, found.by_capacity, strict=True))
    assert (at[1.5].yes_fits, at[1.5].uncertain_too_big, at[1.5].no_too_big) == (1, 1, 2)
    assert (at[2].yes_fits, at[2].yes_too_big, at[2].no_too_big) == (1, 1, 2)  # the second was said to need 1.8
    assert (at[4].yes_fits, at[4].uncertain_fits, at[4].no_too_big) == (2, 1, 1)
    assert (at[2].precision, at[2].recall, at[2].no_recall) == (1 / 2, 1, 2 / 3)
    assert found.total.num_asked == 16
    assert found.above_upper_95 == 1 / 4


def test_the_runs_themselves_say_what_fitted(fakes):
    good = fakes.rows(num_architectures=6, rows_each=2)
    huge = replace(
        good[0],
        job=good[0].job.replace(micro_batch_size=4096, sequence_length=8192),
        outcome="out_of_memory",
        peak_allocated_bytes=None,
    )
    result = evaluate(
        [*good, huge], splits=("architecture",), make_candidates=lambda: [Zero(), GroupMedian()], **fakes.stand_ins
    )
    assert result.num_rows == 12
    assert result.left_out == {"outcome is out_of_memory": 1}
    outcomes = next(found for found in result.decisions if found.quantity == OUTCOMES)
    assert outcomes.num_rows == 13
    assert outcomes.total.no_too_big == 1
    assert outcomes.total.yes_fits == pytest.approx(12)
    assert outcomes.total.precision == outcomes.total.no_recall == 1


def test_a_yes_is_right_as_often_as_the_bound_promises(fakes):
    rows = fakes.rows(num_architectures=30, rows_each=4, noise=0.01, seed=5)
    result = evaluate(rows, splits=("architecture",), make_candidates=lambda: [Zero()], **fakes.stand_ins)
    found = result.decisions[0]
    assert found.above_upper_95 <= 0.08
    assert found.total.precision >= 0.98
    assert found.total.recall > 0.9
