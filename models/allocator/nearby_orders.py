"""How much a run's reserved memory depends on the exact order of its requests: replays in which some tensors are freed a
little later.

Best fit puts each tensor into the smallest free block that holds it. Where a tensor that stays (an optimizer state) lands
decides whether a request of many GiB still fits, so one operation more or less between two requests may move the reserved
peak by GiB. Where a compiler orders the requests, the order holds for one release and one GPU only: two public runs on
eight H100 (modded-nanogpt, records of 2025-01-26 and 2025-05-30) print 44,552 and 40,516 MiB reserved; replays of the same
scripts, compiled by a later release, with tensors freed at most five operations later, give 41,000 to 50,000 and 36,000 to
44,500.

Code that is not compiled has the order that was observed: changing it makes 60 published runs, whose replays are 0.5 % off
at the median, 2 to 5 % too high. A disturbed order is worse than most natural ones, so the mean of nearby orders is rather
too high than too low.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from peakcast.timelines.timeline import Timeline

NUM_ORDERS = 15
LATER_SHARE, MOST_LATER = 0.3, 5
"""The share of tensors that are freed later, and by how many operations at most. Judged, not measured."""


def nearby_orders(steps: Sequence[Timeline]) -> Iterator[list[Timeline]]:
    """The steps of a run, `NUM_ORDERS` times and always the same: each time other tensors live a little longer, but not
    beyond the end of their step."""
    for seed in range(NUM_ORDERS):
        random = np.random.default_rng(seed)
        yield [_later(step, random) for step in steps]


def _later(step: Timeline, random: np.random.Generator) -> Timeline:
    """The step with some tensors freed later."""
    end = len(step.phases)
    chosen = (random.random(len(step.dies)) < LATER_SHARE) & (step.dies < end)
    dies = np.where(chosen, np.minimum(step.dies + random.integers(1, MOST_LATER + 1, len(step.dies)), end), step.dies)
    return replace(step, dies=dies, reusable=None if step.reusable is None else np.maximum(step.reusable, dies))
