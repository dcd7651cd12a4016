"""How far what a run reserves hangs on the exact order of its requests: replays in which some tensors go a little later.

Best fit puts each tensor into the smallest hole that is there. A tensor that stays (an optimizer state) and lands in one
hole rather than another decides whether a request of many GiB still fits below it. So one operation more or less between
two requests may move the reserved peak by GiB. Where a compiler orders them, it does so for one release and one GPU: two
public runs on eight H100 (modded-nanogpt, records of 2025-01-26 and 2025-05-30) print 44,552 and 40,536 MiB reserved;
replays of the same scripts, compiled by a later release, with tensors that go at most five operations later give 41,000 to
50,000 and 36,000 to 44,500.

Of code that is not compiled the order that was seen is the run's own: moving tensors there makes 60 published runs, whose
replays are 0.5 % off at the median, 2 to 5 % too high. A disturbed order is worse than most natural ones, so that the mean
of nearby ones lies rather above than below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from peakcast.timeline import Timeline

NUM_ORDERS = 15
LATER_SHARE, MOST_LATER = 0.3, 5
"""Which share of the tensors goes later, and by how many operations at most. Judged, not measured."""


def nearby_orders(steps: Sequence[Timeline]) -> Iterator[list[Timeline]]:
    """The steps of a run, `NUM_ORDERS` times, always the same: each time other tensors live a little longer, none beyond
    the end of its step."""
    for seed in range(NUM_ORDERS):
        random = np.random.default_rng(seed)
        yield [_later(step, random) for step in steps]


def _later(step: Timeline, random: np.random.Generator) -> Timeline:
    end = len(step.phases)
    chosen = (random.random(len(step.dies)) < LATER_SHARE) & (step.dies < end)
    dies = np.where(chosen, np.minimum(step.dies + random.integers(1, MOST_LATER + 1, len(step.dies)), end), step.dies)
    return replace(step, dies=dies, reusable=None if step.reusable is None else np.maximum(step.reusable, dies))
