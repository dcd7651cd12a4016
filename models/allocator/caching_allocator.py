"""A simulation of PyTorch's CUDA caching allocator, call by call; `replay.py` replays timelines through it.

The allocator is deterministic, so reserved memory is replayed, not fitted: best fit within a stream's pool, splitting,
merging, segments that are kept, and what it gives back before it runs out of memory. Rules and names are those of
c10/cuda/CUDACachingAllocator.cpp (`DeviceCachingAllocator`) and c10/core/AllocatorConfig.h of torch 2.13.

Compared with torch's own compiled allocator (`tests/models/test_torchs_allocator.py`) and with what GPUs recorded
(`test_allocator_on_gpus.py`). Private pools, as CUDA graphs have them, are streams from `PRIVATE_STREAM` on. Not modelled:
that they end with their graph, and switching expandable segments on or off during a run.

Among equal blocks torch 2.13 takes the one in the oldest segment (pytorch#183591); earlier releases take the one with the
lowest address. The driver's addresses fall from one segment to the next: full training of Mistral-7B on an A100 with torch
2.4 reserves 3.9 GiB more than it would if they rose, and with that it holds as much outside PyTorch as other runs of that
series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from peakcast.core.units import MIB
from peakcast.jobs.allocator_settings import Allocator
from peakcast.models.allocator.rounding import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    round_request,
)
from peakcast.models.allocator.segments import ADDRESS_SPACE_BYTES, Block, ExpandableSegments, Pool, Segments
from peakcast.timelines.timeline import PRIVATE_STREAM

__all__ = ["Block", "CachingAllocator", "SimulatedOutOfMemoryError"]


class SimulatedOutOfMemoryError(Exception):
    """The simulated driver had no memory left, even after every completely free segment was returned."""

    @classmethod
    def asking(cls, size: int, stream: int, reserved: int, limit: int) -> SimulatedOutOfMemoryError:
        """The error for a request of `size` bytes, with `reserved` of `limit` bytes reserved."""
        return cls(f"{size:,} bytes asked for on stream {stream}, {reserved:,} of {limit:,} reserved")


class CachingAllocator:
    """The allocator of one GPU. `capacity_bytes`: what the driver can give it, None for no limit; `allowed_bytes`: what
    `per_process_memory_fraction` lets it reserve, None for no such limit. `newest_first`: among equal blocks it takes the
    one in the newest segment, as before torch 2.13. `place`: bytes of a new segment -> its address, as a
    recorded driver chose it; without `place`, or if it returns None, segments follow each other.

    Attributes, in bytes: `allocated_bytes` (sum of allocated blocks, including unsplit slack, as
    `torch.cuda.memory_allocated`), `reserved_bytes`, and the peaks of both. `num_retries`: how often cached segments had to
    be returned to the driver to make room.
    """

    def __init__(
        self,
        settings: Allocator | None = None,
        *,
        capacity_bytes: int | None = None,
        allowed_bytes: int | None = None,
        newest_first: bool = False,
        place: Callable[[int], int | None] | None = None,
    ) -> None:
        self.settings = settings or Allocator()
        self.allocated_bytes = self.peak_allocated_bytes = self.num_retries = 0
        self._expandable = self.settings.expandable_segments
        large = (self.settings.large_segment_size_mb or 0) * MIB or LARGE_SEGMENT_BYTES
        segments = ExpandableSegments if self._expandable else Segments
        self._segments = segments(large, capacity_bytes, allowed_bytes, falling=newest_first, place=place)
        self._rounding_bytes = (self.settings.max_non_split_rounding_mb or 0) * MIB or large
        self._max_split = (self.settings.max_split_size_mb or 0) * MIB or ADDRESS_SPACE_BYTES
        self._collects = bool(self.settings.garbage_collection_threshold) and allowed_bytes is not None
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._waiting: dict[int, list[Block]] = {}

    @property
    def reserved_bytes(self) -> int:
        return self._segments.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self._segments.peak_reserved_bytes

    @property
    def num_segments(self) -> int:
        return self._segments.num_segments

    # -- allocating ---------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """A block of at least `num_bytes` for `stream` (`malloc`). Raises: SimulatedOutOfMemoryError (with a limit)."""
        size = round_request(num_bytes, self.settings.divisions)
        small = size <= SMALL_BYTES
        pool = self._pools.get((stream, small)) or self._pool(stream, small=small)
        block = self._cached(pool, size) or self._from_driver(pool, size, stream)
        block.free = False
        if self._splits(pool, block.size - size, size):
            pool.insert(block.cut(size))
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def _pool(self, stream: int, *, small: bool) -> Pool:
        """The pool of a stream and size class."""
        page = SMALL_SEGMENT_BYTES if small else self._segments.large_segment_bytes
        return self._pools.setdefault((stream, small), Pool(small, page))

    def _splits(self, pool: Pool, remaining: int, size: int) -> bool:
        """`should_split`: whether the rest of a block is split off."""
        if pool.small or self._expandable:
            return remaining >= MIN_BLOCK_BYTES
        return size < self._max_split and remaining > SMALL_BYTES

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The best fit among the cached blocks, removed from the pool (`get_free_block`); None if there is none."""
        free = pool.free
        if self._collects:
            for other in self._pools.values():  # PyTorch keeps one count for all streams
                other.searches += other.small == pool.small
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        if self._expandable:  # a block that can still grow counts with the size it can grow to, so it is used last
            while at + 1 < len(free) and free[at + 1][2].grown_size < free[at][2].grown_size:
                at += 1
        found = free[at][0]
        if size < self._max_split <= found or (size >= self._max_split and found >= size + self._rounding_bytes):
            return None
        return free.pop(at)[2]

    def _from_driver(self, pool: Pool, size: int, stream: int) -> Block:
        """Memory from the driver; cached memory is returned first if there is not enough."""
        if self._collects:
            self._collect_garbage()
        block = self._segments.ask(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._segments.ask(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._segments.ask(pool, size)
        if block is None:
            limits = [limit for limit in (self._segments.capacity_bytes, self._segments.allowed_bytes) if limit is not None]
            raise SimulatedOutOfMemoryError.asking(size, stream, self.reserved_bytes, min(limits))
        return block

    # -- freeing ------------------------------------------------------------------------------------------------------

    def release(self, block: Block) -> None:
        """Free a block (`free`): it merges with free neighbours and stays reserved. A block that other streams used waits
        until their work is done."""
        self.allocated_bytes -= block.size
        if block.uses:
            block.waits = len(block.uses)
            for stream in block.uses:
                self._waiting.setdefault(stream, []).append(block)
            block.uses = set()
            return
        block.merge()
        block.pool.insert(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Another stream uses the block (`recordStream`): once released, it waits for that stream's work. A use on the
        stream that allocated it changes nothing and must not be recorded."""
        block.uses.add(stream)

    def finish(self, stream: int) -> None:
        """The work that `stream` has so far is done: blocks that waited for it are free (`process_events`)."""
        for block in self._waiting.pop(stream, []):
            block.waits -= 1
            if not block.waits:
                block.merge()
                block.pool.insert(block)

    # -- starting in the middle of a run ------------------------------------------------------------------------------

    def adopt(self, begins: int, pieces: Iterable[tuple[int, bool | None]], stream: int, *, small: bool) -> list[Block]:
        """Add a segment of `stream` that begins at address `begins`. `pieces`: (bytes, whether allocated) in order; None
        means address space without memory. Returns the allocated blocks."""
        handed_out = self._segments.adopt(self._pool(stream, small=small), begins, pieces)
        self.allocated_bytes += sum(block.size for block in handed_out)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return handed_out

    def give_back(self, block: Block) -> None:
        """Return a free block to the driver, or the whole pages inside it (`release_block`, `unmap_block`)."""
        self._segments.give_back(block)

    # -- giving back --------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Return every completely free segment or page (`release_cached_blocks`), after all streams are done, but those of
        private pools."""
        for stream in list(self._waiting):
            self.finish(stream)
        for (stream, _), pool in sorted(self._pools.items()):
            if stream >= PRIVATE_STREAM:
                continue
            for _, _, block in list(pool.free):
                self._segments.give_back(block)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """With `max_split_size_mb`: return just enough of the blocks that are never split
        (`release_available_cached_blocks`). Whether that is enough."""
        if self.settings.max_split_size_mb is None or self._expandable:
            return False
        wanted = max(size, self._max_split)
        at = bisect_left(pool.free, (wanted,))
        if at < len(pool.free):
            self._segments.give_back(pool.free[at][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= self._max_split:
            released += pool.free[-1][0]
            self._segments.give_back(pool.free[-1][2])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Above the threshold, return unsplit cached blocks of at least average age (`garbage_collect_cached_blocks`). A
        block's age is the number of searches in large pools since it was freed."""
        threshold = int((self.settings.garbage_collection_threshold or 0) * (self._segments.allowed_bytes or 0))
        target = self.reserved_bytes - threshold
        if target <= 0 or self._expandable:
            return
        large = [pool for (_, small), pool in sorted(self._pools.items()) if not small]
        blocks = [block for pool in large for _, _, block in pool.free if not block.is_split]
        total_age = sum(block.pool.searches - block.age_base for block in blocks)
        reclaimed, freed = 0, True
        while reclaimed < target and freed and blocks:
            average, freed, kept = total_age / len(blocks), False, []
            for block in blocks:
                age = block.pool.searches - block.age_base
                if age >= average:
                    freed = True
                    reclaimed += block.size
                    total_age -= age
                    self._segments.give_back(block)
                else:
                    kept.append(block)
            blocks = kept

    def free_blocks(self) -> list[Block]:
        """Every cached block, pool by pool. Their sizes, those of waiting blocks and the allocated bytes add up to the
        reserved bytes."""
        return [block for pool in self._pools.values() for _, _, block in pool.free]

    def waiting_blocks(self) -> list[Block]:
        """Blocks that are released and still wait for other streams."""
        return list({id(block): block for blocks in self._waiting.values() for block in blocks}.values())
