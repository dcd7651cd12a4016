"""What the steps of a run ask of the allocator, in order: timelines as one sequence of requests and frees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from peakcast.timeline import Timeline

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Steps as one sequence of events. A *holder* is whoever holds a block: one entry, or entries of several steps that
    hand it on. `events`: a holder to allocate, its complement (~holder) to free; other columns are by holder."""

    events: Ints
    num_bytes: Ints
    streams: Ints
    num_events: int
    peak_requested_bytes: int

    @classmethod
    def of(cls, steps: Sequence[Timeline]) -> Run:
        events: list[Ints] = []
        offset = num_events = requested = 0
        before: tuple[Timeline, Ints, Ints] | None = None  # a step, which of its entries outlive it, and all its holders
        for step in steps:
            holders = np.arange(offset, offset + len(step.num_bytes))
            offset += len(holders)
            entries, begins = _events(step)
            num_events += len(entries)
            outlives = entries[begins & (step.dies[entries] >= len(step.phases))]
            if before is not None:
                taken, left = _take_over(step, *before)
                continued = np.fromiter(taken, np.int64, len(taken))
                holders[continued] = np.fromiter(taken.values(), np.int64, len(taken))
                events.append(~np.array(left, dtype=np.int64))
                begins_here = np.ones(len(holders), dtype=bool)
                begins_here[continued] = False
                happens = ~begins | begins_here[entries]
                entries, begins = entries[happens], begins[happens]
            held = holders[entries]
            events.append(np.where(begins, held, ~held))
            before = step, outlives, holders
            requested = max(requested, step.peak().num_bytes if len(step.phases) else 0)
        return cls(
            events=np.concatenate(events) if events else np.zeros(0, dtype=np.int64),
            num_bytes=np.concatenate([step.num_bytes for step in steps]),
            streams=np.concatenate([_streams(step) for step in steps]),
            num_events=num_events,
            peak_requested_bytes=requested,
        )


def _streams(step: Timeline) -> Ints:
    if step.streams is None:
        return np.zeros(len(step.num_bytes), dtype=np.int64)
    return step.streams.astype(np.int64)


def _events(step: Timeline) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Entry indices in order of time, and which of them begin there instead of ending, both [num_events]."""
    end = len(step.phases)
    lives = np.flatnonzero((step.num_bytes > 0) & (step.born < np.minimum(step.dies, end)))
    dying = lives[step.dies[lives] < end]
    when = np.concatenate([step.dies[dying] * 2, step.born[lives] * 2 + 1])
    if 2 * end <= np.iinfo(np.uint16).max:
        when = when.astype(np.uint16)  # numpy sorts these by radix
    order = np.argsort(when, kind="stable")
    return np.concatenate([dying, lives])[order], order >= len(dying)


_Identity = tuple[int, int, str, str]
"""Bytes, category, name and module of an entry."""


def _identities(step: Timeline, which: Ints) -> list[_Identity]:
    entries = which.tolist()
    if not entries:
        return []
    chosen = itemgetter(*entries, entries[0])  # one more, so that it gives a tuple in any case
    texts = chosen(step.names)[:-1], chosen(step.modules)[:-1]
    return list(zip(step.num_bytes[which].tolist(), step.categories[which].tolist(), *texts, strict=True))


def _take_over(step: Timeline, before: Timeline, outlives: Ints, holders: Ints) -> tuple[dict[int, int], list[int]]:
    """Holders of the step before that entries of this one continue, by entry; and those that nobody does."""
    survivors = list(zip(_identities(before, outlives), holders[outlives].tolist(), strict=True))
    standing = np.flatnonzero((step.born <= 0) & (step.dies > 0) & (step.num_bytes > 0))
    identities, waiting = _identities(step, standing), standing.tolist()
    holder_of = dict(survivors)
    if len(holder_of) == len(survivors):  # no two alike: every entry finds its own at once
        found = map(holder_of.get, identities)
        taken = {entry: holder for entry, holder in zip(waiting, found, strict=True) if holder is not None}
        if len(taken) == len(set(taken.values())) == len(survivors):
            return taken, []
    return _matched(list(zip(identities, waiting, strict=True)), survivors)


def _matched(
    wanted: list[tuple[_Identity, int]], survivors: list[tuple[_Identity, int]]
) -> tuple[dict[int, int], list[int]]:
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
