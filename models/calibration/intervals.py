"""Conformal error bars: how far measurements were from predictions that had not seen them, as quantiles.

A score is the residual log(measured / predicted) of a row whose architecture, or whose source, was not in the fit that
predicted it, divided by the error to be expected of it (`spread.py`): normalised conformal prediction (Papadopoulos et al.
2008). A bar is a quantile of the scores of rows like the job, with a finite-sample correction: the new row counts as one
more row with an unknown, possibly infinite score. numpy only.

Rows of one architecture are not independent evidence, and weigh less the more there are (`evidence.py`). With one row of
each this is split conformal prediction with (n + 1)(1 − α) (Vovk et al. 2005; digit for digit crepes, MAPIE).

Rows held out by source were predicted from outside: layout, size, framework and versions may have been unseen too. How
far outside they were is part of the expected error, so a job inside the domain does not pay for the errors of rows far
outside, and a job as far outside does not pay twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.core.errors import CalibrationError
from peakcast.models.calibration.evidence import evidence_weights, number_of
from peakcast.models.calibration.strict import flag, number, read

COVERAGE = 0.90
"""Nominal coverage of the two-sided interval."""
UPPER_COVERAGE = 0.95
"""Nominal coverage of the one-sided upper bound."""
MIN_GROUP_ROWS = 20
"""With fewer effective rows, the next larger group sets a group's bar: the one-sided 95 % quantile needs 19. With more, the
larger group's rows count as this many beside the group's own, so that one row more cannot replace a bar by another."""
MIN_ARCHITECTURES = 3
"""With fewer architectures no bar can be learned, because nothing shows how architectures differ."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The bar of one group, in multiples of a job's expected error e: the measurement is within point·exp(±`half_width`·e)
    with the two-sided coverage, and below point·exp(`upper`·e) with the one-sided."""

    half_width: float
    upper: float
    num_rows: int
    num_architectures: int
    effective_rows: float
    """How many independent rows the group's own rows are worth: the sum of their weights."""
    parametric: bool = False
    """Whether there are too few of them for one of the two quantiles, so that a Student t bound replaces it
    (`parametric_bound`)."""


class Intervals:
    """Bars by group. A group with too few rows has none; its jobs get the bar of the next larger group. Learned: `bars_`
    (group → `Bar`). `coverage`, `upper_coverage`: nominal coverages. `min_group_rows`: see MIN_GROUP_ROWS."""

    def __init__(
        self,
        *,
        coverage: float = COVERAGE,
        upper_coverage: float = UPPER_COVERAGE,
        min_group_rows: float = MIN_GROUP_ROWS,
    ) -> None:
        self.coverage = coverage
        self.upper_coverage = upper_coverage
        self.min_group_rows = min_group_rows

    def fit(
        self,
        residuals: Sequence[float] | Floats,
        architectures: Sequence[str],
        groups: Sequence[tuple[str, ...]],
        weights: Sequence[float] | Floats | None = None,
        expected: Sequence[float] | Floats | None = None,
    ) -> Intervals:
        """Learn the bars. Row i has the residual `residuals[i]` from a fit without it, belongs to `architectures[i]` and to
        every group of `groups[i]` (finest first; the last is common to all rows), has the weight `weights[i]` (1 / repeats)
        and the expected error `expected[i]` (default: 1)."""
        scores = np.asarray(residuals, dtype=np.float64)
        if expected is not None:
            scores = scores / np.asarray(expected, dtype=np.float64)
        counts = np.ones(len(scores)) if weights is None else np.asarray(weights, dtype=np.float64)
        self.bars_ = self._learn(scores, number_of(architectures), counts, groups)
        return self

    def _learn(
        self, scores: Floats, units: npt.NDArray[np.int64], counts: Floats, groups: Sequence[tuple[str, ...]]
    ) -> dict[str, Bar]:
        """The bar of every group."""
        members: dict[str, list[int]] = {}
        larger: dict[str, tuple[str, ...]] = {}
        depth: dict[str, int] = {}
        for row, names in enumerate(groups):
            for level, name in enumerate(names):
                members.setdefault(name, []).append(row)
                depth[name], larger[name] = len(names) - level, names[level + 1 :]
        bars: dict[str, Bar] = {}
        for name in sorted(members, key=lambda group: (depth[group], group)):  # larger groups first
            around = next((members[other] for other in larger[name] if other in bars), None)
            bar = self._bar(scores, units, counts, members[name], around)
            if bar is not None:
                bars[name] = bar
        return bars

    def bar(self, groups: Sequence[str]) -> tuple[str, Bar] | None:
        """The finest group of `groups` that has a bar, and that bar; None if none has one."""
        return next(((name, self.bars_[name]) for name in groups if name in self.bars_), None)

    def _bar(
        self,
        scores: Floats,
        units: npt.NDArray[np.int64],
        counts: Floats,
        own: Sequence[int],
        around: Sequence[int] | None,
    ) -> Bar | None:
        """The bar of a group from its `own` rows and from the rows `around` it, which are those of the next larger group
        that has a bar. None if there are too few architectures or, where a larger group has a bar, too few rows."""
        num_architectures = len(np.unique(units[own]))
        weights = np.zeros(len(scores))
        weights[own] = evidence_weights(units[own], counts[own])
        effective_rows = float(weights.sum())
        if num_architectures < MIN_ARCHITECTURES or (around is not None and effective_rows < self.min_group_rows):
            return None
        if around is not None:
            lent = evidence_weights(units[around], counts[around])
            weights[around] += lent * (self.min_group_rows / lent.sum())
        half_width = conformal_quantile(np.abs(scores), weights, self.coverage)
        upper = conformal_quantile(scores, weights, self.upper_coverage)
        few = not math.isfinite(upper)  # the higher level needs more rows
        if not math.isfinite(half_width):
            half_width = parametric_bound(np.abs(scores[own]), units[own], counts[own], self.coverage, tails=2)
        if few:
            upper = parametric_bound(scores[own], units[own], counts[own], self.upper_coverage, tails=1)
        return Bar(
            half_width=half_width,
            upper=upper,
            num_rows=len(own),
            num_architectures=num_architectures,
            effective_rows=effective_rows,
            parametric=few,
        )

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form; `from_mapping` reads it back."""
        return {
            "coverage": self.coverage,
            "upper_coverage": self.upper_coverage,
            "min_group_rows": float(self.min_group_rows),
            "bars": _bars_to_mapping(self.bars_),
        }

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Intervals:
        """The intervals of `to_mapping`. Raises: CalibrationError."""
        top = read(mapping, {"coverage", "upper_coverage", "min_group_rows", "bars"}, "intervals")
        intervals = cls(
            coverage=number(top["coverage"], "coverage", low=0, high=1),
            upper_coverage=number(top["upper_coverage"], "upper_coverage", low=0, high=1),
            min_group_rows=number(top["min_group_rows"], "min_group_rows", low=0),
        )
        if not isinstance(top["bars"], Mapping):
            raise CalibrationError("intervals.bars must be a mapping of groups; fit the calibration again.")
        intervals.bars_ = _bars_from_mapping(top["bars"], "intervals.bars")
        return intervals


def _bars_to_mapping(bars: Mapping[str, Bar]) -> dict[str, dict[str, Any]]:
    return {name: {field: getattr(bar, field) for field in Bar.__slots__} for name, bar in bars.items()}


def _bars_from_mapping(mapping: object, where: str) -> dict[str, Bar]:
    """Bars by group, as stored. `where`: the place in the file, for errors. Raises: CalibrationError."""
    if not isinstance(mapping, Mapping):
        raise CalibrationError(f"{where} must be a mapping of groups; fit the calibration again.")
    bars = {}
    for name, entry in mapping.items():
        values = read(entry, set(Bar.__slots__), f"bars[{name!r}]")
        bars[name] = Bar(
            half_width=number(values["half_width"], "half_width", low=0, high=1e6),
            upper=number(values["upper"], "upper", low=-1e6, high=1e6),
            num_rows=int(number(values["num_rows"], "num_rows", low=0)),
            num_architectures=int(number(values["num_architectures"], "num_architectures", low=0)),
            effective_rows=number(values["effective_rows"], "effective_rows", low=0),
            parametric=flag(values["parametric"], "parametric"),
        )
    return bars


def conformal_quantile(scores: Floats, weights: Floats, level: float) -> float:
    """The smallest score up to which at least the share `level` of the total weight lies, where the total includes the new
    row (weight 1, score +inf); infinite if the rows have too little weight for that level.

    With unit weights this is the ceil((n + 1)·level)-th smallest score.
    """
    order = np.argsort(scores, kind="stable")
    reached = np.cumsum(weights[order])
    needed = level * (float(weights.sum()) + 1.0)
    at = int(np.searchsorted(reached, needed - 1e-9 * (1 + needed)))
    return float(scores[order][at]) if at < len(scores) else math.inf


def parametric_bound(scores: Floats, units: npt.NDArray[np.int64], counts: Floats, level: float, *, tails: int) -> float:
    """A bound at `level` of the `scores` (of their sizes, with two `tails`) if rows are too few for a corrected quantile:
    Student's t, with as many degrees of freedom as architectures, times the size up to which 68.3 % of the scores lie (a
    normal's standard deviation, insensitive to a few extreme rows); at least the uncorrected quantile. Every architecture
    has the same weight."""
    sizes = np.bincount(units, weights=counts)
    num = int((sizes > 0).sum())
    shares = counts / sizes[units] / num
    deviation, seen = _quantile(np.abs(scores), shares, 0.683), _quantile(scores, shares, level)
    one_sided = 1 - (1 - level) / tails
    return max(student_t(one_sided, num) * deviation * math.sqrt(1 + 1 / num), seen)


def _quantile(values: Floats, shares: Floats, level: float) -> float:
    """The smallest of `values` at or below which `level` of the `shares` (1 in all) lie."""
    order = np.argsort(values, kind="stable")
    at = int(np.searchsorted(np.cumsum(shares[order]), level))
    return float(values[order][min(at, len(values) - 1)])


def student_t(level: float, degrees: int) -> float:
    """Quantile of Student's t by the Cornish-Fisher series in 1/degrees (to 1 % from 3 degrees on at 0.95).

    Source: Abramowitz & Stegun 26.7.5.
    """
    z = NormalDist().inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    correction = math.fsum(term / degrees ** (power + 1) for power, term in enumerate(terms))
    return z + correction
