"""Predictions for rows that were left out of the fit, by the same procedure that users get."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peakcast.answers.prediction import Interval
from peakcast.models.calibration.calibration import Calibration, QuantityCalibration, distance
from peakcast.models.calibration.fit import fit_quantity, fit_samples
from peakcast.models.calibration.regressors import Regressor
from peakcast.models.calibration.samples import Sample
from peakcast.models.prediction.combining import combine

NUM_FOLDS = 5
"""Folds of the cross-validation inside each fit."""
MakeCandidates = Callable[[], list[Regressor]]
Answers = dict[str, Interval]
"""Quantity → interval."""


def held_out(
    samples: Sequence[Sample], group_of: Callable[[Sample], str], make_candidates: MakeCandidates
) -> dict[int, Answers]:
    """Position of a sample -> its answers from a calibration fitted without its group; a group that contains all samples
    has none. Samples that went out of memory are bounds for the fits, and are answered too."""
    names = [group_of(sample) for sample in samples]
    answers: dict[int, Answers] = {}
    for left_out in sorted(set(names)):
        train = [sample for sample, name in zip(samples, names, strict=True) if name != left_out]
        positions = [position for position, name in enumerate(names) if name == left_out]
        if any(not sample.censored for sample in train):
            found = answers_of([samples[position] for position in positions], train, make_candidates)
            answers.update(zip(positions, found, strict=True))
    return answers


def answers_of(samples: Sequence[Sample], train: Sequence[Sample], make_candidates: MakeCandidates) -> list[Answers]:
    """The answers for `samples` from calibrations fitted to `train`: of the sample's own GPU type if that has rows, else of
    its nearest relative, as `predict` does."""
    learn = _Memory(make_candidates)
    devices = {other.row.gpu: other.device for other in train if not other.censored}
    fitted: dict[str, Calibration] = {}
    answers = []
    for sample in samples:
        gpu = sample.row.gpu
        if gpu not in devices:
            gpu = min(devices, key=lambda name: distance(sample.device, devices[name]))
        if gpu not in fitted:
            fitted[gpu] = fit_samples(train, gpu, learn=learn)
        answers.append(answer(sample, fitted[gpu]))
    return answers


def answer(sample: Sample, calibration: Calibration) -> Answers:
    """The answers of `calibration` for the job of `sample`, whose baseline is known already."""
    return combine(sample.row.job, sample.baseline, sample.features, calibration, sample.device)


class _Memory:
    """`fit_quantity` with a cache: GPU types that share all rows share one fit."""

    def __init__(self, make_candidates: MakeCandidates) -> None:
        self.make_candidates = make_candidates
        self.known: dict[tuple[str, tuple[int, ...]], QuantityCalibration] = {}

    def __call__(self, rows: Sequence[Sample], quantity: str, compared: Sequence[Sample]) -> QuantityCalibration:
        key = (quantity, tuple(id(sample) for sample in rows))
        if key not in self.known:
            self.known[key] = fit_quantity(
                rows, quantity, compared, make_candidates=self.make_candidates, num_folds=NUM_FOLDS
            )
        return self.known[key]
