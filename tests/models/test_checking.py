"""Whether a calibration still holds: the arithmetic against scipy, the verdicts on rows with a known truth."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from peakcast.jobs.spec import FrozenMapping
from peakcast.models.calibration.fit import fit
from peakcast.models.calibration.samples import prepare
from peakcast.models.evaluation.checking import binomial_interval, check

QUANTITY = "peak_allocated_bytes"


@pytest.mark.parametrize(("successes", "num"), [(0, 7), (3, 10), (10, 10), (45, 50), (180, 200)])
def test_the_interval_is_the_exact_one(successes, num):
    from scipy.stats import binomtest

    expected = binomtest(successes, num).proportion_ci(0.95, method="exact")
    assert binomial_interval(successes, num) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.fixture(scope="module")
def calibration(fakes):
    return fit(fakes.rows(num_architectures=24, noise=0.004, seed=1), "H100-80GB", created="2026-11-21", **fakes.stand_ins)


def checked(rows, calibration, fakes):
    (found,) = check(prepare(rows, **fakes.stand_ins).samples, lambda sample: calibration, [QUANTITY])
    return found


def test_rows_like_those_of_the_fit_confirm_it(fakes, calibration):
    found = checked(fakes.rows(num_architectures=12, noise=0.004, seed=2), calibration, fakes)
    assert found.verdict == "holds"
    assert found.coverage_interval[0] < 0.9 < found.coverage_interval[1]
    assert found.sentences[0] == "The calibration of H100-80GB for allocated memory on H100-80GB holds."
    json.dumps(found.to_mapping(), allow_nan=False)


def test_rows_that_take_five_percent_more_break_it(fakes, calibration):
    rows = fakes.rows(num_architectures=12, noise=0.004, seed=2)
    more = [replace(row, peak_allocated_bytes=round(row.peak_allocated_bytes * 1.05)) for row in rows]
    found = checked(more, calibration, fakes)
    assert found.verdict == "broken"
    assert (found.coverage, found.above_upper_95) == (0, 1)
    assert found.bias == pytest.approx(-0.048, abs=0.003)
    assert "no longer holds" in found.sentences[0]


def test_five_good_rows_confirm_nothing_and_five_bad_ones_are_enough_to_refute(fakes, calibration):
    rows = fakes.rows(num_architectures=5, rows_each=1, noise=0.001, seed=2)
    assert checked(rows, calibration, fakes).verdict == "too few"
    more = [replace(row, peak_allocated_bytes=round(row.peak_allocated_bytes * 1.2)) for row in rows]
    assert checked(more, calibration, fakes).verdict == "broken"


def test_versions_that_were_not_measured_widen_and_are_named(fakes):
    def with_torch(rows, version):
        return [replace(row, job=row.job.replace(versions=FrozenMapping({"torch": version}))) for row in rows]

    old = fit(
        with_torch(fakes.rows(num_architectures=24, noise=0.004), "2.4.1"), "H100-80GB", created="", **fakes.stand_ins
    )
    rows = fakes.rows(num_architectures=12, noise=0.004, seed=2)
    same, newer = (checked(with_torch(rows, version), old, fakes) for version in ("2.4.0", "2.13.0"))
    assert same.outside == {}
    assert newer.outside == {"torch 2.13.0 is none of the measured releases (2.4); bars are widened.": 48}
    assert newer.median_half_width > same.median_half_width
