"""Replays a timeline through the simulated caching allocator, to find what a step makes PyTorch reserve."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from peakcast.core.units import MIB
from peakcast.jobs.allocator_settings import Allocator
from peakcast.models.allocator.caching_allocator import Block, CachingAllocator, SimulatedOutOfMemoryError
from peakcast.models.allocator.events import AllocatorEvents, Ints
from peakcast.models.allocator.rounding import LARGE_SEGMENT_BYTES, MIN_BLOCK_BYTES, SMALL_BYTES, round_request
from peakcast.timelines.timeline import Timeline

compiled: Any = None
with suppress(ImportError):  # it exists if there was a compiler when peakcast was installed
    compiled = importlib.import_module("peakcast.models.allocator._pool_replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The results of a replay, in bytes. `peak_allocated_bytes` includes unsplit slack, as torch counts; without slack the
    same tensors need `peak_requested_bytes` (rounded to 512)."""

    peak_allocated_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    """Still allocated at the end."""
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
    newest_first: bool = False,
) -> Replay:
    """Replay one step on an empty allocator.

    Order within an instant: first everything that dies there is freed, then everything born there is allocated, both in the
    order of entries. So an entry that dies at t makes room for those born at t (`dies` is the first instant at which it no
    longer exists). Entries that never live are skipped; those that outlive the timeline stay allocated.

    The limits and `newest_first` are those of `CachingAllocator`. Raises: SimulatedOutOfMemoryError (only with a limit).
    """
    limits = {"capacity_bytes": capacity_bytes, "allowed_bytes": allowed_bytes}
    return replay_run([timeline], settings, newest_first=newest_first, **limits)


def replay_run(
    steps: Sequence[Timeline],
    settings: Allocator | None = None,
    *,
    capacity_bytes: int | None = None,
    allowed_bytes: int | None = None,
    newest_first: bool = False,
) -> Replay:
    """Replay several steps one after the other on one allocator, so that later steps find the cache of earlier ones.

    A tensor that outlives a step continues as the entry of the next step that is born at instant 0 with the same name,
    module, category and size (else the same category and size). One that no entry continues is freed between the steps.
    """
    settings, run = settings or Allocator(), AllocatorEvents.of(steps)
    if compiled and not run.empties and settings.max_split_size_mb is None and allowed_bytes is None:
        found = _replay_compiled(run, settings, capacity_bytes, newest_first=newest_first)
        if found is not None:
            return found
    limits = {"capacity_bytes": capacity_bytes, "allowed_bytes": allowed_bytes}
    return _replay_calls(run, CachingAllocator(settings, newest_first=newest_first, place=None, **limits))


def _replay_calls(run: AllocatorEvents, allocator: CachingAllocator) -> Replay:
    """The replay, one call of the simulated allocator after the other."""
    blocks: dict[int, Block] = {}
    sizes, streams = run.num_bytes.tolist(), run.streams.tolist()
    waiting: set[int] = set()
    for event in run.events.tolist():
        if event >= 2 * len(sizes):
            allocator.empty_cache()
        elif event >= len(sizes):
            holder = event - len(sizes)
            waiting.add(holder)
            allocator.record_stream(blocks[holder], holder)  # a stream for each holder, so that each can finish separately
            allocator.release(blocks.pop(holder))
        elif event >= 0:
            blocks[event] = allocator.allocate(sizes[event], streams[event])
        elif ~event in waiting:
            waiting.remove(~event)
            allocator.finish(~event)
        else:
            allocator.release(blocks.pop(~event))
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_requested_bytes=run.peak_requested_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        num_segments=allocator.num_segments,
        num_events=len(run.events),
        num_retries=allocator.num_retries,
    )


def _replay_compiled(
    run: AllocatorEvents, settings: Allocator, capacity_bytes: int | None, *, newest_first: bool = False
) -> Replay | None:
    """Replay a run in one compiled loop, as `_replay_calls` does. Returns None if pages of expandable segments go back to
    the driver, which the loop cannot do. Raises: SimulatedOutOfMemoryError."""
    units = _rounded(run.num_bytes, settings)
    large = (settings.large_segment_size_mb or 0) * MIB or LARGE_SEGMENT_BYTES
    found = compiled.replay(
        run.events,
        units,
        run.streams * 2 + (units <= SMALL_BYTES // MIN_BLOCK_BYTES),
        2 * int(run.streams.max(initial=0)) + 2,
        settings.expandable_segments,
        newest_first,
        large // MIN_BLOCK_BYTES,
        -1 if capacity_bytes is None else capacity_bytes // MIN_BLOCK_BYTES,
    )
    if found is None:
        return None
    if len(found) == 2:
        holder, reserved = found
        asked, stream = int(units[holder]) * MIN_BLOCK_BYTES, int(run.streams[holder])
        raise SimulatedOutOfMemoryError.asking(asked, stream, reserved * MIN_BLOCK_BYTES, capacity_bytes or 0)
    peak_allocated, allocated, peak_reserved, reserved, num_segments, num_retries = found
    return Replay(
        peak_allocated_bytes=peak_allocated * MIN_BLOCK_BYTES,
        peak_requested_bytes=run.peak_requested_bytes,
        peak_reserved_bytes=peak_reserved * MIN_BLOCK_BYTES,
        allocated_bytes=allocated * MIN_BLOCK_BYTES,
        reserved_bytes=reserved * MIN_BLOCK_BYTES,
        num_segments=num_segments,
        num_events=len(run.events),
        num_retries=num_retries,
    )


def _rounded(num_bytes: Ints, settings: Allocator) -> Ints:
    """Each request as the allocator rounds it, in units of `MIN_BLOCK_BYTES`."""
    if any(settings.divisions):
        sizes = [round_request(size, settings.divisions) for size in num_bytes.tolist()]
        return np.array(sizes, dtype=np.int64) // MIN_BLOCK_BYTES
    return np.maximum((num_bytes + (MIN_BLOCK_BYTES - 1)) // MIN_BLOCK_BYTES, 1)
