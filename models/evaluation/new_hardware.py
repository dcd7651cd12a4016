"""How much the accuracy on a GPU type that was never measured gains from a few rows of its own.

For each GPU type in turn, the fit gets every row of the other types and a few randomly drawn rows of its own. It is judged
on the cases that ran on all types, except those in the fit. Without rows of its own the calibration is that of the nearest
relative, as for any user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peakcast.answers.prediction import Interval
from peakcast.models.calibration.samples import Sample, repeat_weights
from peakcast.models.evaluation.holdout import MakeCandidates, answers_of
from peakcast.models.evaluation.metrics import weighted_quantile

COUNTS = (0, 5, 10, 20, 50)
NUM_DRAWS = 4
"""Number of random draws of the rows; their results are pooled."""
FEWEST_JUDGED = 5
"""Least number of cases to judge on; with fewer there is no point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningPoint:
    """Accuracy on one GPU type with `num_rows` rows of its own. Shares and errors are fractions."""

    gpu: str
    quantity: str
    num_rows: int
    num_judged: int
    """Number of cases judged on, over all draws."""
    median_error: float
    p95_error: float
    coverage: float
    median_half_width: float


def learning_curves(
    samples: Sequence[Sample],
    quantities: Sequence[str],
    make_candidates: MakeCandidates,
    *,
    counts: Sequence[int] = COUNTS,
    num_draws: int = NUM_DRAWS,
) -> tuple[LearningPoint, ...]:
    """One point for each GPU type, quantity and number of rows for which enough cases ran on every GPU type."""
    points = []
    for quantity in quantities:
        rows = [sample for sample in samples if sample.censored or sample.measured(quantity) is not None]
        gpus = sorted({sample.row.gpu for sample in rows if not sample.censored})
        ran_on: dict[tuple[str, int | None], set[str]] = {}
        for sample in rows:
            if not sample.censored:
                ran_on.setdefault(_case(sample), set()).add(sample.row.gpu)
        shared = {case for case, seen in ran_on.items() if len(gpus) > 1 and len(seen) == len(gpus)}
        for gpu in gpus:
            own = [sample for sample in rows if sample.row.gpu == gpu and not sample.censored]
            others = [sample for sample in rows if sample.row.gpu != gpu]
            for count in counts:
                scored: list[tuple[Sample, Interval]] = []
                for draw in range(num_draws if count else 1):
                    shown = _draw(own, count, draw)
                    seen = {_case(sample) for sample in shown}
                    judged = [sample for sample in own if _case(sample) in shared - seen]
                    if len(shown) == count and len({_case(sample) for sample in judged}) >= FEWEST_JUDGED:
                        answers = answers_of(judged, [*others, *shown], make_candidates)
                        scored += [(s, answer[quantity]) for s, answer in zip(judged, answers, strict=True)]
                if scored:
                    points.append(_point(gpu, quantity, count, scored))
    return tuple(points)


def _case(sample: Sample) -> tuple[str, int | None]:
    """Equal for the same case on different GPU types."""
    return (sample.row.job.config_hash, sample.row.rank)


def _draw(own: Sequence[Sample], count: int, draw: int) -> list[Sample]:
    """`count` rows of `own` (fewer if it has fewer), different cases first; the same for the same `draw`."""
    order = np.random.default_rng(draw).permutation(len(own))
    first: dict[tuple[str, int | None], int] = {}
    for position in order.tolist():
        first.setdefault(_case(own[position]), position)
    again = [position for position in order.tolist() if position not in set(first.values())]
    return [own[position] for position in [*first.values(), *again][:count]]


def _point(gpu: str, quantity: str, count: int, scored: Sequence[tuple[Sample, Interval]]) -> LearningPoint:
    """The accuracy of these predictions."""
    weights = np.array(repeat_weights([sample for sample, _ in scored]))
    measured = np.array([sample.measured(quantity) for sample, _ in scored], dtype=np.float64)
    point, lower, upper = (
        np.array([getattr(bar, name) for _, bar in scored], dtype=np.float64) for name in ("point", "lower", "upper")
    )
    errors = np.abs(point / measured - 1)
    inside = (lower <= measured) & (measured <= upper)
    return LearningPoint(
        gpu=gpu,
        quantity=quantity,
        num_rows=count,
        num_judged=len(scored),
        median_error=weighted_quantile(errors, weights, 0.5),
        p95_error=weighted_quantile(errors, weights, 0.95),
        coverage=float(weights[inside].sum() / weights.sum()),
        median_half_width=weighted_quantile((upper - lower) / 2 / point, weights, 0.5),
    )
