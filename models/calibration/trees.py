"""Gradient-boosted trees as plain arrays: made once from scikit-learn's, evaluated with numpy, read from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.core.errors import CalibrationError
from peakcast.models.calibration.strict import WAY_OUT, number, numbers, read

MAX_NODES = 200_000
"""More nodes than any calibration has; a file with more is refused before anything is built."""


@dataclass(frozen=True, eq=False)
class Trees:
    """All trees in one set of node arrays; a leaf is its own child.

    Shapes: `roots` [num_trees]; the others [num_nodes]. From node i go to `left[i]` if x[feature[i]] <= threshold[i], else
    to `right[i]`. Children come after their parent in the arrays, so every path ends.
    """

    start: float
    roots: npt.NDArray[np.int64]
    feature: npt.NDArray[np.int64]
    threshold: npt.NDArray[np.float64]
    left: npt.NDArray[np.int64]
    right: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]

    @classmethod
    def from_scikit_learn(cls, model: Any) -> Trees:
        """The trees of a fitted HistGradientBoostingRegressor (scikit-learn 1.6 to 1.9; a test compares them with its own
        `predict`, because `_predictors` is not public)."""
        columns: dict[str, list[Any]] = {name: [] for name in ("feature", "threshold", "left", "right", "value")}
        roots = []
        for (predictor,) in model._predictors:
            nodes, base = predictor.nodes, len(columns["value"])
            leaf = nodes["is_leaf"].astype(bool)
            own = np.arange(len(nodes)) + base
            roots.append(base)
            columns["feature"].extend(np.where(leaf, 0, nodes["feature_idx"]).tolist())
            columns["threshold"].extend(np.where(leaf, 0.0, nodes["num_threshold"]).tolist())
            columns["left"].extend(np.where(leaf, own, nodes["left"].astype(np.int64) + base).tolist())
            columns["right"].extend(np.where(leaf, own, nodes["right"].astype(np.int64) + base).tolist())
            columns["value"].extend(nodes["value"].tolist())
        return cls(
            start=float(np.ravel(model._baseline_prediction)[0]),
            roots=np.array(roots, dtype=np.int64),
            feature=np.array(columns["feature"], dtype=np.int64),
            threshold=np.clip(np.array(columns["threshold"], dtype=np.float64), -1e300, 1e300),
            left=np.array(columns["left"], dtype=np.int64),
            right=np.array(columns["right"], dtype=np.int64),
            value=np.array(columns["value"], dtype=np.float64),
        )

    def predict(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """`start` + the value of the leaf reached in every tree, [rows]."""
        node = np.broadcast_to(self.roots, (len(x), len(self.roots))).copy()
        rows = np.arange(len(x))[:, None]
        while True:
            goes_left = x[rows, self.feature[node]] <= self.threshold[node]
            following = np.where(goes_left, self.left[node], self.right[node])
            if (following == node).all():
                result: npt.NDArray[np.float64] = self.start + self.value[node].sum(axis=1)
                return result
            node = following

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form."""
        arrays = ("roots", "feature", "threshold", "left", "right", "value")
        return {"start": self.start, **{name: getattr(self, name).tolist() for name in arrays}}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], num_features: int) -> Trees:
        """The trees of `to_mapping`; every index is checked. Raises: CalibrationError."""
        names = ("roots", "feature", "threshold", "left", "right", "value")
        top = read(mapping, {"start", *names}, "trees")
        size = len(top["value"]) if isinstance(top["value"], list) else 0
        if size > MAX_NODES:
            raise CalibrationError(f"trees have {size:,} nodes, more than {MAX_NODES:,}; {WAY_OUT}.", parameter="trees")
        limits = {"threshold": 1e300, "value": 10.0}
        arrays = {
            name: numbers(
                top[name], f"trees.{name}", None if name == "roots" else size, limit=limits.get(name, float(MAX_NODES))
            )
            for name in names
        }
        index = {name: arrays[name].astype(np.int64) for name in ("roots", "feature", "left", "right")}
        if any((index[name] != arrays[name]).any() for name in index):
            raise CalibrationError(f"trees hold an index that is no whole number; {WAY_OUT}.", parameter="trees")
        own = np.arange(size)
        leaf = (index["left"] == own) & (index["right"] == own)
        behind = (index["left"] > own) & (index["right"] > own) & (index["left"] < size) & (index["right"] < size)
        roots_fit = ((index["roots"] >= 0) & (index["roots"] < size)).all()
        features_fit = ((index["feature"] >= 0) & (index["feature"] < num_features)).all()
        if not ((leaf | behind).all() and roots_fit and features_fit):
            raise CalibrationError(f"trees point outside themselves or in a circle; {WAY_OUT}.", parameter="trees")
        return cls(
            start=number(top["start"], "trees.start", low=-10, high=10),
            threshold=arrays["threshold"],
            value=arrays["value"],
            **index,
        )
