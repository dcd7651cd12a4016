"""A simulation of PyTorch's CUDA caching allocator, call by call; `allocator.py` replays timelines through it.

The allocator is deterministic, so `reserved` is not fitted but replayed: best fit within the pool of a stream, splitting,
merging, and segments that are kept. Constants are those of c10/core/AllocatorConfig.h and
c10/cuda/CUDACachingAllocator.cpp (torch 2.11; unchanged since 1.x except that 2.11 made the 20 MiB configurable).

Not modelled: `max_split_size_mb`, `garbage_collection_threshold`, `roundup_power2_divisions`, blocks that `record_stream`
keeps waiting, private pools of CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from peakcast.units import MIB, round_up

MIN_BLOCK_BYTES = 512
"""kMinBlockSize: every request is rounded up to a multiple of it."""
SMALL_BYTES = 1 * MIB
"""kSmallSize: requests up to here are served from the small pool; a large block is split only if more than this is left."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""kSmallBuffer: what the small pool asks of the driver; also the page size of small expandable segments."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""kLargeBuffer (`large_segment_size_mb` since 2.11): asked for by requests of 1 to 10 MiB; page size of large expandable
segments."""
MIN_LARGE_BYTES = 10 * MIB
"""kMinLargeAlloc: requests from here on get a segment of their own size..."""
LARGE_ROUND_BYTES = 2 * MIB
"""kRoundLarge: ...rounded up to a multiple of this."""


class Block:
    """A piece of a segment, free or handed out. `previous` and `next` are its neighbours in the same segment."""

    __slots__ = ("address", "free", "next", "pool", "previous", "size")

    def __init__(self, pool: _Pool, address: int, size: int, previous: Block | None, next_: Block | None) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.free = False
        self.previous = previous
        self.next = next_


class _Pool:
    """Free blocks of one (stream, small or large), sorted by (size, address); `last` ends an expandable segment."""

    __slots__ = ("base", "free", "last", "mapped", "small")

    def __init__(self, small: bool, base: int) -> None:
        self.small = small
        self.base = base
        self.free: list[tuple[int, int, Block]] = []
        self.mapped = 0
        self.last: Block | None = None


class SimulatedOutOfMemoryError(Exception):
    """The simulated driver had no memory left, even after every wholly free segment went back."""


class CachingAllocator:
    """The allocator of one GPU. `capacity_bytes` None means a roomy GPU: nothing is ever given back to the driver.

    Attributes, all in bytes: `allocated_bytes` (sum of block sizes handed out, unsplit slack included, as
    `torch.cuda.memory_allocated`), `reserved_bytes`, and the peaks of both. `num_retries` counts how often cached segments
    had to go back to the driver to make room.
    """

    def __init__(self, *, expandable_segments: bool = False, capacity_bytes: int | None = None) -> None:
        self.expandable_segments = expandable_segments
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_segments = self.num_retries = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """A block of at least `num_bytes` for `stream`. Raises: SimulatedOutOfMemoryError (only with a capacity)."""
        size = max(MIN_BLOCK_BYTES, -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
        small = size <= SMALL_BYTES
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small, (len(self._pools) + 1) << 52)
        free = pool.free
        at = bisect_left(free, (size,))
        if self.expandable_segments and at + 1 < len(free) and free[at][2] is pool.last:
            at += 1  # the block that can still grow is taken last (get_free_block: expandable_size)
        if at < len(free):
            block = free.pop(at)[2]
        elif self.expandable_segments:
            block = self._expand(pool, size)
        else:
            block = self._new_segment(pool, size)
        remainder = block.size - size
        if remainder >= MIN_BLOCK_BYTES if small or self.expandable_segments else remainder > SMALL_BYTES:
            rest = Block(pool, block.address + size, remainder, block, block.next)
            if block.next is not None:
                block.next.previous = rest
            elif pool.last is block:
                pool.last = rest
            block.next, block.size = rest, size
            rest.free = True
            insort(free, (remainder, rest.address, rest))
        block.free = False
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def release(self, block: Block) -> None:
        """Free a block: it merges with free neighbours and stays reserved."""
        self.allocated_bytes -= block.size
        pool = block.pool
        free = pool.free
        before, after = block.previous, block.next
        if after is not None and after.free:
            del free[bisect_left(free, (after.size, after.address))]
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
            elif pool.last is after:
                pool.last = block
        if before is not None and before.free:
            del free[bisect_left(free, (before.size, before.address))]
            before.size += block.size
            before.next = block.next
            if block.next is not None:
                block.next.previous = before
            elif pool.last is block:
                pool.last = before
            block = before
        block.free = True
        insort(free, (block.size, block.address, block))

    def _new_segment(self, pool: _Pool, size: int) -> Block:
        """A fresh cudaMalloc as one block, not in the free list."""
        segment = segment_bytes(size)
        self._reserve(segment)
        block = Block(pool, self._next_address, segment, None, None)
        self._next_address += segment
        self.num_segments += 1
        return block

    def _expand(self, pool: _Pool, size: int) -> Block:
        """The tail of the pool's one expandable segment, grown by whole pages until it holds `size`."""
        page = SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
        tail = pool.last if pool.last is not None and pool.last.free else None
        grown = round_up(size - (tail.size if tail else 0), page)
        self._reserve(grown)
        address = pool.base + pool.mapped
        pool.mapped += grown
        if tail is not None:
            del pool.free[bisect_left(pool.free, (tail.size, tail.address))]
            tail.size += grown
            return tail
        block = Block(pool, address, grown, pool.last, None)
        if pool.last is None:
            self.num_segments += 1
        else:
            pool.last.next = block
        pool.last = block
        return block

    def _reserve(self, num_bytes: int) -> None:
        if self.capacity_bytes is not None and self.reserved_bytes + num_bytes > self.capacity_bytes:
            self.num_retries += 1
            self._give_back()
            if self.reserved_bytes + num_bytes > self.capacity_bytes:
                raise SimulatedOutOfMemoryError(
                    f"{num_bytes:,} bytes asked for, {self.reserved_bytes:,} of {self.capacity_bytes:,} reserved"
                )
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _give_back(self) -> None:
        """Return every wholly free native segment to the driver (release_cached_blocks). Expandable ones keep theirs."""
        if self.expandable_segments:
            return
        for pool in self._pools.values():
            whole = [item for item in pool.free if item[2].previous is None and item[2].next is None]
            pool.free[:] = [item for item in pool.free if item[2].previous is not None or item[2].next is not None]
            self.reserved_bytes -= sum(size for size, _, _ in whole)
            self.num_segments -= len(whole)

    def free_blocks(self) -> list[Block]:
        """Every cached block, pool by pool; their sizes and the allocated bytes add up to the reserved bytes."""
        return [block for pool in self._pools.values() for _, _, block in pool.free]


def segment_bytes(size: int) -> int:
    """Bytes that a rounded request of `size` asks of the driver when nothing cached fits (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size, LARGE_ROUND_BYTES)
