"""How often the answers to "does it fit" are right, for architectures that were held out.

There are two kinds of truth. A measured peak says whether the job would fit a GPU of any capacity, so each row is judged
for several capacities by the rule of `verdict.judge`: `yes` if the one-sided 95 % bound is below the capacity, `no` if the
lower end is above it. And the runs themselves show whether they fitted the GPU that they ran on. Repeats of a
configuration share one weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from peakcast.answers.prediction import Limit
from peakcast.core.units import GIB
from peakcast.models.calibration.samples import Sample, repeat_weights
from peakcast.models.evaluation.holdout import Answers
from peakcast.models.prediction.verdict import judge

CAPACITIES_GIB = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192)
"""Sizes of existing GPUs, and smaller ones for rows of small networks. Only those within the range of the rows are used."""
OUTCOMES = "outcomes"
"""Replaces a quantity's name for the runs' own outcomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Answers about one capacity; the counts are sums of weights."""

    capacity_bytes: int | None
    """None if several capacities are counted together, or for the GPUs that the jobs ran on."""
    yes_fits: float = 0.0
    yes_too_big: float = 0.0
    """The costly mistake: the answer was that it fits, and it does not."""
    no_fits: float = 0.0
    no_too_big: float = 0.0
    uncertain_fits: float = 0.0
    uncertain_too_big: float = 0.0

    @property
    def precision(self) -> float | None:
        """Share of the jobs answered with `yes` that fit; None if there were none."""
        return _share(self.yes_fits, self.yes_fits + self.yes_too_big)

    @property
    def recall(self) -> float | None:
        """Share of the jobs that fit that were answered with `yes`; None if none fits."""
        return _share(self.yes_fits, self.yes_fits + self.no_fits + self.uncertain_fits)

    @property
    def no_precision(self) -> float | None:
        """Share of the jobs answered with `no` that do not fit."""
        return _share(self.no_too_big, self.no_too_big + self.no_fits)

    @property
    def no_recall(self) -> float | None:
        """Share of the jobs that do not fit that were answered with `no`."""
        return _share(self.no_too_big, self.no_too_big + self.yes_too_big + self.uncertain_too_big)

    @property
    def num_asked(self) -> float:
        """Number of answers (sum of weights)."""
        fits = self.yes_fits + self.no_fits + self.uncertain_fits
        return fits + self.yes_too_big + self.no_too_big + self.uncertain_too_big

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form, shares included."""
        shares = ("precision", "recall", "no_precision", "no_recall", "num_asked")
        return {**asdict(self), **{name: getattr(self, name) for name in shares}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Answers for one quantity over all capacities or, with `quantity` = OUTCOMES, for the runs' own outcomes."""

    quantity: str
    total: Decision
    by_capacity: tuple[Decision, ...]
    above_upper_95: float
    """Share of measured peaks above the one-sided 95 % bound, which promises at most 5 %. For outcomes: the share of runs
    out of memory for which the answer was `yes`."""
    num_rows: int

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "quantity": self.quantity,
            "num_rows": self.num_rows,
            "above_upper_95": self.above_upper_95,
            "total": self.total.to_mapping(),
            "by_capacity": [decision.to_mapping() for decision in self.by_capacity],
        }


def decisions_of(
    samples: Sequence[Sample], answers: Mapping[int, Answers], quantities: Sequence[str]
) -> tuple[Decisions, ...]:
    """The decisions for each quantity that rows have, and for the runs' outcomes. `answers`: by position in `samples`, from
    calibrations that were fitted without them."""
    asked = [(sample, answers[position]) for position, sample in enumerate(samples) if position in answers]
    finished = [(sample, answer) for sample, answer in asked if not sample.censored]
    found = [_by_capacity(finished, quantity) for quantity in quantities]
    return (*(decisions for decisions in found if decisions), *_outcomes(asked))


def _by_capacity(asked: Sequence[tuple[Sample, Answers]], quantity: str) -> Decisions | None:
    """Decisions on one quantity, if the GPU had each of the sizes `CAPACITIES_GIB` that lie between the smallest and the
    largest measured peak. None if no row has the quantity."""
    rows = [(sample, answer[quantity], sample.measured(quantity) or 0) for sample, answer in asked]
    rows = [row for row in rows if row[2]]
    if not rows:
        return None
    weights = repeat_weights([sample for sample, _, _ in rows])
    smallest, largest = min(peak for _, _, peak in rows), max(peak for _, _, peak in rows)
    by_capacity = []
    for capacity in (round(size * GIB) for size in CAPACITIES_GIB):
        if not smallest <= capacity <= largest:
            continue
        answers = [
            ("yes" if bar.upper_95 < capacity else "no" if bar.lower > capacity else "uncertain", peak <= capacity, weight)
            for (_, bar, peak), weight in zip(rows, weights, strict=True)
        ]
        by_capacity.append(_counts_of_answers(capacity, answers))
    above = sum(weight for (_, bar, peak), weight in zip(rows, weights, strict=True) if peak > bar.upper_95)
    return Decisions(
        quantity=quantity,
        total=_sum_of_decisions(by_capacity),
        by_capacity=tuple(by_capacity),
        above_upper_95=above / sum(weights),
        num_rows=len(rows),
    )


def _outcomes(asked: Sequence[tuple[Sample, Answers]]) -> tuple[Decisions, ...]:
    """Decisions whether a job fits its own GPU, against whether the run went out of memory; none if no run did."""
    if not any(sample.censored for sample, _ in asked):
        return ()
    weights = repeat_weights([sample for sample, _ in asked])
    answers = [
        (judge(answer, [Limit("peak_device_bytes", sample.device.cuda_memory_bytes)]).fits, not sample.censored, weight)
        for (sample, answer), weight in zip(asked, weights, strict=True)
    ]
    total = _counts_of_answers(None, answers)
    too_big = total.yes_too_big + total.no_too_big + total.uncertain_too_big
    return (
        Decisions(
            quantity=OUTCOMES,
            total=total,
            by_capacity=(),
            above_upper_95=total.yes_too_big / too_big,
            num_rows=len(asked),
        ),
    )


def _counts_of_answers(capacity: int | None, answers: Sequence[tuple[str, bool, float]]) -> Decision:
    counts: dict[str, float] = {}
    for said, fits, weight in answers:
        name = f"{said}_{'fits' if fits else 'too_big'}"
        counts[name] = counts.get(name, 0.0) + weight
    return Decision(capacity_bytes=capacity, **counts)


def _sum_of_decisions(parts: Sequence[Decision]) -> Decision:
    names = [name for name in Decision.__slots__ if name != "capacity_bytes"]
    return Decision(capacity_bytes=None, **{name: sum(getattr(part, name) for part in parts) for name in names})


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
