"""The memory of a step by category over its instants, for both pictures."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peakcast.timelines.timeline import Category, Phase, Timeline


@dataclass(frozen=True, slots=True)
class Band:
    """Categories that are drawn together: their name, a colour for pictures, a character for terminals."""

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
"""From the bottom up; what lives longest is at the bottom. Every category is in exactly one band."""


def stacked(timeline: Timeline) -> npt.NDArray[np.int64]:
    """Bytes of each band at each instant, [len(BANDS), num_instants]; a column adds up to the timeline's total."""
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
    """(phase, first instant, instant after the last) of each run of instants in one phase, in order."""
    edges = np.flatnonzero(np.diff(timeline.phases)) + 1
    starts = [0, *edges.tolist(), len(timeline.phases)]
    return [(Phase(int(timeline.phases[start])), start, stop) for start, stop in itertools.pairwise(starts)]


LEAST_SHARE = 0.08
"""Smallest fraction of a picture for a run of instants in one phase, however few its operations: loss and optimizer step,
where peaks occur, have one operation in a hundred."""
PEAK_SHARE = 0.012
"""Fraction of the picture for the peak's own instant, if there are very many instants."""
WIDENED_SHARE = 0.4
"""Largest fraction to which all runs together are widened, in steps of many micro-batches."""


def sampled(timeline: Timeline, count: int) -> npt.NDArray[np.int64]:
    """`count` instants in order, one for each column of a picture. A long run of one phase is divided into equal parts, and
    each gives the instant with its largest total, so that no peak is lost. Instants of a short run, and the peak, appear
    several times."""
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
    """`width` instants from `start` to `stop` (exclusive). If the peak is the last instant of the run, it is repeated."""
    start = min(start, stop - 1)
    if width >= stop - start:
        return [start + column * (stop - start) // width for column in range(width)]
    edges = np.linspace(start, stop, width + 1).astype(int)
    return [int(a) + int(np.argmax(timeline.totals[a:b])) for a, b in itertools.pairwise(edges)]


def _widths(stretches: list[tuple[Phase, int, int]], count: int) -> list[int]:
    """Columns of each run: proportional to its operations, but at least `LEAST_SHARE`; they add up to `count`."""
    least = count * min(LEAST_SHARE, WIDENED_SHARE / len(stretches))
    lengths = np.array([stop - start for _, start, stop in stretches], dtype=float)
    widths = lengths / lengths.sum() * count
    short = widths < least
    if short.any() and not short.all():
        widths[~short] = lengths[~short] / lengths[~short].sum() * (count - least * short.sum())
        widths[short] = least
    edges = np.rint(np.concatenate([[0], np.cumsum(widths)])).astype(int)
    return np.diff(edges).tolist()  # type: ignore[no-any-return]
