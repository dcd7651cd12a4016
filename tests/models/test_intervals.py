"""The bars: equal to crepes and MAPIE where the method coincides, and covering as promised on data with a known truth."""

from __future__ import annotations

import json

import numpy as np
import pytest

from peakcast.core.errors import CalibrationError
from peakcast.models.calibration.evidence import evidence_weights
from peakcast.models.calibration.intervals import Intervals, student_t

ALL = ("all",)


def one_row_each(num: int) -> list[str]:
    return [f"net{i}" for i in range(num)]


@pytest.mark.parametrize("num", [45, 57, 200, 333])
def test_one_row_per_architecture_is_split_conformal_prediction_as_in_crepes(num):
    from crepes import ConformalRegressor

    residuals = np.random.default_rng(num).standard_t(4, num)
    oracle = ConformalRegressor().fit(residuals=residuals).predict_int(np.zeros(1), confidence=0.9)
    bar = Intervals().fit(residuals, one_row_each(num), [ALL] * num).bars_["all"]
    assert bar.half_width == oracle[0, 1] == -oracle[0, 0]


@pytest.mark.filterwarnings("ignore")  # MAPIE's own
def test_one_row_per_architecture_is_split_conformal_prediction_as_in_mapie():
    from mapie.regression import SplitConformalRegressor
    from sklearn.dummy import DummyRegressor

    x, y = np.zeros((120, 1)), np.random.default_rng(1).normal(size=120)
    model = DummyRegressor(strategy="constant", constant=0.0).fit(x, y)
    mapie = SplitConformalRegressor(model, confidence_level=0.9, prefit=True).conformalize(x, y)
    bounds = mapie.predict_interval(x[:1])[1][0, :, 0]
    bar = Intervals().fit(y, one_row_each(120), [ALL] * 120).bars_["all"]
    assert bar.half_width == pytest.approx(bounds[1], abs=1e-12)


def test_mondrian_groups_are_crepes_bins():
    from crepes import ConformalRegressor

    random = np.random.default_rng(2)
    bins = np.repeat(["quiet", "loud"], 150)
    residuals = random.normal(size=300) * np.where(bins == "loud", 5.0, 1.0)
    oracle = ConformalRegressor().fit(residuals=residuals, bins=bins)
    fitted = Intervals(min_group_rows=0).fit(residuals, one_row_each(300), [(name, "all") for name in bins])
    for name in ("quiet", "loud"):
        expected = oracle.predict_int(np.zeros(1), bins=np.array([name]), confidence=0.9)[0, 1]
        assert fitted.bars_[name].half_width == expected


def test_the_larger_group_counts_as_some_rows_beside_a_groups_own():
    """40 rows of 1 and 160 of 10. All 200 count as 20: 4 of 1 and 16 of 10. With the quiet group's own, 44 of 60 are 1,
    so that 54.9, which is 90 % of 61, is among the 10. With 4,000 quiet rows it is among the 1."""
    for num, quiet in ((40, 10.0), (4000, 1.0)):
        groups = [("quiet", "all")] * num + [("loud", "all")] * 160
        bars = Intervals().fit([1.0] * num + [10.0] * 160, one_row_each(num + 160), groups).bars_
        assert (bars["quiet"].half_width, bars["loud"].half_width) == (quiet, 10.0)


def test_an_architecture_of_n_rows_says_as_much_as_root_n_rows():
    units = np.repeat([0, 1, 2], [1, 4, 9])
    assert evidence_weights(units, np.ones(14)) == pytest.approx([1.0] + [1 / 2] * 4 + [1 / 3] * 9)
    bar = Intervals().fit(np.arange(14.0), units.astype(str), [ALL] * 14).bars_["all"]
    assert bar.effective_rows == pytest.approx(1 + 2 + 3)


def test_repeats_of_a_row_change_nothing():
    random = np.random.default_rng(4)
    residuals, units = random.normal(size=60), np.repeat(np.arange(30), 2)
    once = Intervals().fit(residuals, units.astype(str), [ALL] * 60).bars_["all"]
    thrice = np.repeat(residuals, 3), np.repeat(units, 3).astype(str), [ALL] * 180, np.full(180, 1 / 3)
    again = Intervals().fit(*thrice).bars_["all"]
    assert again.effective_rows == pytest.approx(once.effective_rows)
    assert (again.half_width, again.upper) == (once.half_width, once.upper)


@pytest.mark.parametrize(("num", "rows"), [(12, 20), (24, 20), (60, 10)])
@pytest.mark.parametrize("offset", [0.25, 1.0, 3.0])
def test_bars_cover_rows_of_unseen_architectures(num, rows, offset):
    """Rows of one architecture share an offset and a scale; 60 data sets, each judged on 150 new architectures. A dozen
    whose rows agree nearly entirely (offset 3) are worth less than √n rows each, and 2 points fewer are covered."""
    random = np.random.default_rng(6)

    def draw(count):
        units = np.repeat(np.arange(count), rows)
        scale = np.exp(random.normal(0, 0.4, count))
        return units, random.normal(0, offset, count)[units] + random.normal(size=count * rows) * scale[units]

    inside, below = [], []
    for _ in range(60):
        units, residuals = draw(num)
        bar = Intervals().fit(residuals, units.astype(str), [ALL] * len(units)).bars_["all"]
        _, new = draw(150)
        inside.append((np.abs(new) <= bar.half_width).mean())
        below.append((new <= bar.upper).mean())
    short = 0.02 if (num, offset) == (12, 3.0) else 0.0
    assert 0.89 - short <= np.mean(inside) <= 0.93 - short
    assert 0.945 - short <= np.mean(below) <= 0.97 - short


def test_too_few_architectures_get_a_wider_parametric_bound_and_two_get_none():
    random = np.random.default_rng(7)
    residuals = random.normal(size=20)
    few = Intervals().fit(residuals, np.repeat(["a", "b", "c", "d"], 5), [ALL] * 20).bars_["all"]
    assert few.parametric
    assert few.half_width > np.quantile(np.abs(residuals), 0.9)
    assert Intervals().fit([0.1, 0.2], ["a", "b"], [ALL] * 2).bars_ == {}


def test_a_group_of_few_rows_has_the_bar_of_the_next_larger_group_that_has_enough():
    random = np.random.default_rng(8)
    residuals = np.concatenate([random.normal(size=100), [9.0, 9.0, 9.0, 9.0]])
    groups = [("fw/big", "fw", "kind", "all")] * 100 + [("fw/one/small", "fw/one", "kind", "all")] * 4
    fitted = Intervals().fit(residuals, one_row_each(104), groups)
    assert set(fitted.bars_) == {"fw/big", "fw", "kind", "all"}
    assert fitted.bar(("fw/one/small", "fw/one", "kind", "all")) == ("kind", fitted.bars_["kind"])
    assert fitted.bar(("fw/unseen", "fw", "kind", "all")) == ("fw", fitted.bars_["fw"])


def test_the_upper_bound_of_few_rows_lies_above_what_was_under_predicted():
    scores = [-0.1] * 60 + [3.0] * 4  # 1 of 16 is missed by far, and by far too low
    fitted = Intervals().fit(scores, [f"net{row % 4}" for row in range(64)], [ALL] * 64).bars_["all"]
    assert fitted.parametric
    assert fitted.upper == 3.0


def test_json_and_back():
    random = np.random.default_rng(9)
    fitted = Intervals().fit(random.normal(size=40), one_row_each(40), [("a", "all")] * 40)
    again = Intervals.from_mapping(json.loads(json.dumps(fitted.to_mapping())))
    assert again.bars_ == fitted.bars_
    damaged = fitted.to_mapping()
    damaged["bars"]["all"]["half_width"] = -1
    with pytest.raises(CalibrationError, match=r"half_width=-1 must lie in"):
        Intervals.from_mapping(damaged)


def test_scores_divided_by_the_expected_error_are_crepes_normalised_ones():
    from crepes import ConformalRegressor

    random = np.random.default_rng(10)
    expected = 1 + random.integers(0, 5, 120) / 2
    residuals = random.normal(size=120) * expected
    fitted = Intervals().fit(residuals, one_row_each(120), [ALL] * 120, None, expected)
    oracle = ConformalRegressor().fit(residuals=residuals, sigmas=expected)
    bar = oracle.predict_int(np.zeros(1), sigmas=np.array([3.0]), confidence=0.9)[0, 1]
    assert fitted.bars_["all"].half_width * 3 == pytest.approx(bar)


@pytest.mark.parametrize("growth", [0.0, 0.5, 1.0])
def test_bars_cover_near_and_far_where_errors_grow_as_expected(growth):
    """24 architectures, each predicted from as far outside as new ones are: coverage is as promised, near and far."""
    random = np.random.default_rng(12)

    def draw(count):
        expected = 1 + growth * np.repeat(random.integers(0, 5, count), 10)
        return expected, random.normal(size=count * 10) * expected

    near, far = [], []
    for _ in range(60):
        expected, residuals = draw(24)
        units = np.repeat(np.arange(24), 10).astype(str)
        bar = Intervals().fit(residuals, units, [ALL] * 240, None, expected).bars_["all"]
        new, missed = draw(150)
        covered = np.abs(missed) <= bar.half_width * new
        near.append(covered[new <= np.median(new)].mean())
        far.append(covered[new >= np.median(new)].mean())
    assert 0.88 <= np.mean(near) <= 0.95
    assert 0.88 <= np.mean(far) <= 0.95


@pytest.mark.parametrize(("degrees", "quantile"), [(3, 2.3534), (5, 2.0150), (10, 1.8125), (30, 1.6973)])
def test_student_quantiles(degrees, quantile):
    assert student_t(0.95, degrees) == pytest.approx(quantile, rel=0.01)
