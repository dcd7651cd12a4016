"""A Gaussian process as a candidate for the residual: smooth, and back at the mean far from the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from peakcast.errors import CalibrationError
from peakcast.models.features import ENOUGH_FOR_FEATURES, FEATURES, MONOTONE
from peakcast.models.strict import WAY_OUT, number, numbers, read

Floats = npt.NDArray[np.float64]
LENGTHS = (1.0, 2.0, 4.0, 8.0)
NOISES = (0.03, 0.1, 0.3, 1.0, 3.0)
"""What is tried: length scale in standard deviations of a feature, per root of the number of features that vary; variance
of the noise over that of the signal."""
MAX_ROWS = 2_000
"""A calibration with more rows than this is not one of ours; refused before anything is built of it."""


class GaussianProcess:
    """Squared-exponential kernel with one length scale on the standardised features; length and noise by the largest
    marginal likelihood, the signal's variance in closed form; a row's noise is divided by its weight.

    A feature in which the residual must be monotone (`features.MONOTONE`) takes no part: a process cannot promise that.
    Learned: `columns_` (which features vary), `low_`, `high_`, `mean_`, `scale_` [columns], `rows_` [rows, columns],
    `dual_` [rows], `length_`, `intercept_`. Source: Rasmussen & Williams 2006, Algorithm 2.1 and equation 2.30.
    """

    name: ClassVar[str] = "gaussian_process"
    never_takes_away: ClassVar[bool] = False
    least_architectures: ClassVar[int] = ENOUGH_FOR_FEATURES

    def fit(self, x: Floats, y: Floats, weights: Floats, groups: Sequence[str]) -> GaussianProcess:
        """Learn, forgetting any earlier fit."""
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        free = np.array([name not in MONOTONE for name in FEATURES])
        self.columns_ = np.flatnonzero((np.ptp(x, axis=0) > 1e-9) & free)
        inside = x[:, self.columns_]
        shares = weights / weights.sum()
        self.intercept_ = float(shares @ y)
        self.low_, self.high_ = inside.min(axis=0), inside.max(axis=0)
        self.mean_ = shares @ inside
        self.scale_ = np.maximum(np.sqrt(shares @ (inside - self.mean_) ** 2), 1e-3 * (self.high_ - self.low_))
        self.rows_ = (inside - self.mean_) / self.scale_
        with threadpool_limits(1):  # so few rows that more threads only wait for each other
            self._learn(y - self.intercept_, weights.mean() / weights)
        return self

    def _learn(self, y: Floats, noisiness: Floats) -> None:
        distances = _squared_distances(self.rows_, self.rows_)
        best = -np.inf
        for length in LENGTHS:
            unit = length * max(len(self.columns_), 1) ** 0.5
            kernel = np.exp(-distances / (2 * unit**2))
            for noise in NOISES:
                likelihood, dual = _solve(kernel + np.diag(noise * noisiness), y)
                if likelihood > best:
                    best, self.length_, self.dual_ = likelihood, unit, dual

    def predict(self, x: Floats, groups: Sequence[str]) -> Floats:
        """The posterior mean; features beyond the range seen are held at its edge."""
        inside = (np.clip(x[:, self.columns_], self.low_, self.high_) - self.mean_) / self.scale_
        kernel = np.exp(-_squared_distances(inside, self.rows_) / (2 * self.length_**2))
        result: Floats = self.intercept_ + kernel @ self.dual_
        return result

    def to_mapping(self) -> dict[str, Any]:
        """The rows and their dual coefficients."""
        arrays = ("columns", "low", "high", "mean", "scale", "rows", "dual")
        return {
            "name": self.name,
            "length": self.length_,
            "intercept": self.intercept_,
            **{key: getattr(self, key + "_").tolist() for key in arrays},
        }

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], num_features: int) -> GaussianProcess:
        """The process of `to_mapping`, every number checked. Raises: CalibrationError."""
        arrays = ("columns", "low", "high", "mean", "scale", "dual")
        top = read(mapping, {"name", "length", "intercept", "rows", *arrays}, "regressor")
        process = cls()
        columns = numbers(top["columns"], "columns", limit=num_features - 1)
        process.columns_ = columns.astype(np.int64)
        if (process.columns_ != columns).any() or (columns < 0).any():
            raise CalibrationError(f"regressor.columns must be numbers of features; {WAY_OUT}.", parameter="columns")
        for key in ("low", "high", "mean", "scale"):
            setattr(process, key + "_", numbers(top[key], key, len(columns), limit=1e9))
        if (process.scale_ < 1e-10).any():
            raise CalibrationError(f"regressor.scale must be positive; {WAY_OUT}.", parameter="scale")
        if not isinstance(top["rows"], list) or len(top["rows"]) > MAX_ROWS:
            raise CalibrationError(f"regressor.rows must be at most {MAX_ROWS:,} rows; {WAY_OUT}.", parameter="rows")
        rows = [numbers(row, "rows", len(columns), limit=1e9) for row in top["rows"]]
        process.rows_ = np.array(rows, dtype=np.float64).reshape(len(rows), len(columns))
        process.dual_ = numbers(top["dual"], "dual", len(rows), limit=1e6)
        process.length_ = number(top["length"], "length", low=1e-6, high=1e6)
        process.intercept_ = number(top["intercept"], "intercept", low=-10, high=10)
        return process


def _squared_distances(a: Floats, b: Floats) -> Floats:
    """[rows of a, rows of b]."""
    cross: Floats = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * a @ b.T
    return np.maximum(cross, 0.0)


def _solve(covariance: Floats, y: Floats) -> tuple[float, Floats]:
    """Log marginal likelihood with the signal's variance at its best (up to a constant), and covariance⁻¹ y."""
    factor = np.linalg.cholesky(covariance)
    dual: Floats = np.linalg.solve(factor.T, np.linalg.solve(factor, y))
    variance = max(float(y @ dual) / len(y), 1e-18)
    return -0.5 * len(y) * np.log(variance) - float(np.log(np.diag(factor)).sum()), dual
