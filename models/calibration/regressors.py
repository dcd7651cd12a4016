"""The candidates for the residual: small regressors of log(measured / start), from nothing to boosted trees.

Each stores its settings in the constructor, learns in `fit` (attributes ending in `_`), predicts with numpy alone, and
converts to plain JSON and back without running code. Inputs: X [rows, features] as floats, y [rows] log ratios, weights
[rows], groups [rows] names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from peakcast.core.errors import CalibrationError
from peakcast.models.calibration.features import ENOUGH_FOR_FEATURES, FEATURES, MONOTONE
from peakcast.models.calibration.grouping import layout_of_group
from peakcast.models.calibration.strict import WAY_OUT, number, numbers, read
from peakcast.models.calibration.trees import Trees

Floats = npt.NDArray[np.float64]
ENOUGH_FOR_TREES = 40
"""Least number of architectures for trees, which have hundreds of leaves to place: on the published rows (29 architectures,
7 sources) they predicted unseen rows worse than ridge or a hidden amount, for every quantity."""
DIRECTIONS = [MONOTONE.get(name, 0) for name in FEATURES]
"""The sign that physics demands of each feature's effect; 0 if it demands none."""


_GPU_KEY = re.compile(r"\d{1,4}(\.\d{1,6})?/\d{1,4}(\.\d{1,6})?")


class Regressor(Protocol):
    """The interface of a candidate."""

    name: ClassVar[str]
    never_takes_away: ClassVar[bool]
    """Whether it never predicts a negative log ratio."""
    least_architectures: ClassVar[int]
    """It is not tried with fewer architectures."""
    not_of: ClassVar[tuple[str, ...]]
    """Quantities for which it is not tried."""

    def fit(self, x: Floats, y: Floats, weights: Floats, groups: Sequence[str]) -> Any:
        """Learn, forgetting any earlier fit; returns self."""

    def predict(self, x: Floats, groups: Sequence[str]) -> Floats:
        """Log ratios, [rows]."""

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON, with the candidate's `name`."""


class Zero:
    """The baseline alone."""

    name: ClassVar[str] = "zero"
    never_takes_away: ClassVar[bool] = True
    least_architectures: ClassVar[int] = 1
    not_of: ClassVar[tuple[str, ...]] = ()

    def fit(self, x: Floats, y: Floats, weights: Floats, groups: Sequence[str]) -> Zero:
        """Nothing to learn."""
        return self

    def predict(self, x: Floats, groups: Sequence[str]) -> Floats:
        """Zeros."""
        return np.zeros(len(x))

    def to_mapping(self) -> dict[str, Any]:
        """The name only."""
        return {"name": self.name}


class GroupMedian:
    """The median log ratio of the job's group, pulled towards the median of all rows (or towards `overall` if given) as if
    `prior_weight` rows with that value had been seen too. Learned: `medians_` (group → value), `overall_`."""

    name: ClassVar[str] = "group_median"
    never_takes_away: ClassVar[bool] = False
    least_architectures: ClassVar[int] = 1
    not_of: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, prior_weight: float = 3.0, overall: float | None = None) -> None:
        self.prior_weight = prior_weight
        self.overall = overall

    def fit(self, x: Floats, y: Floats, weights: Floats, groups: Sequence[str]) -> GroupMedian:
        """Learn the medians."""
        self.overall_ = weighted_median(y, weights) if self.overall is None else self.overall
        self.medians_: dict[str, float] = {}
        for name in sorted(set(groups)):
            rows = np.array([group == name for group in groups])
            own = float(weights[rows].sum())
            trust = own / (own + self.prior_weight)
            self.medians_[name] = trust * weighted_median(y[rows], weights[rows]) + (1 - trust) * self.overall_
        return self

    def predict(self, x: Floats, groups: Sequence[str]) -> Floats:
        """The group's value, or `overall_` for a group never seen."""
        return np.array([self.medians_.get(group, self.overall_) for group in groups], dtype=np.float64)

    def to_mapping(self) -> dict[str, Any]:
        """The medians."""
        return {"name": self.name, "overall": self.overall_, "medians": dict(self.medians_)}


class HiddenBytes:
    """Memory that no tensor explains and that several ranks have (communicators, their kernels, workspaces), the same
    amount for every job of a layout: log(1 + amount / start). Learned: `amounts_`, the median of measured − start over the
    rows of dense networks, in GiB, pulled towards zero (`GroupMedian`). Experts have what dense networks of their layout
    have: what their router leaves in the cache is no fixed amount. A layout never seen has zero, and so has one GPU: what
    a process holds there is counted from runs that print both numbers (`device_memory.KERNELS_BYTES`), and more is the
    cache. Never negative: hidden memory can only add. What is reserved beyond the tensors are whole blocks of the network's
    sizes, which a fixed amount does not describe."""

    name: ClassVar[str] = "hidden_bytes"
    never_takes_away: ClassVar[bool] = True
    least_architectures: ClassVar[int] = 1
    not_of: ClassVar[tuple[str, ...]] = ("peak_reserved_bytes",)
    column = list(FEATURES).index("gib_over_start")
    axes = list(FEATURES).index("num_parallel_axes")

    def fit(self, x: Floats, y: Floats, weights: Floats, groups: Sequence[str]) -> HiddenBytes:
        """Learn the amounts."""
        rows = np.array([group == layout_of_group(group) for group in groups], dtype=bool) & (x[:, self.axes] > 0)
        amounts, names = np.expm1(y) / x[:, self.column], [groups[row] for row in np.flatnonzero(rows).tolist()]
        self.amounts_ = GroupMedian(overall=0.0).fit(x[rows], amounts[rows], weights[rows], names)
        return self

    def predict(self, x: Floats, groups: Sequence[str]) -> Floats:
        """The layout's amount as a share of what each row starts from."""
        amounts = self.amounts_.predict(x, [layout_of_group(group) for group in groups]) * (x[:, self.axes] > 0)
        result: Floats = np.log1p(np.maximum(amounts, 0.0) * x[:, self.column])
        return result

    def to_mapping(self) -> dict[str, Any]:
        """The amounts in GiB."""
        return {**self.amounts_.to_mapping(), "name": self.name}


class GpuMedian:
    """The median log ratio of the GPU type, pulled towards that of all: how a type with few rows of its own differs from
    those that it learns from. A type never seen uses its nearest relative's. Learned: `gpus_`."""

    name: ClassVar[str] = "gpu_median"
    never_takes_away: ClassVar[bool] = False
    least_architectures: ClassVar[int] = 1
    not_of: ClassVar[tuple[str, ...]] = ()
    columns = tuple(list(FEATURES).index(name) for name in ("compute_capability", "num_sms"))

    def fit(self, x: Floats, y: Floats, weights: Floats, groups: Sequence[str]) -> GpuMedian:
        """Learn the medians."""
        self.gpus_ = GroupMedian().fit(x, y, weights, self._names(x))
        return self

    def predict(self, x: Floats, groups: Sequence[str]) -> Floats:
        """The value of each row's GPU type, or of the type nearest to it, as `calibration.distance` orders them."""
        names = self._names(x)
        nearest = {name: min(self.gpus_.medians_, key=lambda other: _gpu_distance(name, other)) for name in set(names)}
        return self.gpus_.predict(x, [nearest[name] for name in names])

    def _names(self, x: Floats) -> list[str]:
        """A key for each row's GPU type."""
        return [f"{capability:g}/{multiprocessors:g}" for capability, multiprocessors in x[:, self.columns]]

    def to_mapping(self) -> dict[str, Any]:
        """The medians by compute capability and multiprocessors."""
        return {**self.gpus_.to_mapping(), "name": self.name}


class Ridge:
    """Linear in the standardised features, shrunk: (XᵀWX/Σw + alpha·I)⁻¹, without shrinking the mean. Learned: `mean_`,
    `scale_`, `coefficients_`, `intercept_`. When predicting, a feature beyond the range seen counts as at its edge. A
    feature whose coefficient would contradict DIRECTIONS is left out."""

    name: ClassVar[str] = "ridge"
    never_takes_away: ClassVar[bool] = False
    least_architectures: ClassVar[int] = ENOUGH_FOR_FEATURES
    not_of: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, alpha: float = 0.3) -> None:
        self.alpha = alpha

    def fit(self, x: Floats, y: Floats, weights: Floats, groups: Sequence[str]) -> Ridge:
        """Solve the weighted normal equations."""
        w = weights / weights.sum()
        self.low_, self.high_ = x.min(axis=0), x.max(axis=0)
        self.mean_ = w @ x
        spread = np.sqrt(w @ (x - self.mean_) ** 2)
        self.scale_ = np.where(spread > 1e-9, spread, 1.0)
        z = (x - self.mean_) / self.scale_
        self.intercept_ = float(w @ y)
        gram = (z * w[:, None]).T @ z + self.alpha * np.eye(z.shape[1])
        slopes = (z * w[:, None]).T @ (y - self.intercept_)
        used = np.ones(z.shape[1], dtype=bool)
        while True:
            self.coefficients_ = np.zeros(z.shape[1])
            self.coefficients_[used] = np.linalg.solve(gram[np.ix_(used, used)], slopes[used])
            wrong = self.coefficients_ * np.array(DIRECTIONS[: z.shape[1]]) < 0
            if not wrong.any():
                return self
            used &= ~wrong

    def predict(self, x: Floats, groups: Sequence[str]) -> Floats:
        """Intercept + standardised features · coefficients."""
        z = (np.clip(x, self.low_, self.high_) - self.mean_) / self.scale_
        result: Floats = self.intercept_ + z @ self.coefficients_
        return result

    def to_mapping(self) -> dict[str, Any]:
        """The linear map."""
        arrays = ("low", "high", "mean", "scale", "coefficients")
        return {
            "name": self.name,
            "alpha": self.alpha,
            "intercept": self.intercept_,
            **{key: getattr(self, key + "_").tolist() for key in arrays},
        }


class BoostedTrees:
    """scikit-learn's HistGradientBoostingRegressor, fitted with scikit-learn and evaluated without it. Learned:
    `trees_`."""

    name: ClassVar[str] = "boosted_trees"
    never_takes_away: ClassVar[bool] = False
    least_architectures: ClassVar[int] = ENOUGH_FOR_TREES
    not_of: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, max_iter: int = 40, learning_rate: float = 0.12, max_leaf_nodes: int = 8) -> None:
        self.max_iter = max_iter
        self.learning_rate = learning_rate
        self.max_leaf_nodes = max_leaf_nodes

    def fit(self, x: Floats, y: Floats, weights: Floats, groups: Sequence[str]) -> BoostedTrees:
        """Boost trees and keep them as arrays."""
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        model = HistGradientBoostingRegressor(
            max_iter=self.max_iter,
            learning_rate=self.learning_rate,
            max_leaf_nodes=self.max_leaf_nodes,
            max_bins=32,  # for a few hundred rows, more bins take six times as long and gain nothing
            min_samples_leaf=5,
            l2_regularization=1.0,
            early_stopping=False,
            monotonic_cst=DIRECTIONS,
            random_state=0,
        )
        with threadpool_limits(1):  # with so few rows, more threads only wait for each other
            model.fit(x, y, sample_weight=weights)
        self.trees_ = Trees.from_scikit_learn(model)
        return self

    def predict(self, x: Floats, groups: Sequence[str]) -> Floats:
        """Sum of the leaves reached."""
        return self.trees_.predict(x)

    def to_mapping(self) -> dict[str, Any]:
        """The trees as arrays."""
        return {"name": self.name, **self.trees_.to_mapping()}


def candidate_regressors() -> list[Regressor]:
    """Fresh candidates, simplest first."""
    return [Zero(), HiddenBytes(), GroupMedian(), GpuMedian(), Ridge(alpha=1.0), BoostedTrees()]


def regressor_from_mapping(mapping: Mapping[str, Any], num_features: int) -> Regressor:
    """The regressor of a `to_mapping`, checked. Raises: CalibrationError."""
    name = mapping.get("name") if isinstance(mapping, Mapping) else None
    if name == Zero.name:
        read(mapping, {"name"}, "regressor")
        return Zero()
    if name == GroupMedian.name:
        return _medians_from_mapping(mapping)
    if name == HiddenBytes.name:
        hidden = HiddenBytes()
        hidden.amounts_ = _medians_from_mapping(mapping)
        return hidden
    if name == GpuMedian.name:
        of_gpus = GpuMedian()
        of_gpus.gpus_ = median = _medians_from_mapping(mapping)
        if not median.medians_ or not all(_GPU_KEY.fullmatch(key) for key in median.medians_):
            raise CalibrationError(f"regressor.medians must be of GPU types; {WAY_OUT}.", parameter="medians")
        return of_gpus
    if name == Ridge.name:
        return _ridge_from_mapping(mapping, num_features)
    if name == BoostedTrees.name:
        boosted = BoostedTrees()
        boosted.trees_ = Trees.from_mapping({k: v for k, v in mapping.items() if k != "name"}, num_features)
        return boosted
    raise CalibrationError(
        f"regressor.name={name!r} is not known to this version; {WAY_OUT}.", parameter="name", value=name
    )


def _medians_from_mapping(mapping: Mapping[str, Any]) -> GroupMedian:
    values = read(mapping, {"name", "overall", "medians"}, "regressor")
    if not isinstance(values["medians"], Mapping):
        raise CalibrationError(f"regressor.medians must be a mapping; {WAY_OUT}.", parameter="medians")
    median = GroupMedian()
    median.overall_ = number(values["overall"], "overall")
    median.medians_ = {str(key): number(value, f"medians[{key!r}]") for key, value in values["medians"].items()}
    return median


def _ridge_from_mapping(mapping: Mapping[str, Any], num_features: int) -> Ridge:
    arrays = ("low", "high", "mean", "scale", "coefficients")
    values = read(mapping, {"name", "alpha", "intercept", *arrays}, "regressor")
    ridge = Ridge(alpha=number(values["alpha"], "alpha", low=0))
    ridge.intercept_ = number(values["intercept"], "intercept")
    for key in arrays:
        setattr(ridge, key + "_", numbers(values[key], key, num_features, limit=1e9))
    if (ridge.scale_ < 1e-10).any():
        raise CalibrationError(f"regressor.scale must be positive; {WAY_OUT}.", parameter="scale")
    return ridge


def _gpu_distance(one: str, other: str) -> tuple[float, float]:
    """How different two GPU types are, by their keys."""
    (a, a_sms), (b, b_sms) = (tuple(map(float, name.split("/"))) for name in (one, other))
    return (abs(a // 10 - b // 10) * 10 + abs(a % 10 - b % 10), abs(math.log((a_sms or 1e-9) / (b_sms or 1e-9))))


def weighted_median(values: Floats, weights: Floats) -> float:
    """The middle of `values` by weight; the mean of the two middle ones if they tie."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    low = int(np.searchsorted(reached, 0.5 - 1e-12))
    high = int(np.searchsorted(reached, 0.5 + 1e-12))
    return float((values[order][low] + values[order][min(high, len(values) - 1)]) / 2)
