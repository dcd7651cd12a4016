"""How a GPU type that was never measured learns from its own rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peakcast.models.calibration.regressors import GpuMedian, Zero
from peakcast.models.calibration.samples import prepare
from peakcast.models.evaluation.new_hardware import learning_curves

QUANTITY = "peak_allocated_bytes"


@pytest.fixture(scope="module")
def samples(fakes):
    """The same 48 cases on two GPU types, one of which takes 5 % more for a reason that no feature shows."""
    rows = fakes.rows(num_architectures=12, rows_each=4, noise=0.0005, gpus=("A100-80GB",))
    new = [
        replace(row, gpu="H200", peak_allocated_bytes=round(row.peak_allocated_bytes * 1.05), case=row.case + " again")
        for row in rows
    ]
    return prepare([*rows, *new], **fakes.stand_ins).samples


def test_the_error_falls_with_rows_of_the_new_type(samples):
    points = learning_curves(samples, [QUANTITY], lambda: [Zero(), GpuMedian()], num_draws=2)
    curve = {point.num_rows: point for point in points if point.gpu == "H200"}
    assert set(curve) == {0, 5, 10, 20}  # 48 rows: 50 are more than there are
    assert curve[0].median_error == pytest.approx(0.0476, abs=0.001)
    assert curve[20].median_error < 0.02
    assert curve[0].median_error > curve[10].median_error > curve[20].median_error
    assert curve[0].num_judged == 48
    assert curve[20].num_judged == 2 * 28


def test_what_was_shown_is_not_judged_and_draws_repeat(samples):
    once = learning_curves(samples, [QUANTITY], lambda: [Zero()], counts=(5,), num_draws=2)
    again = learning_curves(samples, [QUANTITY], lambda: [Zero()], counts=(5,), num_draws=2)
    assert once == again
    assert {point.num_judged for point in once} == {2 * 43}


def test_cases_that_ran_on_one_type_only_are_not_judged(fakes):
    rows = fakes.rows(num_architectures=6, rows_each=2, gpus=("A100-80GB", "H200"))
    assert learning_curves(prepare(rows, **fakes.stand_ins).samples, [QUANTITY], lambda: [Zero()]) == ()
