from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from peakcast.core.errors import CalibrationError
from peakcast.models.calibration.features import FEATURES, MONOTONE
from peakcast.models.calibration.regressors import (
    BoostedTrees,
    GpuMedian,
    GroupMedian,
    HiddenBytes,
    Ridge,
    Zero,
    regressor_from_mapping,
)
from peakcast.models.calibration.residual import (
    Residual,
    assign_folds,
    matrix,
    simplest_in_every_split,
    within_one_standard_error,
)
from peakcast.models.calibration.trees import Trees

NUM_FEATURES = len(FEATURES)


def make(num_units=15, each=8, seed=0):
    random = np.random.default_rng(seed)
    rows = [dict.fromkeys(FEATURES, 0.0) for _ in range(num_units * each)]
    for row in rows:
        row["gib_over_start"] = float(random.uniform(0, 1))
        row["log2_tokens"] = float(random.integers(8, 14))
        row["num_parallel_axes"] = 1.0
    units = [f"net{i // each}" for i in range(len(rows))]
    groups = ["torch/ddp" if i % 2 else "torch/fsdp2" for i in range(len(rows))]
    return rows, units, groups, random


@pytest.mark.parametrize("seed", range(3))
def test_pure_noise_moves_the_baseline_by_a_fraction_of_the_noise_at_most(seed):
    rows, units, groups, random = make(seed=seed)
    ratios = random.normal(0, 0.01, len(rows))
    fitted = Residual().fit(rows, ratios, units, groups)
    assert np.abs(fitted.predict(rows, groups)).mean() < 0.005
    assert np.abs(ratios - fitted.splits_[0].guesses).mean() <= np.abs(ratios).mean()


def test_an_exact_baseline_is_left_alone():
    rows, units, groups, _ = make()
    fitted = Residual().fit(rows, np.zeros(len(rows)), units, groups)
    assert fitted.regressor_.name == "zero"
    assert fitted.predict(rows, groups).tolist() == [0.0] * len(rows)


def test_an_effect_per_group_is_learned_by_the_simplest_candidate_that_can():
    rows, units, groups, random = make()
    truth = np.where(np.array(groups) == "torch/ddp", 0.01, 0.03)
    fitted = Residual().fit(rows, truth + random.normal(0, 0.0005, len(rows)), units, groups)
    assert fitted.regressor_.name == "group_median"
    assert fitted.predict(rows, groups) == pytest.approx(truth, abs=0.002)


def test_a_fixed_hidden_amount_is_a_share_of_the_baseline():
    rows, units, groups, random = make(30)
    truth = np.array([0.06 * row["gib_over_start"] for row in rows])
    fitted = Residual().fit(rows, truth + random.normal(0, 0.0005, len(rows)), units, groups)
    assert fitted.regressor_.name == "hidden_bytes"
    assert np.abs(fitted.splits_[0].guesses - truth).mean() < 0.01


@pytest.mark.parametrize(
    ("num_units", "tried"), [(4, set()), (5, {"ridge"}), (39, {"ridge"}), (40, {"ridge", "boosted_trees"})]
)
def test_few_architectures_teach_nothing_by_their_features(num_units, tried):
    rows, units, groups, _random = make(num_units)
    fitted = Residual().fit(rows, [0.01 * row["log2_tokens"] for row in rows], units, groups)
    assert set(fitted.scores_) == {"zero", "hidden_bytes", "group_median", "gpu_median"} | tried


def test_what_does_not_transfer_to_unseen_architectures_is_not_used():
    rows, units, groups, random = make(12, 10)
    offsets = {name: random.normal(0, 0.02) for name in set(units)}
    for row, unit in zip(rows, units, strict=True):  # a feature that names the architecture invites memorising
        row["log2_hidden_size"] = float(int(unit[3:]))
    ratios = np.array([offsets[unit] for unit in units])
    fitted = Residual().fit(rows, ratios, units, groups)
    assert np.abs(ratios - fitted.splits_[0].guesses).mean() <= np.abs(ratios).mean() * 1.02


def test_predictions_stay_inside_the_range_seen():
    rows, units, groups, _random = make(30)
    truth = np.array([0.06 * row["gib_over_start"] for row in rows])
    fitted = Residual().fit(rows, truth, units, groups)
    far = dict(rows[0], gib_over_start=1e6)
    assert 0 <= fitted.predict([far], groups[:1])[0] <= 0.061


def test_a_second_fit_forgets_the_first():
    rows, units, groups, _random = make()
    residual = Residual().fit(rows, np.full(len(rows), 0.05), units, groups)
    assert residual.regressor_.name != "zero"
    assert residual.fit(rows, np.zeros(len(rows)), units, groups) is residual
    assert residual.predict(rows[:1], groups[:1])[0] == 0


def test_folds_never_split_an_architecture():
    units = np.repeat(np.arange(13), [1, 5, 9, 2, 2, 2, 7, 1, 1, 1, 30, 4, 4])
    folds = assign_folds(units, np.ones(len(units)), 5)
    assert len(set(folds.tolist())) == 5
    for unit in range(13):
        assert len(set(folds[units == unit].tolist())) == 1


def test_the_simplest_within_one_standard_error_wins():
    hard_for_all = np.array([0.0, 0.1, 0.0, 0.1])
    assert within_one_standard_error({"simple": hard_for_all + 0.001, "complex": hard_for_all}) == ["complex"]
    noisy = hard_for_all + np.array([0.01, -0.01, 0.02, -0.015])
    assert within_one_standard_error({"simple": noisy, "complex": hard_for_all}) == ["simple", "complex"]


def test_what_neither_architectures_nor_sources_show_is_not_shown_by_both_together():
    """Both hold out the same rows: in one list their gains would pass for twice the evidence."""
    gains = np.array([0.004, 0.002, 0.003, -0.006])
    base = np.full(4, 0.01)
    apart = {"nothing": [base, base], "more": [base - gains, base - gains]}
    assert within_one_standard_error({name: parts[0] for name, parts in apart.items()}) == ["nothing", "more"]
    assert simplest_in_every_split(apart) == "nothing"


def test_a_gain_on_architectures_does_not_count_where_sources_lose():
    base, better, worse = np.full(4, 0.03), np.full(4, 0.01), np.array([0.031, 0.030])
    sources = np.full(2, 0.03)
    assert simplest_in_every_split({"nothing": [base, sources], "more": [better, worse]}) == "nothing"
    assert simplest_in_every_split({"nothing": [base, sources], "more": [better, sources]}) == "more"


def test_a_source_that_hides_nothing_is_not_taught_what_two_others_hide():
    """Of three sources two hide the same amount; who comes next may be like the third. Of the two alone it is learned."""
    rows, units, groups, random = make(12)
    sources = np.array([("first", "second", "exact")[int(unit[3:]) % 3] for unit in units])
    hidden = np.where(sources == "exact", 0.0, 0.01) * [row["gib_over_start"] for row in rows]
    truth = hidden + random.normal(0, 0.0002, len(rows))

    def fitted(kept):
        chosen = np.flatnonzero(kept)
        parts = [[things[i] for i in chosen] for things in (rows, truth, units, groups)]
        simple = Residual(make_candidates=lambda: [Zero(), HiddenBytes()])
        return simple.fit(*parts, sources=sources[chosen])

    assert fitted(sources != "exact").regressor_.name == "hidden_bytes"
    assert fitted(sources != "").regressor_.name == "zero"


def test_a_hidden_amount_is_known_of_groups_that_were_seen_only():
    rows, _, groups, _ = make(12, 4)
    x = matrix(rows)
    y = np.log1p(0.5 * x[:, HiddenBytes.column])
    fitted = HiddenBytes().fit(x, y, np.ones(len(y)), groups)
    assert fitted.predict(x[:1], ["torch/ddp"])[0] == pytest.approx(y[0], rel=0.15)  # three rows of nothing beside 24
    assert fitted.predict(x[:1], ["megatron/tp"])[0] == 0


def test_a_hidden_amount_is_of_a_layout_with_or_without_experts_and_not_of_one_gpu():
    """Communicators do not depend on a router, whose leftovers in the cache are no fixed amount."""
    rows, _, groups, _ = make(12, 4)
    x = matrix(rows)
    x[::4, HiddenBytes.axes] = 0.0
    groups = [("torch/single", "torch/ddp", "torch/ddp", "torch/ddp/experts")[index % 4] for index in range(len(rows))]
    amounts = np.array([{"torch/single": 0.2, "torch/ddp": 0.5, "torch/ddp/experts": 9.0}[group] for group in groups])
    fitted = HiddenBytes().fit(x, np.log1p(amounts * x[:, HiddenBytes.column]), np.ones(len(x)), groups)
    share = 24 / (24 + 3)  # three rows of nothing beside 24
    expected = [0.0 if group == "torch/single" else 0.5 * share for group in groups]
    assert fitted.predict(x, groups) == pytest.approx(np.log1p(expected * x[:, HiddenBytes.column]))


def test_what_is_learned_is_taken_whole_unless_less_of_it_is_surely_better():
    """Of four architectures with 2, 4, 6 and 8 % each is predicted from the middle of the others: 6, 6, 4 and 4 %. Three
    quarters of that are nearer by 0.25 % on average, 1.5 % nearer for two and 1 % farther for two: chance."""
    rows, units, groups, _ = make(4)
    groups = ["torch/ddp"] * len(rows)
    amounts = {unit: 0.02 * (1 + index) for index, unit in enumerate(dict.fromkeys(units))}
    medians = Residual(make_candidates=lambda: [Zero(), GroupMedian()])
    fitted = medians.fit(rows, [amounts[unit] for unit in units], units, groups)
    assert fitted.regressor_.name == "group_median"
    assert fitted.splits_[0].guesses[::8] == pytest.approx([0.06, 0.06, 0.04, 0.04])
    assert fitted.shrinkage_ == 1
    off = np.array([0.04, 0.02, 0.02, 0.04])
    sure = {1.0: [off], 0.75: [off - np.array([0.010, 0.011, 0.012, 0.009])], 0.5: [off]}
    assert simplest_in_every_split(sure) == 0.75


def test_exported_trees_are_scikit_learns():
    from sklearn.ensemble import HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits

    random = np.random.default_rng(1)
    x = random.normal(size=(300, 6))
    y = np.sin(x[:, 0]) + (x[:, 1] > 0)
    unseen = random.normal(size=(500, 6)) * 3
    with threadpool_limits(1):
        model = HistGradientBoostingRegressor(max_iter=20, max_bins=32, early_stopping=False).fit(x, y)
        assert Trees.from_scikit_learn(model).predict(unseen) == pytest.approx(model.predict(unseen), abs=1e-12)


@pytest.mark.parametrize(
    "candidate", [Zero(), GroupMedian(), HiddenBytes(), GpuMedian(), Ridge(), BoostedTrees(max_iter=5)]
)
def test_every_candidate_survives_json(candidate):
    rows, _, groups, random = make()
    x, y = matrix(rows), random.normal(0, 0.01, len(rows))
    candidate.fit(x, y, np.ones(len(y)), groups)
    again = regressor_from_mapping(json.loads(json.dumps(candidate.to_mapping())), NUM_FEATURES)
    assert again.predict(x, groups).tolist() == candidate.predict(x, groups).tolist()


def test_a_gpu_type_never_seen_takes_its_nearest_relatives_median():
    rows, _, groups, _ = make(12, 4)
    for index, row in enumerate(rows):
        row["compute_capability"], row["num_sms"] = ((80.0, 1.08), (90.0, 1.32))[index % 2]
    x = matrix(rows)
    y = np.where(x[:, list(FEATURES).index("compute_capability")] == 90, 0.04, 0.0)
    fitted = GpuMedian().fit(x, y, np.ones(len(y)), groups)
    near = x[:3].copy()
    near[:, list(GpuMedian.columns)] = [(89.0, 1.28), (86.0, 0.84), (100.0, 1.48)]  # RTX 4090, RTX 3090, B200
    low, high = fitted.predict(x[:2], [])
    assert (low, high) == pytest.approx((0.0, 0.04), abs=0.006)
    assert fitted.predict(near, []).tolist() == [low, low, high]


@pytest.mark.parametrize("candidate", [Ridge(alpha=0.01), BoostedTrees()])
@pytest.mark.parametrize("feature", MONOTONE)
def test_no_candidate_learns_that_hidden_memory_shrinks_with_its_share(candidate, feature):
    """Even where the rows of the fit say so."""
    rows, _, groups, random = make()
    for row in rows:
        row[feature] = float(random.uniform(0, 1))
    x = matrix(rows)
    column = list(FEATURES).index(feature)
    y = -MONOTONE[feature] * 0.05 * x[:, column] + random.normal(0, 0.001, len(rows))
    candidate.fit(x, y, np.ones(len(y)), groups)
    ladder = np.repeat(x[:1], 50, axis=0)
    ladder[:, column] = np.linspace(-0.5, 1.5, 50)
    assert (np.diff(candidate.predict(ladder, groups[:1] * 50)) * MONOTONE[feature] >= -1e-12).all()


def test_a_bound_teaches_only_where_the_fit_lies_below_it():
    rows, units, groups, random = make(12, 4)
    ratios = 0.02 + random.normal(0, 0.001, len(rows))
    last = np.array([unit == "net11" for unit in units])

    def learned(bound):
        bounded = np.where(last, bound, ratios)
        return Residual(make_candidates=lambda: [Zero(), GroupMedian()]).fit(rows, bounded, units, groups, None, last)

    without = [row for row, gone in zip(rows, last, strict=True) if not gone]
    kept = [name for name in units if name != "net11"]
    plain = Residual(make_candidates=lambda: [Zero(), GroupMedian()]).fit(without, ratios[~last], kept, groups[: len(kept)])
    assert learned(-0.5).predict(rows, groups).tolist() == plain.predict(rows, groups).tolist()
    assert learned(0.06).predict(rows, groups).mean() > plain.predict(rows, groups).mean()
    assert learned(-0.5).low_ == plain.low_  # a bound is no ratio that was seen
    assert learned(0.06).high_ == 0.06


def test_a_row_of_more_weight_pulls_more():
    rows, units, _, _ = make(12, 2)
    ratios = np.where(np.arange(len(rows)) % 2, 0.01, 0.03)
    trusted = np.where(np.arange(len(rows)) % 2, 1.0, 0.25)
    fitted = Residual(make_candidates=lambda: [Zero(), GroupMedian(prior_weight=0)]).fit(
        rows, ratios, units, ["same"] * len(rows), trusted
    )
    assert fitted.predict(rows[:1], ["same"])[0] == pytest.approx(0.01)


@pytest.mark.parametrize(
    "damage",
    [
        {"left": [0, 1, 2, 1]},  # a circle
        {"roots": [9]},
        {"feature": [10_000, 0, 0, 0]},
        {"threshold": [float("nan"), 0, 0, 0]},
        {"value": [1.0]},
        {"extra": 1},
        {"left": [1e300, 1, 2, 3]},
        {"left": [1.5, 1, 2, 3]},
        {"value": [0.0, 1.0, 2.0, 1e30]},
        {"start": "os.system"},
    ],
)
def test_damaged_trees_are_refused(damage):
    good = {
        "name": "boosted_trees",
        "start": 0.0,
        "roots": [0],
        "feature": [0, 0, 0, 0],
        "threshold": [0.0, 0.0, 0.0, 0.0],
        "left": [1, 1, 2, 3],
        "right": [2, 1, 2, 3],
        "value": [0.0, 1.0, 2.0, 3.0],
    }
    assert regressor_from_mapping(good, NUM_FEATURES).predict(np.zeros((1, NUM_FEATURES)), []).tolist() == [1.0]
    with pytest.raises(CalibrationError):
        regressor_from_mapping({**good, **damage}, NUM_FEATURES)


@pytest.mark.parametrize("medians", [{}, {"..../....": 0.1}, {"90/1.32/5": 0.1}, {"90": 0.1}, {"90/1.32": "0.1"}])
def test_damaged_medians_of_gpu_types_are_refused(medians):
    good = {"name": "gpu_median", "overall": 0.0, "medians": {"90/1.32": 0.02}}
    assert regressor_from_mapping(good, NUM_FEATURES).predict(np.zeros((1, NUM_FEATURES)), []).tolist() == [0.02]
    with pytest.raises(CalibrationError):
        regressor_from_mapping({**good, "medians": medians}, NUM_FEATURES)


def test_predicting_loads_neither_scikit_learn_nor_torch():
    code = (
        "import sys, json; from peakcast.models.calibration.residual import Residual; "
        "from peakcast.models.prediction.predict import predict; "
        "r = Residual().fit([], [], [], []); Residual.from_mapping(json.loads(json.dumps(r.to_mapping()))); "
        "print([m for m in ('sklearn', 'scipy', 'torch', 'mlflow', 'pandas') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
