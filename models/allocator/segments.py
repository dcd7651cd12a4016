"""Where the caching allocator's memory comes from: blocks, pools of free blocks, and the driver's segments, whole or grown
page by page."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from peakcast.core.units import round_up
from peakcast.models.allocator.rounding import segment_bytes

ADDRESS_SPACE_BYTES = 1 << 50
"""Size of an expandable segment's address space if the GPU's memory is not known."""


class Block:
    """A piece of a segment: allocated, free, waiting for streams or, if `mapped` is False, address space without memory.
    `previous` and `next` are its neighbours in the segment, which begins at `origin`."""

    __slots__ = ("address", "age_base", "free", "mapped", "next", "origin", "pool", "previous", "size", "uses", "waits")

    def __init__(
        self, pool: Pool, address: int, size: int, previous: Block | None = None, next_: Block | None = None
    ) -> None:
        self.pool = pool
        self.address = address
        self.origin: int = address if previous is None else previous.origin
        self.size = size
        self.free = False
        self.mapped = True
        self.previous = previous
        self.next = next_
        self.age_base = 0
        self.uses: set[int] = set()
        """Other streams that used it (`record_stream`)."""
        self.waits = 0
        """Number of streams whose work must end before it is free."""

    @property
    def is_split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.previous is not None or self.next is not None

    @property
    def grown_size(self) -> int:
        """The size that it can grow to (`expandable_size`)."""
        return self.size + (self.next.size if self.next is not None and not self.next.mapped else 0)

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes; returns the rest as a new neighbour."""
        rest = Block(self.pool, self.address + size, self.size - size, self, self.next)
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def merge(self) -> None:
        """Absorb the neighbours that are in the same state, and remove them from their pool (`try_merge_blocks`)."""
        before, after = self.previous, self.next
        if before is not None and before.mapped == self.mapped and (before.free or not before.mapped):
            self.pool.remove(before)
            self.address, self.size = before.address, self.size + before.size
            self.previous = before.previous
            if before.previous is not None:
                before.previous.next = self
        if after is not None and after.mapped == self.mapped and (after.free or not after.mapped):
            self.pool.remove(after)
            self.size += after.size
            self.next = after.next
            if after.next is not None:
                after.next.previous = self


class Pool:
    """The blocks of one stream and size class (small or large): `free` sorted by (size, address), `unmapped` by address."""

    __slots__ = ("free", "page", "searches", "small", "unmapped")

    def __init__(self, small: bool, page: int) -> None:
        self.small = small
        self.page = page
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        self.searches = 0

    def insert(self, block: Block) -> None:
        """Add a free or unmapped block."""
        if block.mapped:
            block.free = True
            block.age_base = self.searches
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a block."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class Segments:
    """Whole segments from a driver that can give `capacity_bytes`, of which `allowed_bytes` may be reserved; None: no
    limit. `falling`: each has a lower address than those before. `place`: asked first where the next segment begins; it
    gives a recorded driver's answer, or None for the next free address."""

    def __init__(
        self,
        large_segment_bytes: int,
        capacity_bytes: int | None,
        allowed_bytes: int | None,
        *,
        falling: bool = False,
        place: Callable[[int], int | None] | None = None,
    ) -> None:
        self.large_segment_bytes = large_segment_bytes
        self.falling = falling
        self.place = place
        self.capacity_bytes = capacity_bytes
        self.allowed_bytes = allowed_bytes
        self.reserved_bytes = self.peak_reserved_bytes = self.num_segments = 0
        self._next_address = 0

    def ask(self, pool: Pool, size: int) -> Block | None:
        """A block of at least `size` bytes that is in no pool (`alloc_block`); None if the limits forbid it."""
        segment = segment_bytes(size, self.large_segment_bytes)
        if self.allowed_bytes is not None and self.reserved_bytes + segment > self.allowed_bytes:
            return None
        return self._find_block(pool, size, segment)

    def _find_block(self, pool: Pool, size: int, segment: int) -> Block | None:
        """What `ask` does within the limits. `segment`: bytes of the segment that `size` needs."""
        return self._new_segment(pool, segment) if self._reserve(segment) else None

    def _new_segment(self, pool: Pool, num_bytes: int) -> Block:
        """A new segment of `num_bytes`, as one block."""
        begins = self.place(num_bytes) if self.place is not None else None
        if begins is None:
            begins = self._next_address - num_bytes if self.falling else self._next_address
        self.num_segments += 1
        self._occupied(begins, num_bytes)
        return Block(pool, begins, num_bytes)

    def _occupied(self, begins: int, num_bytes: int) -> None:
        """Move the next free address beyond this range."""
        at = self._next_address
        self._next_address = min(at, begins) if self.falling else max(at, begins + num_bytes)

    def adopt(self, pool: Pool, begins: int, pieces: Iterable[tuple[int, bool | None]]) -> list[Block]:
        """Add a segment in the state in which it was found. `pieces`: (bytes, whether allocated) in order of address; None
        means address space without memory. Returns the allocated blocks; the others are free in `pool`."""
        handed_out, last, address = [], None, begins
        for num_bytes, used in pieces:
            block = Block(pool, address, num_bytes, last)
            if last is not None:
                last.next = block
            block.mapped = used is not None
            self.reserved_bytes += num_bytes if block.mapped else 0
            if used:
                handed_out.append(block)
            else:
                pool.insert(block)
            last, address = block, address + num_bytes
        self.num_segments += 1
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._occupied(begins, address - begins)
        return handed_out

    def _reserve(self, num_bytes: int) -> bool:
        """Count `num_bytes` as reserved; False if the driver cannot give them."""
        if self.capacity_bytes is not None and self.reserved_bytes + num_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def give_back(self, block: Block) -> None:
        """Return a free block to the driver, if it is a whole segment (`release_block`)."""
        if block.is_split:
            return
        block.pool.remove(block)
        block.free = False
        self.reserved_bytes -= block.size
        self.num_segments -= 1


class ExpandableSegments(Segments):
    """Segments that are address space; memory is mapped to their pages when it is needed."""

    def _find_block(self, pool: Pool, size: int, segment: int) -> Block | None:
        """The block at the lowest address where `size` fits once pages are mapped (`try_allocate_expandable_block`)."""
        block = self._place(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            rest = block.next
            assert rest is not None  # the place was large enough
            if not self._map(rest, min(size - block.size, rest.size)):
                return None
            block = rest
        pool.remove(block)
        return block

    def _place(self, pool: Pool, size: int) -> Block:
        """`find_expandable_block`: the first run of free and unmapped blocks with room for `size`, else a new segment."""
        for _, unmapped in pool.unmapped:
            start = unmapped.previous if unmapped.previous is not None and unmapped.previous.free else unmapped
            room = 0
            block: Block | None = start
            while block is not None and room < size and (block.free or not block.mapped):
                room += block.size
                block = block.next
            if room >= size:
                return start
        # 9/8 of the GPU's memory; returned pages leave holes, so a nearly full GPU may need a second segment
        space = ADDRESS_SPACE_BYTES if self.capacity_bytes is None else round_up(self.capacity_bytes * 9 // 8, pool.page)
        segment = self._new_segment(pool, space)
        segment.mapped = False
        pool.insert(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        """Map memory to the first pages of an unmapped block and merge it with free neighbours (`map_block`); False if the
        driver cannot give it."""
        pool, mapped = block.pool, round_up(size, block.pool.page)
        if not self._reserve(mapped):
            return False
        pool.remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = block.cut(mapped)
            rest.mapped = False
            pool.insert(rest)
        block.merge()
        pool.insert(block)
        return True

    def give_back(self, block: Block) -> None:
        """Unmap the whole pages inside a free block (`unmap_block`). Pages count from the beginning of the segment."""
        pool, origin = block.pool, block.origin
        begin = origin + round_up(block.address - origin, pool.page)
        end = origin + (block.address - origin + block.size) // pool.page * pool.page
        if begin >= end:
            return
        pool.remove(block)
        block.free = False
        if end < block.address + block.size:
            pool.insert(block.cut(end - block.address))
        if begin > block.address:
            before, block = block, block.cut(begin - block.address)
            pool.insert(before)
        block.mapped = False
        block.merge()
        pool.insert(block)
        self.reserved_bytes -= end - begin
        if not block.is_split:
            pool.remove(block)
            self.num_segments -= 1
