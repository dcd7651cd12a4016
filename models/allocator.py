"""Replays a timeline through the simulated caching allocator: what a step makes PyTorch reserve."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.allocator import Allocator
from peakcast.models.caching_allocator import LARGE_SEGMENT_BYTES, SMALL_BYTES, Block, CachingAllocator, round_request
from peakcast.models.pool_replay import UNIT_BYTES, PoolReplay
from peakcast.timeline import Timeline
from peakcast.units import MIB

compiled: Any = None
with suppress(ImportError):  # built where there was a compiler when peakcast was installed
    compiled = importlib.import_module("peakcast.models._pool_replay")

Ints = npt.NDArray[np.int64]
MOST_RETRIES = 32
"""A run that gives memory back more often is replayed call by call: each time costs a look at all events that are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay ended with, in bytes. `peak_allocated_bytes` counts unsplit slack, as torch does; without it the same
    tensors need `peak_requested_bytes` (rounded to 512)."""

    peak_allocated_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    """Still handed out at the end."""
    reserved_bytes: int
    num_segments: int
    num_events: int
    num_retries: int


def replay(
    timeline: Timeline,
    settings: Allocator | None = None,
    *,
    capacity_bytes: int | None = None,
    allowed_bytes: int | None = None,
) -> Replay:
    """Replay one step on an empty allocator.

    Order within an instant: first everything that dies there is freed, in the order of entries, then everything born there
    is allocated, in the order of entries; so an entry that dies at t makes room for those born at t, as `dies` is the first
    instant at which it is gone. Entries that never live are skipped; those that outlive the timeline stay allocated.
    Limits are those of `CachingAllocator`. Raises: SimulatedOutOfMemoryError (only with a limit).
    """
    return replay_run([timeline], settings, capacity_bytes=capacity_bytes, allowed_bytes=allowed_bytes)


def replay_run(
    steps: Sequence[Timeline],
    settings: Allocator | None = None,
    *,
    capacity_bytes: int | None = None,
    allowed_bytes: int | None = None,
) -> Replay:
    """Replay several steps one after the other on one allocator, so that later steps meet the cache of earlier ones.

    What outlives a step is handed to the entry of the next step that is born at instant 0 with the same name, module,
    category and size (else the same category and size); what no entry takes over is freed between the steps.
    """
    settings, run = settings or Allocator(), _Run.of(steps)
    if settings.max_split_size_mb is None and allowed_bytes is None and 1 not in settings.divisions:
        found = (_replay_compiled if compiled else _replay_pools)(run, settings, capacity_bytes)
        if found is not None:
            return found
    return _replay_calls(run, CachingAllocator(settings, capacity_bytes=capacity_bytes, allowed_bytes=allowed_bytes))


def _replay_calls(run: _Run, allocator: CachingAllocator) -> Replay:
    """Call by call."""
    blocks: dict[int, Block] = {}
    sizes, streams = run.num_bytes.tolist(), run.streams.tolist()
    for event in run.events.tolist():
        if event < 0:
            allocator.release(blocks.pop(~event))
        else:
            blocks[event] = allocator.allocate(sizes[event], streams[event])
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_requested_bytes=run.peak_requested_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        num_segments=allocator.num_segments,
        num_events=run.num_events,
        num_retries=allocator.num_retries,
    )


def _replay_compiled(run: _Run, settings: Allocator, capacity_bytes: int | None) -> Replay | None:
    """As `_replay_pools`, by the same loop compiled."""
    assert compiled is not None
    sizes = _rounded(run.num_bytes, settings)
    found = compiled.replay(
        run.events,
        sizes // UNIT_BYTES,
        run.streams * 2 + (sizes <= SMALL_BYTES),
        2 * int(run.streams.max(initial=0)) + 2,
        settings.expandable_segments,
        _large_segment_bytes(settings) // UNIT_BYTES,
        -1 if capacity_bytes is None else capacity_bytes // UNIT_BYTES,
    )
    if found is None:
        return None
    peak_allocated, allocated, peak_reserved, reserved, num_segments, num_retries = found
    return Replay(
        peak_allocated_bytes=peak_allocated * UNIT_BYTES,
        peak_requested_bytes=run.peak_requested_bytes,
        peak_reserved_bytes=peak_reserved * UNIT_BYTES,
        allocated_bytes=allocated * UNIT_BYTES,
        reserved_bytes=reserved * UNIT_BYTES,
        num_segments=num_segments,
        num_events=run.num_events,
        num_retries=num_retries,
    )


def _large_segment_bytes(settings: Allocator) -> int:
    return (settings.large_segment_size_mb or 0) * MIB or LARGE_SEGMENT_BYTES


def _replay_pools(run: _Run, settings: Allocator, capacity_bytes: int | None) -> Replay | None:
    """Pool by pool, which gives the same as call by call, only faster; None where it would not: when pages of expandable
    segments go back to the driver, or whole segments again and again."""
    sizes = _rounded(run.num_bytes, settings)
    holders = np.where(run.events < 0, ~run.events, run.events)
    pool_of_event = (run.streams * 2 + (sizes <= SMALL_BYTES))[holders]
    units = (sizes // UNIT_BYTES).tolist()
    where = {pool: np.flatnonzero(pool_of_event == pool) for pool in np.flatnonzero(np.bincount(pool_of_event)).tolist()}
    pools = {
        pool: PoolReplay(
            units,
            small=bool(pool % 2),
            expandable=settings.expandable_segments,
            large_segment_bytes=_large_segment_bytes(settings),
        )
        for pool in where
    }
    peak_reserved = num_retries = 0
    if capacity_bytes is None:
        for pool, positions in where.items():
            pools[pool].run(run.events[positions].tolist())
    else:
        limited = _run_limited(run, where, pools, capacity_bytes // UNIT_BYTES)
        if limited is None:
            return None
        peak_reserved, num_retries = limited
    for pool in where:
        if pools[pool].slack:
            unsplit, extra = np.array(pools[pool].slack, dtype=np.int64).T
            sizes[unsplit] += extra * UNIT_BYTES
    change = np.where(run.events < 0, -sizes[holders], sizes[holders])
    return Replay(
        peak_allocated_bytes=int(np.cumsum(change).max(initial=0)),
        peak_requested_bytes=run.peak_requested_bytes,
        peak_reserved_bytes=max(peak_reserved * UNIT_BYTES, _reserved(pools)),
        allocated_bytes=int(change.sum()),
        reserved_bytes=_reserved(pools),
        num_segments=sum(replay.num_segments for replay in pools.values()),
        num_events=run.num_events,
        num_retries=num_retries,
    )


def _run_limited(
    run: _Run, where: Mapping[int, Ints], pools: dict[int, PoolReplay], capacity: int
) -> tuple[int, int] | None:
    """Run all pools where together they may reserve `capacity` units: up to the request that does not fit, then what is
    wholly cached goes back (`_release_all`), and on. Returns the most that was reserved before anything went back, and how
    often that was; None where it must be done call by call."""
    start = most = num_retries = 0
    position_of = np.empty(len(run.num_bytes), dtype=np.int64)
    begins = np.flatnonzero(run.events >= 0)
    position_of[run.events[begins]] = begins
    bytes_of_event = run.num_bytes[np.where(run.events < 0, ~run.events, run.events)]
    # the one that moves most first: it finds where the others must stop
    by_size = sorted(where, key=lambda pool: -int(bytes_of_event[where[pool]].sum()))
    while True:
        stop, stops = len(run.events), []
        before = sum(replay.reserved for replay in pools.values())
        num_grown = {pool: len(replay.grown) for pool, replay in pools.items()}
        for pool in by_size:
            replay, (begin, end) = pools[pool], np.searchsorted(where[pool], (start, stop)).tolist()
            replay.limit = capacity - before + replay.reserved
            full = replay.run(run.events[where[pool][begin:end]].tolist())
            stop = stop if full is None else int(position_of[full])
            stops.append(stop)
        if stops[0] != stop:  # a smaller pool was full first, and the larger ones ran on
            return None
        grown = sorted(
            (int(position_of[holder]), units)
            for pool, replay in pools.items()
            for holder, units in replay.grown[num_grown[pool] :]
        )
        levels = before + np.cumsum([units for _, units in grown])
        if len(levels) and levels[-1] > capacity:  # together they were full before the largest was by itself
            return None
        most = max(most, int(levels[-1]) if len(levels) else 0)
        if stop == len(run.events):
            return most, num_retries
        if pools[by_size[0]].expandable or num_retries == MOST_RETRIES or (num_retries and stop == start):
            return None
        for replay in pools.values():
            replay.give_back()
        start, num_retries = stop, num_retries + 1


def _reserved(pools: Mapping[int, PoolReplay]) -> int:
    return sum(replay.reserved for replay in pools.values()) * UNIT_BYTES


def _rounded(num_bytes: Ints, settings: Allocator) -> Ints:
    """Bytes of each request as the allocator rounds them."""
    if any(settings.divisions):
        return np.array([round_request(size, settings.divisions) for size in num_bytes.tolist()], dtype=np.int64)
    return np.maximum(-(-num_bytes // UNIT_BYTES), 1) * UNIT_BYTES


# -- events of a run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """Steps as one sequence of events. A *holder* is whoever holds a block: one entry, or entries of several steps that
    hand it on. `events`: a holder to allocate, its complement (~holder) to free; other columns are by holder."""

    events: Ints
    num_bytes: Ints
    streams: Ints
    num_events: int
    peak_requested_bytes: int

    @classmethod
    def of(cls, steps: Sequence[Timeline]) -> _Run:
        events: list[Ints] = []
        survivors: list[tuple[_Identity, int]] = []
        offset = num_events = requested = 0
        for step in steps:
            holders = np.arange(offset, offset + len(step.num_bytes))
            offset += len(holders)
            order = _events(step)
            entries = np.where(order < 0, ~order, order)
            begins = order >= 0
            if survivors:
                taken, left = _take_over(step, survivors)
                continued = np.fromiter(taken, np.int64, len(taken))
                holders[continued] = np.fromiter(taken.values(), np.int64, len(taken))
                events.append(~np.array(left, dtype=np.int64))
                begins_here = np.ones(len(holders), dtype=bool)
                begins_here[continued] = False
                order = order[~begins | begins_here[entries]]
            events.append(np.where(order < 0, ~holders[~order], holders[order]))
            outlives = entries[begins & (step.dies[entries] >= len(step.phases))]
            survivors = list(zip(_identities(step, outlives), holders[outlives].tolist(), strict=True))
            num_events += len(entries)
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


def _events(step: Timeline) -> Ints:
    """Entry indices in order of time, frees as their complement (~index), [num_events]."""
    end = len(step.phases)
    lives = np.flatnonzero((step.num_bytes > 0) & (step.born < np.minimum(step.dies, end)))
    dying = lives[step.dies[lives] < end]
    when = np.concatenate([step.dies[dying] * 2, step.born[lives] * 2 + 1])
    order = np.argsort(when, kind="stable")
    ordered: Ints = np.concatenate([~dying, lives])[order]
    return ordered


_Identity = tuple[int, int, str, str]
"""Bytes, category, name and module of an entry."""


def _identities(step: Timeline, which: Ints) -> list[_Identity]:
    entries = which.tolist()
    if not entries:
        return []
    chosen = itemgetter(*entries, entries[0])  # one more, so that it gives a tuple in any case
    texts = chosen(step.names)[:-1], chosen(step.modules)[:-1]
    return list(zip(step.num_bytes[which].tolist(), step.categories[which].tolist(), *texts, strict=True))


def _take_over(step: Timeline, survivors: list[tuple[_Identity, int]]) -> tuple[dict[int, int], list[int]]:
    """Holders of the last step that entries of this one continue, by entry; and those that nobody does."""
    standing = np.flatnonzero((step.born <= 0) & (step.dies > 0) & (step.num_bytes > 0))
    identities, waiting = _identities(step, standing), standing.tolist()
    holder_of = dict(survivors)
    if len(holder_of) == len(survivors):  # no two alike: every entry finds its own at once
        holders = list(map(holder_of.get, identities))
        taken = {entry: holder for entry, holder in zip(waiting, holders, strict=True) if holder is not None}
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
