"""Replays a timeline through the simulated caching allocator: what a step makes PyTorch reserve."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peakcast.models.caching_allocator import Block, CachingAllocator
from peakcast.timeline import Timeline


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


def replay(timeline: Timeline, *, expandable_segments: bool = False, capacity_bytes: int | None = None) -> Replay:
    """Replay one step on an empty allocator.

    Order within an instant: first everything that dies there is freed, in the order of entries, then everything born there
    is allocated, in the order of entries; so an entry that dies at t makes room for those born at t, as `dies` is the first
    instant at which it is gone. Entries that never live are skipped; those that outlive the timeline stay allocated.
    Raises: SimulatedOutOfMemoryError (only with a capacity).
    """
    return replay_run([timeline], expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)


def replay_run(
    steps: Sequence[Timeline], *, expandable_segments: bool = False, capacity_bytes: int | None = None
) -> Replay:
    """Replay several steps one after the other on one allocator, so that later steps meet the cache of earlier ones.

    What outlives a step is handed to the entry of the next step that is born at instant 0 with the same name, module,
    category and size (else the same category and size); what no entry takes over is freed between the steps.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)
    survivors: list[tuple[_Identity, Block]] = []
    num_events = requested = 0
    for step in steps:
        survivors, events = _replay_step(allocator, step, survivors)
        num_events += events
        requested = max(requested, step.peak().num_bytes if len(step.phases) else 0)
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_requested_bytes=requested,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        num_segments=allocator.num_segments,
        num_events=num_events,
        num_retries=allocator.num_retries,
    )


_Identity = tuple[str, str, int, int]


def _identity(step: Timeline, index: int) -> _Identity:
    return (step.names[index], step.modules[index], int(step.categories[index]), int(step.num_bytes[index]))


def _events(step: Timeline) -> npt.NDArray[np.int64]:
    """Entry indices in order of time, frees as their complement (~index), [num_events]."""
    end = len(step.phases)
    lives = np.flatnonzero((step.num_bytes > 0) & (step.born < np.minimum(step.dies, end)))
    dying = lives[step.dies[lives] < end]
    when = np.concatenate([step.dies[dying] * 2, step.born[lives] * 2 + 1])
    order = np.argsort(when, kind="stable")
    ordered: npt.NDArray[np.int64] = np.concatenate([~dying, lives])[order]
    return ordered


def _replay_step(
    allocator: CachingAllocator, step: Timeline, survivors: list[tuple[_Identity, Block]]
) -> tuple[list[tuple[_Identity, Block]], int]:
    blocks = _take_over(allocator, step, survivors) if survivors else {}
    sizes = step.num_bytes.tolist()
    streams = step.streams.tolist() if step.streams is not None else [0] * len(sizes)
    allocate, release = allocator.allocate, allocator.release
    events = _events(step).tolist()
    for event in events:
        if event < 0:
            release(blocks.pop(~event))
        elif event not in blocks:
            blocks[event] = allocate(sizes[event], streams[event])
    return [(_identity(step, index), block) for index, block in blocks.items()], len(events)


def _take_over(allocator: CachingAllocator, step: Timeline, survivors: list[tuple[_Identity, Block]]) -> dict[int, Block]:
    """Blocks of the last step that entries of this one already own, by entry; the others are freed."""
    blocks: dict[int, Block] = {}
    waiting = [int(i) for i in np.flatnonzero((step.born <= 0) & (step.dies > 0) & (step.num_bytes > 0))]
    for exact in (True, False):
        shelf: defaultdict[tuple[object, ...], list[tuple[_Identity, Block]]] = defaultdict(list)
        for survivor in reversed(survivors):
            shelf[survivor[0] if exact else survivor[0][2:]].append(survivor)
        left = []
        for index in waiting:
            identity = _identity(step, index)
            match = shelf.get(identity if exact else identity[2:])
            if match:
                blocks[index] = match.pop()[1]
            else:
                left.append(index)
        waiting = left
        survivors = [survivor for rest in shelf.values() for survivor in rest]
    for _, block in survivors:
        allocator.release(block)
    return blocks
