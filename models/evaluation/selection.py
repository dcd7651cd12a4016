"""Which cells to measure next: those that tell most about all others, given what has been measured.

The baseline's errors are modelled as a Gaussian process. Its covariance is the sum of what two jobs share: the
architecture, the layout, and a smooth function of the residual's features. Measuring a cell lowers the variance of every
other; the next cell is the one with the largest remaining variance (a pivoted Cholesky decomposition: greedy D-optimal
design, Gramacy, Surrogates, 2020, section 6). A new architecture or layout keeps all of its variance, so breadth comes
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import baseline
from peakcast.models.calibration.features import FEATURES, features
from peakcast.models.calibration.grouping import architecture_shape, layout_name
from peakcast.models.calibration.samples import Sample

if TYPE_CHECKING:
    from peakcast.catalog import Device

Array = npt.NDArray[np.float64]
SHARES = {"architecture": 0.5, "layout": 0.2, "features": 0.3}
"""Variance shared by equal architectures, equal layouts and near features. On the published rows, errors of one
architecture correlate most (docs/decisions/2026-11-evidence-by-architecture.md)."""
NOISE = 0.01
"""Variance between repeats, where the variance between jobs is 1."""


@dataclass(frozen=True, slots=True)
class Point:
    """What the covariance depends on."""

    architecture: str
    layout: str
    features: tuple[float, ...]


def point(job: TrainingJob, device: Device) -> Point:
    """The point of a job on a GPU type."""
    row = features(job, device, baseline(job, device))
    return Point(architecture_shape(job), layout_name(job), tuple(row[name] for name in FEATURES))


def point_of(sample: Sample) -> Point:
    """The point of a measured row."""
    return Point(sample.architecture, sample.layout, tuple(sample.features[name] for name in FEATURES))


def most_informative(cells: Sequence[Point], measured: Iterable[Point] = ()) -> list[int]:
    """The order in which to measure `cells`, as indices, the one that tells most first."""
    known = list(measured)
    every = [*known, *cells]
    if not cells:
        return []
    left = covariance(every)
    variance = np.diagonal(left).copy()
    for index in range(len(known)):
        _measure(left, variance, index)
    order: list[int] = []
    open_ = np.zeros(len(every), dtype=bool)
    open_[len(known) :] = True
    for _ in cells:
        index = int(np.argmax(np.where(open_, variance, -np.inf)))
        order.append(index - len(known))
        open_[index] = False
        _measure(left, variance, index)
    return order


def _measure(left: Array, variance: Array, index: int) -> None:
    """Condition the covariance on a measurement at `index`, in place."""
    column = left[:, index].copy()
    left -= np.outer(column, column) / (column[index] + NOISE)
    np.copyto(variance, np.diagonal(left))


def covariance(points: Sequence[Point]) -> Array:
    """How much the errors of each pair of points are expected to share; 1 on the diagonal. [num_points, num_points]"""
    rows = np.array([p.features for p in points], dtype=np.float64)
    spread = rows.std(axis=0)
    rows = (rows[:, spread > 0] - rows[:, spread > 0].mean(axis=0)) / spread[spread > 0]
    squares = ((rows[:, None, :] - rows[None, :, :]) ** 2).sum(axis=2)
    typical = float(np.median(squares[squares > 0])) if np.any(squares > 0) else 1.0
    near = np.exp(-squares / typical)
    shared: Array = (
        SHARES["architecture"] * _equal([p.architecture for p in points])
        + SHARES["layout"] * _equal([p.layout for p in points])
        + SHARES["features"] * near
    )
    return shared


def _equal(names: Sequence[str]) -> Array:
    """1 where two names are equal, else 0. [num_names, num_names]"""
    numbers = np.unique(np.array(names), return_inverse=True)[1]
    same: Array = (numbers[:, None] == numbers[None, :]).astype(np.float64)
    return same


def expected(cells: Sequence[Point], values: Sequence[float], asked: Sequence[Point]) -> Array:
    """The expected values at `asked`, given `values` at `cells`. [num_asked]"""
    joint = covariance([*cells, *asked])
    n = len(cells)
    weights = np.linalg.solve(joint[:n, :n] + NOISE * np.eye(n), np.asarray(values) - np.mean(values))
    found: Array = np.mean(values) + joint[n:, :n] @ weights
    return found
