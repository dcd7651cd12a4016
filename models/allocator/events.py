"""What the steps of a run request from the allocator, in order: timelines as one sequence of requests and frees."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.core.texts import Texts
from peakcast.timelines.timeline import EMPTIED, Category, Timeline

Ints = npt.NDArray[np.int64]

compiled: Any = None
with suppress(ImportError):  # it exists if there was a compiler when peakcast was installed
    compiled = importlib.import_module("peakcast.models.allocator._event_order")


@dataclass(frozen=True, slots=True)
class AllocatorEvents:
    """Steps as one sequence of events. A *holder* is what holds a block: an entry, or entries of several steps of which
    each continues the one before. `events`: holder means allocate, its complement ~holder means free. If another stream
    still uses the block, (holder + number of holders) comes first: the block is no longer allocated, but not free before
    ~holder. Twice the number of holders means that the cache is given back. The other columns are indexed by holder."""

    events: Ints
    num_bytes: Ints
    streams: Ints
    peak_requested_bytes: int
    empties: bool = False
    """Whether the cache is ever given back."""

    @classmethod
    def of(cls, steps: Sequence[Timeline]) -> AllocatorEvents:
        """The events of `steps`, one after the other."""
        events = [np.zeros(0, dtype=np.int64)]
        offset, num_holders = 0, sum(len(step.num_bytes) for step in steps)
        before: tuple[Timeline, Ints] | None = None  # a step and the holders of its entries
        for step in steps:
            holders = np.arange(offset, offset + len(step.num_bytes))
            offset += len(holders)
            handed_over = np.zeros(len(holders), dtype=bool)
            if before is not None:
                continued, taken, left = _match_survivors(step, *before)
                holders[continued], handed_over[continued] = taken, True
                events.append(~left)
            events.append(_events(step, holders, handed_over, num_holders))
            before = step, holders
        return cls(
            events=np.concatenate(events),
            num_bytes=np.concatenate([step.num_bytes for step in steps]),
            streams=np.concatenate([_streams(step) for step in steps]),
            peak_requested_bytes=max((step.peak().num_bytes for step in steps if len(step.phases)), default=0),
            empties=any(EMPTIED in step.labels for step in steps),
        )


def _streams(step: Timeline) -> Ints:
    """The stream of each entry."""
    if step.streams is None:
        return np.zeros(len(step.num_bytes), dtype=np.int64)
    return step.streams.astype(np.int64)


def _events(step: Timeline, holders: Ints, handed_over: npt.NDArray[np.bool_], num_holders: int) -> Ints:
    """The events of a step in order of time. At each instant: first blocks that become free, then those freed while another
    stream uses them, then requests, each in the order of entries. Entries that continue others are not requested. Blocks
    that still wait when the step ends are free before the next one."""
    if compiled and EMPTIED not in step.labels:
        reusable = step.dies if step.reusable is None else step.reusable
        columns = (step.num_bytes, step.born, step.dies, reusable, holders, handed_over)
        events = compiled.order(*map(np.ascontiguousarray, columns), len(step.phases), num_holders)
        return np.frombuffer(events, dtype=np.int64)
    return _sorted_events(step, holders, handed_over, num_holders)


def _sorted_events(step: Timeline, holders: Ints, handed_over: npt.NDArray[np.bool_], num_holders: int) -> Ints:
    """What `_events` returns, computed by sorting instead of compiled code. At an instant the cache is given back before
    anything is requested."""
    end = len(step.phases)
    lives = np.flatnonzero((step.num_bytes > 0) & (step.born < np.minimum(step.dies, end)))
    begins, dying = lives[~handed_over[lives]], lives[step.dies[lives] < end]
    freed, let_go = step.dies[dying], dying[:0]
    if step.reusable is not None:
        freed = np.minimum(step.reusable[dying], end)
        let_go = dying[freed > step.dies[dying]]
    emptied = np.flatnonzero([label == EMPTIED for label in step.labels])
    when = np.concatenate([freed * 3, step.dies[let_go] * 3 + 1, emptied * 3 + 1, np.maximum(step.born[begins], 0) * 3 + 2])
    parts = [~holders[dying], holders[let_go] + num_holders, np.full(len(emptied), 2 * num_holders), holders[begins]]
    events = np.concatenate(parts)
    return events[np.argsort(when, kind="stable")]


def _match_survivors(step: Timeline, before: Timeline, holders: Ints) -> tuple[Ints, Ints, Ints]:
    """Match what lives on from the step before to this step's entries: the same tensor, else one of the same size and
    category. Returns the indices of the entries of this step that continue a holder, those holders, and the holders that no
    entry continues (they are freed)."""
    end = len(before.phases)
    outlives = np.flatnonzero((before.dies >= end) & (before.born < end) & (before.num_bytes > 0))
    outlives = outlives[np.argsort(before.born[outlives], kind="stable")]
    existing = np.flatnonzero((step.born <= 0) & (step.dies > 0) & (step.num_bytes > 0))
    continued, holding = [], []
    for keys in (_tensors, _sizes):
        ours, theirs = keys(step, existing), keys(before, outlives)
        mine, matched = _paired(ours, theirs)
        continued.append(existing[mine])
        holding.append(holders[outlives[matched]])
        existing, outlives = np.delete(existing, mine), outlives[_unmatched(theirs, matched)]
    return np.concatenate(continued), np.concatenate(holding), holders[outlives]


def _sizes(step: Timeline, which: Ints) -> npt.NDArray[np.uint64]:
    """A number for the bytes and the category of each of the entries `which`."""
    return (step.num_bytes[which] * len(Category) + step.categories[which]).astype(np.uint64)


def _tensors(step: Timeline, which: Ints) -> npt.NDArray[np.uint64]:
    """A number for the bytes, category, name and module of each of the entries `which`. Different ones have different
    numbers except with a probability of one in 10**12."""
    numbers = _sizes(step, which)
    for texts, odd in ((step.names, 0x9E3779B97F4A7C15), (step.modules, 0xC2B2AE3D27D4EB4F)):
        numbers = numbers * np.uint64(odd) + Texts.of(texts).numbers[which].astype(np.uint64)
    return numbers


def _paired(ours: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Indices of equal keys in pairs: of each key, the first of `ours` with the first of `theirs`, the second with the
    second and so on."""
    keys = np.concatenate([theirs, ours])
    order = np.argsort(keys, kind="stable")  # among equal keys, theirs come first
    ranked = keys[order]
    start = np.searchsorted(ranked, ranked)  # where the key of each begins
    is_ours = order >= len(theirs)
    theirs_before = np.concatenate([[0], np.cumsum(~is_ours)])
    partner = np.arange(len(keys)) - (theirs_before[:-1] - theirs_before[start])
    found = np.flatnonzero(is_ours & ~is_ours[partner])
    return order[found] - len(theirs), order[partner[found]]


def _unmatched(keys: npt.NDArray[np.uint64], matched: Ints) -> Ints:
    """The indices of `keys` without those in `matched`, last first; those of the key that comes last before others."""
    left = np.delete(np.arange(len(keys)), matched)
    if len(left) < 2:
        return left
    _, kinds = np.unique(keys, return_inverse=True)
    last = np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(last, kinds, np.arange(len(keys)))
    return left[np.lexsort((-left, -last[kinds[left]]))]
