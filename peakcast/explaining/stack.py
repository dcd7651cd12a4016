"""The memory of a step by category over its instants: what both pictures draw."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peakcast.timeline import Category, Phase, Timeline


@dataclass(frozen=True, slots=True)
class Band:
    """Categories that are drawn as one: their name, a colour for pictures, a character for terminals."""

    name: str
    categories: tuple[Category, ...]
    colour: str
    character: str


WEIGHTS = (Category.PARAMETERS, Category.MAIN_PARAMETERS, Category.REFERENCE_PARAMETERS)
BANDS = (
    Band("weights", WEIGHTS, "#1d4e89", "█"),
    Band("optimizer states", (Category.OPTIMIZER_STATES,), "#5b8db8", "▓"),
    Band("gradients", (Category.GRADIENTS,), "#7a9e3f", "▒"),
    Band("activations", (Category.ACTIVATIONS,), "#f2b134", "░"),
    Band("key-value cache", (Category.KV_CACHE,), "#3f8f8a", "="),
    Band("logits", (Category.LOGITS,), "#d9572b", "+"),
    Band("temporaries", (Category.TEMPORARIES, Category.OPTIMIZER_TEMPORARIES), "#9b5094", "~"),
    Band(
        "buffers and other",
        (Category.COMMUNICATION_BUFFERS, Category.WORKSPACES, Category.INPUTS, Category.OTHER),
        "#8a94a0",
        "·",
    ),
)
"""From the bottom up: what stands longest first. Every category is in exactly one band."""


def stacked(timeline: Timeline) -> npt.NDArray[np.int64]:
    """Bytes of each band at each instant, [len(BANDS), num_instants]; a column adds up to the timeline's total there."""
    end = len(timeline.phases)
    sums = np.zeros((len(BANDS), end), dtype=np.int64)
    for row, band in enumerate(BANDS):
        chosen = np.isin(timeline.categories, [int(category) for category in band.categories])
        change = np.zeros(end + 1, dtype=np.int64)
        np.add.at(change, np.clip(timeline.born[chosen], 0, end), timeline.num_bytes[chosen])
        np.subtract.at(change, np.clip(timeline.dies[chosen], 0, end), timeline.num_bytes[chosen])
        sums[row] = np.cumsum(change)[:-1]
    return sums


def spans(timeline: Timeline) -> list[tuple[Phase, int, int]]:
    """(phase, first instant, instant after the last) of each stretch of one phase, in order."""
    edges = np.flatnonzero(np.diff(timeline.phases)) + 1
    starts = [0, *edges.tolist(), len(timeline.phases)]
    return [(Phase(int(timeline.phases[start])), start, stop) for start, stop in itertools.pairwise(starts)]


LEAST_SHARE = 0.08
"""A stretch of one phase takes at least this part of a picture, however few its operations: the loss and the optimizer
step, where peaks are, have one in a hundred."""
PEAK_SHARE = 0.012
"""The peak's own instant takes this part where it is one of very many."""
WIDENED_SHARE = 0.4
"""All stretches together are widened to at most this part, in steps of many micro-batches."""


def sampled(timeline: Timeline, count: int) -> npt.NDArray[np.int64]:
    """`count` instants in order, one for each column of a picture: of a long stretch of one phase the largest total of each
    equal part, so that no peak is lost; of a short one, and of the peak itself, each instant several times."""
    stretches, peak = spans(timeline), timeline.peak().instant
    chosen: list[int] = []
    for (_, start, stop), width in zip(stretches, _widths(stretches, count), strict=True):
        around = round(count * PEAK_SHARE) if start <= peak < stop and 2 * width < stop - start else 0
        before = (width - around) * (peak - start) // (stop - start) if around else width
        chosen += _of_stretch(timeline, start, peak if around else stop, before)
        chosen += [peak] * around
        chosen += _of_stretch(timeline, peak + 1, stop, width - around - before) if around else []
    return np.array(chosen, dtype=np.int64)


def _of_stretch(timeline: Timeline, start: int, stop: int, width: int) -> list[int]:
    """`width` instants from `start` to `stop` (exclusive); after a peak that ends its stretch there are none,
    and the peak is repeated."""
    start = min(start, stop - 1)
    if width >= stop - start:
        return [start + column * (stop - start) // width for column in range(width)]
    edges = np.linspace(start, stop, width + 1).astype(int)
    return [int(a) + int(np.argmax(timeline.totals[a:b])) for a, b in itertools.pairwise(edges)]


def _widths(stretches: list[tuple[Phase, int, int]], count: int) -> list[int]:
    """Columns of each stretch: in proportion to its operations, but no less than `LEAST_SHARE`; they add up to `count`."""
    least = count * min(LEAST_SHARE, WIDENED_SHARE / len(stretches))
    lengths = np.array([stop - start for _, start, stop in stretches], dtype=float)
    widths = lengths / lengths.sum() * count
    short = widths < least
    if short.any() and not short.all():
        widths[~short] = lengths[~short] / lengths[~short].sum() * (count - least * short.sum())
        widths[short] = least
    edges = np.rint(np.concatenate([[0], np.cumsum(widths)])).astype(int)
    return np.diff(edges).tolist()  # type: ignore[no-any-return]
