"""What the steps of a run request from the allocator, in order: timelines as one sequence of requests and frees."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.core.texts import Texts
from peakcast.timelines.timeline import Category, Timeline

Ints = npt.NDArray[np.int64]

compiled: Any = None
with suppress(ImportError):  # it exists if there was a compiler when peakcast was installed
    compiled = importlib.import_module("peakcast.models.allocator._event_order")


@dataclass(frozen=True, slots=True)
class Run:
    """Steps as one sequence of events. A *holder* is what holds a block: an entry, or entries of several steps of which
    each continues the one before. `events`: holder means allocate, its complement ~holder means free. If another stream
    still uses the block, (holder + number of holders) comes first: the block is no longer allocated, but not free before
    ~holder. The other columns are indexed by holder."""

    events: Ints
    num_bytes: Ints
    streams: Ints
    peak_requested_bytes: int

    @classmethod
    def of(cls, steps: Sequence[Timeline]) -> Run:
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
    if compiled:
        reusable = step.dies if step.reusable is None else step.reusable
        columns = (step.num_bytes, step.born, step.dies, reusable, holders, handed_over)
        events = compiled.order(*map(np.ascontiguousarray, columns), len(step.phases), num_holders)
        return np.frombuffer(events, dtype=np.int64)
    return _sorted_events(step, holders, handed_over, num_holders)


def _sorted_events(step: Timeline, holders: Ints, handed_over: npt.NDArray[np.bool_], num_holders: int) -> Ints:
    """What `_events` returns, computed by sorting instead of compiled code."""
    end = len(step.phases)
    lives = np.flatnonzero((step.num_bytes > 0) & (step.born < np.minimum(step.dies, end)))
    begins, dying = lives[~handed_over[lives]], lives[step.dies[lives] < end]
    freed, let_go = step.dies[dying], dying[:0]
    if step.reusable is not None:
        freed = np.minimum(step.reusable[dying], end)
        let_go = dying[freed > step.dies[dying]]
    when = np.concatenate([freed * 3, step.dies[let_go] * 3 + 1, np.maximum(step.born[begins], 0) * 3 + 2])
    events = np.concatenate([~holders[dying], holders[let_go] + num_holders, holders[begins]])
    return events[np.argsort(when, kind="stable")]


def _match_survivors(step: Timeline, before: Timeline, holders: Ints) -> tuple[Ints, Ints, Ints]:
    """Match what lives on from the step before to this step's entries. Returns the indices of the entries of this step that
    continue a holder, those holders, and the holders that no entry continues (they are freed)."""
    end = len(before.phases)
    outlives = np.flatnonzero((before.dies >= end) & (before.born < end) & (before.num_bytes > 0))
    outlives = outlives[np.argsort(before.born[outlives], kind="stable")]
    standing = np.flatnonzero((step.born <= 0) & (step.dies > 0) & (step.num_bytes > 0))
    ours, theirs = _digests(step, standing), _digests(before, outlives)
    order = np.argsort(ours)
    ours = ours[order]
    first, last = (np.searchsorted(ours, theirs, side=side) for side in ("left", "right"))  # the range of equal digests
    if (last - first == 1).all() and np.bincount(first, minlength=1).max() <= 1:  # each continues as exactly one entry
        return standing[order[first]], holders[outlives], np.zeros(0, dtype=np.int64)
    wanted = list(zip(_identities(step, standing), standing.tolist(), strict=True))
    taken, left = _matched(wanted, list(zip(_identities(before, outlives), holders[outlives].tolist(), strict=True)))
    found = np.array(list(taken.items()), dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1], np.array(left, dtype=np.int64)


_Identity = tuple[int, int, str, str]
"""Bytes, category, name and module of an entry."""


def _identities(step: Timeline, which: Ints) -> list[_Identity]:
    """The identities of the entries `which`."""
    entries = which.tolist()
    texts = [step.names[entry] for entry in entries], [step.modules[entry] for entry in entries]
    return list(zip(step.num_bytes[which].tolist(), step.categories[which].tolist(), *texts, strict=True))


def _digests(step: Timeline, which: Ints) -> npt.NDArray[np.uint64]:
    """Identities as 64-bit numbers: equal identities have equal numbers, others differ except with a probability of one in
    10**12."""
    digests = (step.num_bytes[which] * len(Category) + step.categories[which]).astype(np.uint64)
    for texts, odd in ((step.names, 0x9E3779B97F4A7C15), (step.modules, 0xC2B2AE3D27D4EB4F)):
        digests = digests * np.uint64(odd) + Texts.of(texts).numbers[which].astype(np.uint64)
    return digests


def _matched(
    wanted: list[tuple[_Identity, int]], survivors: list[tuple[_Identity, int]]
) -> tuple[dict[int, int], list[int]]:
    """Which survivor each wanted entry continues (entry -> holder), and the holders that nothing continues."""
    taken: dict[int, int] = {}
    for parts in (4, 2):  # the same tensor, else one of the same size and category
        shelf: defaultdict[tuple[object, ...], list[tuple[_Identity, int]]] = defaultdict(list)
        for survivor in reversed(survivors):
            shelf[survivor[0][:parts]].append(survivor)
        unmet = []
        for identity, entry in wanted:
            match = shelf.get(identity[:parts])
            if match:
                taken[entry] = match.pop()[1]
            else:
                unmet.append((identity, entry))
        wanted = unmet
        survivors = [survivor for rest in shelf.values() for survivor in rest]
        if not wanted or not survivors:
            break
    return taken, [holder for _, holder in survivors]
