"""The learned residual: what measurements show beyond the analytical baseline, as log(measured / start). The start is the
baseline; for allocated memory, that with the simulated allocator's slack (`Baseline.start`).

Candidates of growing freedom (nothing, a hidden amount, a median per group, ridge, boosted trees) compete by predicting
architectures they were not fitted on and, if there are several sources (who measured), sources they were not fitted on. A
candidate with a larger error than the baseline alone, in either split, is out. Of the others the simplest wins whose error
is, in both splits, within one standard error of the best. The splits are judged separately because both hold out the same
rows: in one list, seven architectures that one source measured would outvote the sources. The winner is shrunk towards the
baseline only as far as the same rule demands: if shrinking is slightly better for only a few units, that is chance, and
everyone else would lose by it.

A run that went out of memory gives a bound: its peak would have been at least that. A bound below the fit teaches nothing;
one above the fit counts as a row at the bound (`fit_bounded`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from peakcast.models.calibration.evidence import evidence_weights, number_of
from peakcast.models.calibration.features import FEATURES
from peakcast.models.calibration.regressors import (
    Regressor,
    Zero,
    candidate_regressors,
    regressor_from_mapping,
    weighted_median,
)
from peakcast.models.calibration.strict import number, read, texts

NUM_FOLDS = 10
MOST_ROUNDS = 4
"""How often one candidate is fitted again because bounds lie above it."""
SHRINKAGES = (1.0, 0.75, 0.5, 0.25, 0.0)
WORST_COUNTED = 0.1
"""Log ratios further than this from the median are learned, and larger errors counted, as if they were exactly this far:
such a row shows a fault of the ledger, not something for a residual to follow."""

LEAST_LOSS = 1e-9
"""Mean errors that differ by less count as equal, because they are sums of floats."""

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Units = npt.NDArray[np.int64]
OneOf = TypeVar("OneOf")


class HeldOut:
    """One way of holding rows out. `units` [rows]: the unit of each row, each of which counts once in the error; `folds`
    [rows]: which rows were held out together; `guesses` [rows]: what was predicted for each row without its fold."""

    def __init__(self, units: Units, folds: Units) -> None:
        self.units = units
        self.folds = folds
        self.guesses: Floats = np.zeros(len(units))


@dataclass(frozen=True, slots=True)
class FitRows:
    """Rows from which a candidate learns, [rows]. `x`: their features, [rows, features]; `y`: log ratios; `censored`:
    whether a run went out of memory, so that its ratio is only a lower bound."""

    x: Floats
    y: Floats
    weights: Floats
    groups: npt.NDArray[np.object_]
    censored: Flags

    def chosen(self, rows: Flags) -> FitRows:
        """Those of `rows`."""
        return FitRows(self.x[rows], self.y[rows], self.weights[rows], self.groups[rows], self.censored[rows])


class Residual:
    """Predicts log(measured / baseline) from features.

    `make_candidates`: makes the candidates, simplest first; `num_folds`: the most folds of the grouped cross-validation
    (with fewer architectures, each is a fold).

    Learned: `regressor_`, `shrinkage_` (0 to 1), `low_` and `high_` (the range of log ratios seen, within which predictions
    stay), `scores_` (candidate → mean absolute error on held-out rows), `splits_` (a `HeldOut` for each way of holding rows
    out: by architecture, then by source if there are several).
    """

    def __init__(
        self, *, make_candidates: Callable[[], list[Regressor]] = candidate_regressors, num_folds: int = NUM_FOLDS
    ) -> None:
        self.make_candidates = make_candidates
        self.num_folds = num_folds

    def fit(
        self,
        rows: Sequence[Mapping[str, float]],
        log_ratios: Sequence[float] | Floats,
        architectures: Sequence[str],
        groups: Sequence[str],
        weights: Sequence[float] | Floats | None = None,
        bounded: Sequence[bool] | None = None,
        sources: Sequence[str] | None = None,
    ) -> Residual:
        """Learn from rows of `features`; returns self. `architectures` and `sources`: the names by which rows are held out;
        `groups`: those that `GroupMedian` uses; `weights`: less than 1 for repeats and less trusted rows; `bounded`:
        whether a ratio is only a lower bound."""
        x, y = matrix(rows), np.asarray(log_ratios, dtype=np.float64)
        counts = np.ones(len(y)) if weights is None else np.asarray(weights, dtype=np.float64)
        censored = np.zeros(len(y), dtype=bool) if bounded is None else np.asarray(bounded, dtype=bool)
        exact = y[~censored]
        units = number_of(architectures)
        self.splits_ = [HeldOut(units, assign_folds(units, counts, self.num_folds))]
        by_source = number_of(sources) if sources is not None else np.zeros(len(y), dtype=np.int64)
        if len(np.unique(by_source[~censored])) > 1:
            self.splits_.append(HeldOut(by_source, by_source))
        self.low_, self.high_ = (float(exact.min()), float(max(exact.max(), y.max()))) if len(exact) else (0.0, 0.0)
        self.scores_: dict[str, float] = {}
        self.shrinkage_ = 0.0
        self.regressor_: Regressor = Zero()
        num_architectures = len(np.unique(units[~censored]))
        if num_architectures < 2:
            return self
        balanced = evidence_weights(units, counts)
        middle = weighted_median(exact, balanced[~censored])
        targets = np.clip(y, middle - WORST_COUNTED, middle + WORST_COUNTED)
        learned = FitRows(x, targets, balanced, np.asarray(groups, dtype=object), censored)
        self._choose(num_architectures, learned, y, counts)
        return self

    def _choose(self, num_architectures: int, learned: FitRows, y: Floats, counts: Floats) -> None:
        """The regressor, and the share of its guesses, that err least on rows held out in each split. `y`: the log ratios
        as measured, [rows]; `counts`: the weight of each row in its unit's error, [rows]."""
        candidates = {one.name: one for one in self.make_candidates() if one.least_architectures <= num_architectures}
        guesses = {
            name: [out_of_fold(one, learned, split.folds) for split in self.splits_] for name, one in candidates.items()
        }

        def errors_of(name: str, share: float = 1.0) -> list[Floats]:
            """For each split, the mean error of each unit with `share` of a candidate's guesses."""
            parts = []
            for split, guess in zip(self.splits_, guesses[name], strict=True):
                missed = y - share * guess
                beyond = np.where(learned.censored, np.maximum(missed, 0.0), missed)
                parts.append(per_unit_error(beyond, split.units, counts))
            return parts

        errors = {name: errors_of(name) for name in candidates}
        self.scores_ = {name: float(np.concatenate(parts).mean()) for name, parts in errors.items()}
        chosen = simplest_in_every_split(errors)
        share = simplest_in_every_split({share: errors_of(chosen, share) for share in SHRINKAGES})
        if chosen == Zero.name or share == 0:
            return
        self.shrinkage_ = share
        self.regressor_ = fit_bounded(candidates[chosen], learned)
        for split, guess in zip(self.splits_, guesses[chosen], strict=True):
            split.guesses = np.clip(share * guess, self.low_, self.high_)

    def predict(self, rows: Sequence[Mapping[str, float]], groups: Sequence[str]) -> Floats:
        """Log ratios to add to the logarithm of the baseline, [rows]."""
        guess = self.shrinkage_ * self.regressor_.predict(matrix(rows), groups)
        clipped: Floats = np.clip(guess, min(self.low_, 0.0), max(self.high_, 0.0))
        return clipped

    @property
    def least(self) -> float:
        """A bound below all predictions."""
        return 0.0 if self.regressor_.never_takes_away else self.shrinkage_ and min(self.low_, 0.0)

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON of everything `predict` needs."""
        return {
            "features": list(FEATURES),
            "regressor": self.regressor_.to_mapping(),
            "shrinkage": self.shrinkage_,
            "low": self.low_,
            "high": self.high_,
            "scores": {name: round(score, 9) for name, score in self.scores_.items()},  # further digits are the machine's
        }

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Residual:
        """The residual of `to_mapping`, ready to predict. Raises: CalibrationError."""
        from peakcast.core.errors import CalibrationError

        top = read(mapping, {"features", "regressor", "shrinkage", "low", "high", "scores"}, "residual")
        if texts(top["features"], "residual.features") != list(FEATURES):
            raise CalibrationError(
                "residual.features are not those of this version of peakcast; fit the calibration again.",
                parameter="features",
            )
        if not isinstance(top["scores"], Mapping):
            raise CalibrationError("residual.scores must be a mapping; fit the calibration again.", parameter="scores")
        residual = cls()
        residual.regressor_ = regressor_from_mapping(top["regressor"], len(FEATURES))
        residual.shrinkage_ = number(top["shrinkage"], "residual.shrinkage", low=0, high=1)
        residual.low_ = number(top["low"], "residual.low", low=-5, high=5)
        residual.high_ = number(top["high"], "residual.high", low=-5, high=5)
        residual.scores_ = {str(name): number(score, "scores") for name, score in top["scores"].items()}
        return residual


def out_of_fold(candidate: Regressor, rows: FitRows, folds: Units) -> Floats:
    """The candidate's prediction for each row from a fit without the row's fold."""
    guess = np.zeros(len(rows.y))
    for fold in np.unique(folds):
        inside, outside = folds != fold, folds == fold
        if rows.censored[inside].all():
            continue
        fitted = fit_bounded(candidate, rows.chosen(inside))
        guess[outside] = fitted.predict(rows.x[outside], rows.groups[outside].tolist())
    return guess


def fit_bounded(candidate: Regressor, rows: FitRows) -> Regressor:
    """`candidate` fitted to the rows that finished. A run out of memory gives only a lower bound: it joins the fit when the
    prediction would otherwise be below its bound."""
    used = ~rows.censored
    fitted = candidate
    for _ in range(MOST_ROUNDS):
        fitted = candidate.fit(rows.x[used], rows.y[used], rows.weights[used], rows.groups[used].tolist())
        too_low = ~used & (fitted.predict(rows.x, rows.groups.tolist()) < rows.y)
        if not too_low.any():
            break
        used |= too_low
    return fitted


def matrix(rows: Sequence[Mapping[str, float]]) -> Floats:
    """The rows as an array [rows, features], in the order of FEATURES."""
    return np.array([[row[name] for name in FEATURES] for row in rows], dtype=np.float64).reshape(len(rows), len(FEATURES))


def assign_folds(units: npt.NDArray[np.int64], counts: Floats, num_folds: int) -> npt.NDArray[np.int64]:
    """A fold for each row: whole units only, the largest first, each to the fold with the least weight so far."""
    sizes = np.bincount(units, weights=counts)
    load = np.zeros(min(num_folds, len(sizes)))
    fold_of = np.zeros(len(sizes), dtype=np.int64)
    for unit in np.argsort(-sizes, kind="stable"):
        fold_of[unit] = int(np.argmin(load))
        load[fold_of[unit]] += sizes[unit]
    folds: npt.NDArray[np.int64] = fold_of[units]
    return folds


def per_unit_error(errors: Floats, units: npt.NDArray[np.int64], counts: Floats) -> Floats:
    """Mean absolute error of each unit, every row capped at WORST_COUNTED, [units]."""
    capped = np.minimum(np.abs(errors), WORST_COUNTED)
    sums: Floats = np.bincount(units, weights=counts * capped) / np.bincount(units, weights=counts)
    return sums


def simplest_in_every_split(errors: Mapping[OneOf, Sequence[Floats]]) -> OneOf:
    """Among the choices whose error exceeds the first choice's in no split, the first that is within one standard error of
    the best in every split; if there is none, the first that is so in the last split, the hardest. `errors`: choice → the
    errors of each split."""
    first = next(iter(errors))
    mean = {name: [float(part.mean()) for part in parts] for name, parts in errors.items()}
    harmless = [
        name for name in errors if all(own <= its + LEAST_LOSS for own, its in zip(mean[name], mean[first], strict=True))
    ]
    near = [
        within_one_standard_error({name: errors[name][split] for name in harmless}) for split in range(len(errors[first]))
    ]
    return next((name for name in harmless if all(name in choices for choices in near)), near[-1][0])


def within_one_standard_error(errors: Mapping[OneOf, Floats]) -> list[OneOf]:
    """The choices whose mean error exceeds the best one's by at most one standard error of their difference, in the order
    of `errors`. Differences are computed unit by unit, so that units which are hard for every candidate do not blur the
    comparison."""
    best = min(errors, key=lambda name: float(errors[name].mean()))
    found = []
    for name, error in errors.items():
        difference = error - errors[best]
        standard_error = float(difference.std(ddof=1)) / len(difference) ** 0.5
        if name == best or float(difference.mean()) <= standard_error:
            found.append(name)
    return found
