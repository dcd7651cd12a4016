"""Whether a calibration still holds, checked against measurements that it was not made from: a user's own, with today's
software.

A bar promises that 90 % of measurements are inside, a bound that 95 % are below. The number of rows that are is binomial,
so few rows can refute a promise that is far off, but cannot confirm one: the confidence interval shows which.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from peakcast.answers.prediction import Interval
from peakcast.models.calibration.calibration import Calibration
from peakcast.models.calibration.intervals import COVERAGE, UPPER_COVERAGE
from peakcast.models.calibration.samples import Sample, repeat_weights
from peakcast.models.evaluation.holdout import Answers, answer
from peakcast.models.evaluation.metrics import weighted_quantile
from peakcast.models.prediction.predict import reasons_outside

CONFIDENCE = 0.95
"""Confidence of the interval around an observed share: a promise outside it counts as broken."""
ENOUGH_CONFIGURATIONS = 10
"""With fewer configurations, a promise that is not refuted is not confirmed either: 10 of 10 inside are still possible with
69 %."""

Verdict = Literal["holds", "too few", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One quantity on one GPU type. Shares and errors are fractions; repeats of a configuration count once."""

    gpu: str
    quantity: str
    calibration: str
    """The GPU type whose calibration answered."""
    num_rows: int
    num_configurations: int
    num_architectures: int
    median_error: float
    bias: float
    """Median of the signed error: below 0 means predicted too low."""
    coverage: float
    coverage_interval: tuple[float, float]
    above_upper_95: float
    """Share of measurements above the one-sided 95 % bound."""
    above_interval: tuple[float, float]
    median_half_width: float
    outside: dict[str, int]
    """Why rows are outside what the calibration has seen (versions, layouts, sizes), with the number of rows for each
    reason."""

    @property
    def verdict(self) -> Verdict:
        """`broken` if the rows contradict the bar or the bound, `too few` if there are too few to confirm them."""
        if self.coverage_interval[1] < COVERAGE or self.above_interval[0] > 1 - UPPER_COVERAGE:
            return "broken"
        return "holds" if self.num_configurations >= ENOUGH_CONFIGURATIONS else "too few"

    @property
    def sentences(self) -> tuple[str, ...]:
        """The check in words, the verdict first."""
        name = self.quantity.removeprefix("peak_").removesuffix("_bytes")
        what = f"the calibration of {self.calibration} for {name} memory on {self.gpu}"
        verdict = {
            "holds": f"{what} holds.",
            "too few": f"{what} is not contradicted, but {self.num_configurations} configurations are too few to confirm "
            f"it; measure at least {ENOUGH_CONFIGURATIONS}.",
            "broken": f"{what} no longer holds; fit it again with these rows: `peakcast fit --gpu {self.gpu}`.",
        }[self.verdict]
        low, high = self.coverage_interval
        least, most = self.above_interval
        return (
            verdict[0].upper() + verdict[1:],
            f"Of {self.num_configurations} configurations ({self.num_rows} rows, {self.num_architectures} architectures) "
            f"{self.coverage:.0%} lie inside the 90 % bar, between {low:.0%} and {high:.0%} with 95 % confidence.",
            f"{self.above_upper_95:.0%} lie above the 95 % bound ({least:.0%} to {most:.0%}); 5 % may.",
            f"The median error is {self.median_error:.2%}, and predictions are {abs(self.bias):.2%} too "
            f"{'low' if self.bias < 0 else 'high'} in the median; the bars are ± {self.median_half_width:.1%} wide.",
            *(f"{count} of {self.num_rows} rows: {reason}" for reason, count in self.outside.items()),
        )

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "verdict": self.verdict, "sentences": list(self.sentences)}


def check(
    samples: Sequence[Sample], calibration_of: Callable[[Sample], Calibration], quantities: Sequence[str]
) -> tuple[Check, ...]:
    """The checks for every GPU type and quantity that `samples` have, with the answers of `calibration_of` each."""
    answered = [(sample, calibration_of(sample)) for sample in samples]
    answers = [answer(sample, calibration) for sample, calibration in answered]
    checks = []
    for gpu in sorted({sample.row.gpu for sample in samples}):
        for quantity in quantities:
            rows = [
                (sample, calibration, found)
                for (sample, calibration), found in zip(answered, answers, strict=True)
                if sample.row.gpu == gpu and sample.measured(quantity) is not None
            ]
            if rows:
                checks.append(_check(gpu, quantity, rows))
    return tuple(checks)


def _check(gpu: str, quantity: str, rows: Sequence[tuple[Sample, Calibration, Answers]]) -> Check:
    """The check of one GPU type and quantity."""
    samples = [sample for sample, _, _ in rows]
    weights = np.array(repeat_weights(samples))
    bars: list[Interval] = [found[quantity] for _, _, found in rows]
    measured = np.array([sample.measured(quantity) for sample in samples], dtype=np.float64)
    point, lower, upper, bound = (
        np.array([getattr(bar, name) for bar in bars], dtype=np.float64)
        for name in ("point", "lower", "upper", "upper_95")
    )
    total = float(weights.sum())
    coverage = float(weights[(lower <= measured) & (measured <= upper)].sum()) / total
    above = float(weights[measured > bound].sum()) / total
    reasons = Counter(
        reason.sentence
        for sample, calibration, _ in rows
        for reason in reasons_outside(sample.row.job, sample.device, sample.features, calibration)
    )
    num = round(total)
    return Check(
        gpu=gpu,
        quantity=quantity,
        calibration=rows[0][1].gpu,
        num_rows=len(rows),
        num_configurations=num,
        num_architectures=len({sample.architecture for sample in samples}),
        median_error=weighted_quantile(np.abs(point / measured - 1), weights, 0.5),
        bias=weighted_quantile(point / measured - 1, weights, 0.5),
        coverage=coverage,
        coverage_interval=binomial_interval(round(coverage * num), num),
        above_upper_95=above,
        above_interval=binomial_interval(round(above * num), num),
        median_half_width=weighted_quantile((upper - lower) / 2 / point, weights, 0.5),
        outside=dict(reasons.most_common()),
    )


def binomial_interval(successes: int, num: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact two-sided confidence interval of a share (Clopper & Pearson 1934), by bisection."""
    tail = (1 - confidence) / 2

    def at_most(share: float) -> float:
        """Probability of `successes` or fewer."""
        return math.fsum(math.comb(num, k) * share**k * (1 - share) ** (num - k) for k in range(successes + 1))

    def below(share: float) -> float:
        """Probability of fewer than `successes`."""
        return math.fsum(math.comb(num, k) * share**k * (1 - share) ** (num - k) for k in range(successes))

    low = 0.0 if successes == 0 else _solve(lambda share: 1 - below(share) < tail)
    high = 1.0 if successes == num else _solve(lambda share: at_most(share) > tail)
    return low, high


def _solve(holds_below: Callable[[float], bool]) -> float:
    """The share up to which `holds_below` holds."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds_below(middle) else (low, middle)
    return (low + high) / 2
