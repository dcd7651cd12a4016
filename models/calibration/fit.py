"""Fits a `Calibration` for one GPU type to measured rows: the learned half of the predictor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peakcast.answers.prediction import QUANTITIES
from peakcast.core.errors import CalibrationError
from peakcast.measurements.records import Measurement
from peakcast.models.calibration.calibration import Calibration, QuantityCalibration
from peakcast.models.calibration.domain import Domain
from peakcast.models.calibration.evidence import evidence_weights, number_of
from peakcast.models.calibration.features import of_quantity
from peakcast.models.calibration.intervals import MIN_ARCHITECTURES, Intervals
from peakcast.models.calibration.regressors import Regressor, candidate_regressors
from peakcast.models.calibration.residual import NUM_FOLDS, Residual
from peakcast.models.calibration.samples import (
    BaselineOf,
    DeviceOf,
    Sample,
    Samples,
    ScopeOf,
    prepare,
    repeat_weights,
    rows_digest,
)
from peakcast.models.calibration.spread import Spread, terms_of

PARTS = {
    "peak_reserved_bytes": ("peak_allocated_bytes",),
    "peak_device_bytes": ("peak_allocated_bytes", "peak_reserved_bytes"),
}
"""Quantity → the quantities that are part of it. Rows of a part say whether a kind of job has the right tensors."""
ENOUGH_ROWS = 60
ENOUGH_ARCHITECTURES = 12
"""A GPU type with this many rows of this many architectures is fitted to its own rows; one with fewer shares the rows of
all GPU types, distinguished by compute capability and number of multiprocessors. (Coverage varies between data sets with
the number of architectures: standard deviation 0.047 at 12, 0.040 at 24, as computed
on 2026-11-21.)"""


def fit(
    rows: Iterable[Measurement],
    gpu: str,
    *,
    created: str,
    device_of: DeviceOf | None = None,
    baseline_of: BaselineOf | None = None,
    scope_of: ScopeOf | None = None,
) -> Calibration:
    """The calibration of GPU type `gpu` from `rows` of any GPU types. `created`: its ISO date. Raises: CalibrationError if
    no row counts or too few architectures do."""
    prepared = prepare(rows, device_of=device_of, baseline_of=baseline_of, scope_of=scope_of)
    return fit_prepared(prepared, gpu, created=created)


def fit_prepared(prepared: Samples, gpu: str, *, created: str) -> Calibration:
    """As `fit`, for rows that were prepared already. Raises: CalibrationError."""
    calibration = fit_samples((*prepared.samples, *prepared.censored), gpu, created=created)
    if not calibration.quantities:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in prepared.left_out.items())
        raise CalibrationError(
            f"{len(prepared.samples)} rows count for {gpu}, too few to calibrate: at least {MIN_ARCHITECTURES} "
            f"architectures are needed{f' (left out: {reasons})' if reasons else ''}; collect more with "
            "`peakcast collect`.",
            parameter="gpu",
            value=gpu,
        )
    return calibration


def fit_samples(
    samples: Sequence[Sample],
    gpu: str,
    *,
    created: str = "",
    learn: Callable[[Sequence[Sample], str, Sequence[Sample]], QuantityCalibration] | None = None,
) -> Calibration:
    """As `fit`, for prepared samples, including those that went out of memory, as bounds. A quantity with too few
    architectures is left out. `learn`: replaces `fit_quantity`."""
    learn = learn or fit_quantity
    quantities: dict[str, QuantityCalibration] = {}
    used: dict[int, Sample] = {}
    for quantity in QUANTITIES:
        rows = rows_for(gpu, quantity, samples)
        if len({sample.architecture for sample in rows if not sample.censored}) < MIN_ARCHITECTURES:
            continue
        compared = [sample for sample in samples if not sample.censored and _compared(sample, quantity)]
        learned = learn(rows, quantity, compared)
        quantities[quantity] = replace(learned, domain=learned.domain.with_kinds_of(compared))
        used.update({id(sample): sample for sample in rows})
    return Calibration(
        gpu=gpu,
        created=created,
        rows_digest=rows_digest(used.values()),
        quantities=quantities,
    )


def rows_for(gpu: str, quantity: str, samples: Sequence[Sample]) -> list[Sample]:
    """The rows from which `gpu` learns a quantity: its own if they are enough, else those of all GPU types."""
    have = [sample for sample in samples if sample.measured(quantity) is not None]
    own = [sample for sample in have if sample.row.gpu == gpu]
    finished = [sample for sample in own if not sample.censored]
    enough = len(finished) >= ENOUGH_ROWS and len({s.architecture for s in finished}) >= ENOUGH_ARCHITECTURES
    return own if enough else have


def _compared(sample: Sample, quantity: str) -> bool:
    """Whether a sample's tensors were compared with a run, for a bar of `quantity`."""
    return any(sample.measured(one) is not None for one in (quantity, *PARTS.get(quantity, ())))


def fit_quantity(
    rows: Sequence[Sample],
    quantity: str,
    compared: Sequence[Sample] = (),
    *,
    make_candidates: Callable[[], list[Regressor]] = candidate_regressors,
    num_folds: int = NUM_FOLDS,
) -> QuantityCalibration:
    """Residual, spread and bars of one quantity. Spread and bars are fitted to the residual's errors on architectures, and
    on sources, that were held out. A bound counts among them only if the prediction was below it. `compared`: samples whose
    kinds of jobs count as measured, beside those of `rows`."""
    weights = repeat_weights(rows)
    own_features = [of_quantity(sample.features, sample.baseline, quantity) for sample in rows]

    def candidates() -> list[Regressor]:
        return [one for one in make_candidates() if quantity not in one.not_of]

    residual = _learned(Residual(make_candidates=candidates, num_folds=num_folds), rows, quantity, own_features, weights)
    held = _held_out(rows, quantity, own_features, compared, residual, weights)
    spread, intervals = _bars(quantity, held)
    finished = [sample for sample in rows if not sample.censored]
    return QuantityCalibration(
        residual=residual,
        spread=spread,
        intervals=intervals,
        domain=Domain.of(finished),
        rows_by_gpu=dict(Counter(sample.row.gpu for sample in finished)),
        unseen_errors=_unseen_errors(rows, quantity, residual, weights),
    )


def _learned(
    residual: Residual,
    rows: Sequence[Sample],
    quantity: str,
    own_features: Sequence[Mapping[str, float]],
    weights: Sequence[float],
) -> Residual:
    """`residual`, fitted to `rows`: each counts as much as it is trusted beside the most trusted one."""
    most = max(sample.trust for sample in rows)
    return residual.fit(
        own_features,
        [sample.log_ratio(quantity) for sample in rows],
        [sample.architecture for sample in rows],
        [sample.residual_group for sample in rows],
        [weight * sample.trust / most for weight, sample in zip(weights, rows, strict=True)],
        [sample.censored for sample in rows],
        [sample.row.project for sample in rows],
    )


def _unseen_errors(
    rows: Sequence[Sample], quantity: str, residual: Residual, weights: Sequence[float]
) -> dict[str, float]:
    """The mean error (log) of each architecture, predicted without its own rows, over the runs that finished."""
    guesses = residual.splits_[0].guesses.tolist()
    known = [
        (sample.architecture, abs(sample.log_ratio(quantity) - guess), weight)
        for sample, guess, weight in zip(rows, guesses, weights, strict=True)
        if not sample.censored
    ]
    names, errors, counts = zip(*known, strict=True) if known else ((), (), ())
    return mean_by_architecture(names, errors, counts)


@dataclass(frozen=True, slots=True)
class _Held:
    """A row predicted without its unit: its error (log), and the terms that say how large an error to expect."""

    sample: Sample
    unit: str
    missed: float
    terms: dict[str, float]
    weight: float


def _held_out(
    rows: Sequence[Sample],
    quantity: str,
    features: Sequence[Mapping[str, float]],
    compared: Sequence[Sample],
    residual: Residual,
    weights: Sequence[float],
) -> list[_Held]:
    """Each row as `residual` predicted it without its architecture, and again without its source. `features`: of the
    residual, [rows]; `compared`: as in `fit_quantity`; a source's terms count their kinds of jobs too."""
    held = []
    for name, units, split in zip(("architecture", "source"), _units(rows), residual.splits_, strict=False):
        terms = _terms(rows, features, quantity, (*rows, *compared) if name == "source" else None)
        for i, guess in enumerate(split.guesses.tolist()):
            missed = rows[i].log_ratio(quantity) - guess
            if not rows[i].censored or missed > 0:
                held.append(_Held(rows[i], f"{name} {units[i]}", missed, terms[i], weights[i]))
    return held


def _bars(quantity: str, held: Sequence[_Held]) -> tuple[Spread, Intervals]:
    """The error to expect of a prediction, and the intervals, from rows that were predicted without their unit."""
    missed, units, weights = [h.missed for h in held], [h.unit for h in held], [h.weight for h in held]
    spread = Spread(quantity).fit([h.terms for h in held], missed, evidence_weights(number_of(units), np.array(weights)))
    expected = [spread.predict(h.terms) for h in held]
    return spread, Intervals().fit(missed, units, [h.sample.groups for h in held], weights, expected)


def _units(rows: Sequence[Sample]) -> tuple[list[str], list[str]]:
    """The unit of each row in each split of `Residual`, [rows]."""
    return [sample.architecture for sample in rows], [sample.row.project for sample in rows]


def mean_by_architecture(
    architectures: Sequence[str], errors: Sequence[float], weights: Sequence[float]
) -> dict[str, float]:
    """The weighted mean of `errors` of each architecture."""
    sums: dict[str, tuple[float, float]] = {}
    for name, error, weight in zip(architectures, errors, weights, strict=True):
        total, size = sums.get(name, (0.0, 0.0))
        sums[name] = (total + weight * error, size + weight)
    return {name: total / size for name, (total, size) in sorted(sums.items())}


def _terms(
    rows: Sequence[Sample], features: Sequence[Mapping[str, float]], quantity: str, compared: Sequence[Sample] | None
) -> list[dict[str, float]]:
    """The terms of each row, as `bars.bar_of` has them: how far it was outside the rows of other sources, which predicted
    it, and whether any of `compared` from other sources is of its kind. None: they were predicted without their
    architecture, which is not a reason to be outside. So rows of a stack on which one architecture was run teach what to
    expect inside, not that being outside costs nothing."""
    if compared is None:
        return [terms_of(own, quantity, 0) for own in features]

    def without(source: str, samples: Sequence[Sample]) -> list[Sample]:
        return [sample for sample in samples if sample.row.project != source and not sample.censored]

    domains = {
        source: Domain.of(without(source, rows)).with_kinds_of(without(source, compared))
        for source in {sample.row.project for sample in rows}
    }
    return [
        terms_of(
            own,
            quantity,
            domains[row.row.project].distance(row.row.job, row.features, row.row.gpu),
            new_kind=not domains[row.row.project].has_kind(row.row.job),
        )
        for row, own in zip(rows, features, strict=True)
    ]
