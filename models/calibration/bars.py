"""The error bar of one quantity of one job: how large an error to expect, and on what evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peakcast.answers.prediction import RestsOn
from peakcast.core.findings import OUT_OF_SCOPE, Finding, guessed
from peakcast.models.calibration.domain import MOST_SEVERE, severity
from peakcast.models.calibration.spread import JUDGED_FACTOR, Spread, terms_of

if TYPE_CHECKING:
    from peakcast.jobs.spec import TrainingJob
    from peakcast.models.calibration.calibration import QuantityCalibration

WIDEST = math.log(2.0)
"""Bars are at most a factor of two in each direction; a wider bar would say nothing."""


@dataclass(frozen=True, slots=True)
class LogBar:
    """A bar in log space: the measurement is expected between point·exp(-`below`) and point·exp(`half_width`), and below
    point·exp(`upper`)."""

    half_width: float
    upper: float
    rests_on: RestsOn
    below: float
    """As `half_width`, unless something is left out that only lowers or only raises the peak (`Finding.leaves_out`)."""


def bar_of(
    quantity: str,
    learned: QuantityCalibration | None,
    job: TrainingJob,
    row: Mapping[str, float],
    groups: Sequence[str],
    gpu: str,
    findings: Iterable[Finding] = (),
) -> LogBar:
    """The bar of `quantity` for `job` on the GPU type `gpu`, from what was `learned` of the quantity (None: nothing).

    `row`: the job's features for this quantity (`features.of_quantity`); `groups`: its `grouping.bar_groups`; `findings`:
    what the ledger and the reading of the question leave open. How far outside the job is depends on the rows of this
    quantity: device memory may have no rows of a framework for which allocated memory has many. A share that a finding says
    (`Finding.share`) is added to the bar of a job without that finding, so that it includes all that the sentence says.
    What a configuration asks for and a job cannot say widens the end to which it moves the peak, as much as what the ledger
    does not count.
    """
    open_questions = tuple(findings)
    if guessed(open_questions):
        # a judgement: nothing says how the network differs from the one that is counted instead
        return LogBar(WIDEST, WIDEST, "judgement", WIDEST)

    def bar(*, unmodelled: bool) -> tuple[float, float, RestsOn]:
        return _bar(quantity, learned, job, row, groups, gpu, open_questions, unmodelled=unmodelled)

    unmodelled, left_out = any(one.of_unknown_size for one in open_questions), {one.leaves_out for one in open_questions}
    half_width, upper, rests_on = bar(unmodelled=unmodelled or "more" in left_out)
    below, _, rests_below = bar(unmodelled=unmodelled or "less" in left_out)
    return LogBar(half_width, upper, "judgement" if "judgement" in (rests_on, rests_below) else rests_on, below)


def _bar(
    quantity: str,
    learned: QuantityCalibration | None,
    job: TrainingJob,
    row: Mapping[str, float],
    groups: Sequence[str],
    gpu: str,
    findings: Sequence[Finding],
    *,
    unmodelled: bool,
) -> tuple[float, float, RestsOn]:
    """The distances of a bar's ends, and what they rest on, as of `bar_of`. `unmodelled`: whether something of unknown size
    is left out that moves the end."""
    far = severity(finding for finding in findings if finding.severity < OUT_OF_SCOPE)
    # the measurement may be smaller or larger by that share of the answer; smaller is the larger distance in logarithms
    off = sum(-math.log1p(-finding.share) for finding in findings if finding.share)
    if learned is None:
        expected = Spread(quantity).predict(terms_of(row, quantity, MOST_SEVERE, unmodelled=unmodelled))
        width = min(JUDGED_FACTOR * expected + off, WIDEST)
        return width, width, "judgement"
    far = min(far + learned.domain.distance(job, row, gpu), MOST_SEVERE)
    new_kind = not learned.domain.has_kind(job)
    expected = learned.spread.predict(terms_of(row, quantity, far, new_kind=new_kind, unmodelled=unmodelled))
    found = learned.intervals.bar(groups)
    half_width, upper = (found[1].half_width, found[1].upper) if found else (JUDGED_FACTOR,) * 2
    rests_on: RestsOn = "judgement" if unmodelled or found is None else "relatives" if far or off else "measurements"
    return min(half_width * expected + off, WIDEST), min(upper * expected + off, WIDEST), rests_on
