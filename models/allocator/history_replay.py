"""Replays a recorded allocator history through the simulated allocator, to check whether every allocation gets the address
that it really had.

This is done twice. First, new segments begin where the recorded driver put them, so that every block has an address to
compare; then the simulation chooses addresses itself, as it does for a prediction. What the program returned to the driver
(`empty_cache`, or to make room) is returned at the same moments.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from peakcast.histories.history import Action, Event, History, Segment, requests
from peakcast.models.allocator.caching_allocator import CachingAllocator
from peakcast.models.allocator.segments import ADDRESS_SPACE_BYTES, Block

OLDEST_FIRST_SINCE = (2, 13)
"""Since this release torch takes, among equal blocks, the one in the oldest segment (pytorch#183591); before, the one with
the lowest address."""
SAME_SPACE_BYTES = 1 << 38
"""Pages of one stream within this much address space belong to one expandable segment, whose size is 9/8 of the GPU's
memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryReplay:
    """A recorded history compared with its simulation; sizes in bytes."""

    allocations: int
    same_place: int
    """Number of allocations that get the recorded address when segments begin where they did."""
    peak_reserved_bytes: int
    """From the simulation that chooses addresses itself."""
    recorded_peak_reserved_bytes: int
    peak_allocated_bytes: int
    num_events: int
    reserved_differs: int
    """Number of events after which the simulation with the recorded addresses has another sum of segments than was
    recorded."""
    reserved_differs_own_addresses: int
    """`reserved_differs` if the simulation chooses addresses itself: among equal free blocks it may choose another one."""
    first_difference: int | None
    """Index of the first event, from 0, at which it differs; None if it never does."""

    @property
    def agrees(self) -> bool:
        """Whether every address, every sum of segments and the peak are as recorded."""
        same = self.same_place == self.allocations and not self.reserved_differs
        return same and self.peak_reserved_bytes == self.recorded_peak_reserved_bytes


@dataclass(slots=True)
class _Outcome:
    same_place: int = 0
    differs: int = 0
    first: int | None = None
    allocated: list[int] = field(default_factory=list)
    """Allocated bytes before the first event and after each allocation, in the simulation."""


class _Driver:
    """Decides where new segments begin: as recorded, or each below (`falling`) or above (`rising`) the one before. In each
    case it knows a block's recorded address, as long as the simulation requested the same segments."""

    def __init__(self, history: History, order: Literal["recorded", "falling", "rising"]) -> None:
        self.order = order
        self.given: deque[int] = deque()
        """Recorded addresses of the segments that the coming allocation asks for."""
        begins = [(segment.address, segment.address + segment.num_bytes) for segment in history.segments]
        self._next = min(begins)[0] if begins and order == "falling" else max((end for _, end in begins), default=0)
        self._shifts: dict[int, int | None] = {}

    def place(self, num_bytes: int) -> int | None:
        """The address of a new segment; None to let the allocator choose."""
        recorded = self.given.popleft() if self.given else None
        if self.order == "recorded":
            return recorded
        begins = self._next - num_bytes if self.order == "falling" else self._next
        self._next = begins if self.order == "falling" else begins + num_bytes
        self._shifts[begins] = None if recorded is None else recorded - begins
        return begins

    def recorded(self, block: Block) -> int | None:
        """The recorded address of a block; None if its segment was not recorded."""
        shift = self._shifts.get(block.origin, 0)
        return None if shift is None else block.address + shift

    def free_block(self, allocator: CachingAllocator, event: Event) -> Block | None:
        """The free block that goes back to the driver: the one at the recorded address, else any whole segment of this
        size."""
        free = allocator.free_blocks()
        if not allocator.settings.expandable_segments:
            free = [block for block in free if block.size == event.num_bytes and not block.is_split]
        for block in free:
            address = self.recorded(block)
            if address is not None and address <= event.address < address + block.size:
                return block
        return free[0] if free and not allocator.settings.expandable_segments else None


def replay_history(history: History) -> HistoryReplay:
    """Replay `history`. If it does not say which torch recorded it, both orders of equal blocks are tried and the better
    one counts."""
    release = _release(history.torch)
    orders = [release >= OLDEST_FIRST_SINCE] if release else [False, True]
    found = [_replayed(history, oldest_first=oldest_first) for oldest_first in orders[:1]]
    if not found[0].agrees and len(orders) > 1:
        found.append(_replayed(history, oldest_first=True))
    return max(found, key=lambda each: (each.agrees, each.same_place))


def allocated_bytes(history: History) -> list[int]:
    """Allocated bytes before the first event and after each allocation, including unsplit rests of blocks."""
    return _run(history, "recorded", newest_first=True)[0].allocated


def _replayed(history: History, *, oldest_first: bool) -> HistoryReplay:
    """The replay with one order of equal blocks."""
    own, peaks = _run(history, "rising" if oldest_first else "falling", newest_first=not oldest_first)
    placed = own if oldest_first else _run(history, "recorded", newest_first=True)[0]
    firsts = [each.first for each in (placed, own) if each.first is not None]
    return HistoryReplay(
        allocations=history.num_allocations,
        same_place=placed.same_place,
        peak_reserved_bytes=peaks.peak_reserved_bytes,
        recorded_peak_reserved_bytes=history.peak_reserved_bytes,
        peak_allocated_bytes=peaks.peak_allocated_bytes,
        num_events=len(history.events),
        reserved_differs=placed.differs,
        reserved_differs_own_addresses=own.differs,
        first_difference=min(firsts, default=None),
    )


def _run(
    history: History, order: Literal["recorded", "falling", "rising"], *, newest_first: bool
) -> tuple[_Outcome, CachingAllocator]:
    """Make the calls of `history` on an allocator whose segments begin in this order."""
    driver, outcome = _Driver(history, order), _Outcome()
    allocator = CachingAllocator(history.settings, newest_first=newest_first, place=driver.place)
    blocks = start(history, allocator)
    outcome.allocated.append(allocator.allocated_bytes)
    reserved, number = history.first_reserved_bytes, -1
    for event, asked in requests(history.events):
        number += len(asked) + (event is not None)
        if asked:
            reserved += sum(segment.num_bytes for segment in asked)
            driver.given = deque(segment.address for segment in asked)
        if event is None:
            continue
        action, address, num_bytes, stream, _ = event
        same = True
        if action is Action.ALLOC:
            block = blocks[address] = allocator.allocate(num_bytes, stream)
            same = driver.recorded(block) == address
            outcome.same_place += same
            outcome.allocated.append(allocator.allocated_bytes)
            driver.given.clear()
        elif action is Action.SEGMENT_FREE:
            reserved -= num_bytes
            given_back = driver.free_block(allocator, event)
            if given_back is not None:
                allocator.give_back(given_back)
        elif action is Action.FREE and address in blocks:
            allocator.release(blocks.pop(address))
        elif address in blocks:
            _free_on_several_streams(allocator, blocks, event)
        if allocator.reserved_bytes != reserved or (order == "recorded" and not same):
            outcome.differs += allocator.reserved_bytes != reserved
            outcome.first = number if outcome.first is None else outcome.first
    return outcome, allocator


def _free_on_several_streams(allocator: CachingAllocator, blocks: dict[int, Block], event: Event) -> None:
    """A block that is freed while another stream uses it, or the end of that use."""
    if event.action is Action.LET_GO:
        allocator.record_stream(blocks[event.address], event.address)  # a stream for each block, so each ends separately
        allocator.release(blocks[event.address])
    elif event.action is Action.FREE_LATER:
        block = blocks.pop(event.address)
        if block.waits:
            allocator.finish(event.address)
        else:  # it was freed before the first event
            allocator.release(block)


def start(history: History, allocator: CachingAllocator) -> dict[int, Block]:
    """Bring an empty allocator into the state before the first event. Returns the allocated blocks by recorded address."""
    given = {block.address: block for block in history.blocks}
    blocks: dict[int, Block] = {}
    for begins, pieces, segment in _spaces(history):
        for block in allocator.adopt(begins, pieces, segment.stream, small=segment.small):
            blocks[block.address] = block
    missing = [address for address in given if address not in blocks]
    if missing:
        raise ValueError(f"a block at address {missing[0]:,} lies in no segment")
    return blocks


def _spaces(history: History) -> list[tuple[int, list[tuple[int, bool | None]], Segment]]:
    """(address, pieces, segment) of the segments before the first event; runs of pages are joined to their expandable
    segment."""
    given = sorted(history.blocks)
    spaces: list[tuple[int, list[tuple[int, bool | None]], Segment]] = []
    at = 0
    for segment in sorted(history.segments):
        pieces: list[tuple[int, bool | None]] = []
        position, end = segment.address, segment.address + segment.num_bytes
        while at < len(given) and given[at].address < end:
            block = given[at]
            if block.address < position or block.address + block.num_bytes > end:
                raise ValueError(f"a block at address {block.address:,} lies in no segment, or overlaps another")
            pieces += [(block.address - position, False)] if block.address > position else []
            pieces.append((block.num_bytes, True))
            position, at = block.address + block.num_bytes, at + 1
        pieces += [(end - position, False)] if end > position else []
        if history.settings.expandable_segments:
            joined = _joins(spaces, segment)
            if joined is not None:
                begins, before, _ = joined
                gap = segment.address - begins - sum(size for size, _ in before[:-1])
                before[-1:] = [*([(gap, None)] if gap else []), *pieces, before[-1]]
                continue
            pieces.append((ADDRESS_SPACE_BYTES, None))
        spaces.append((segment.address, pieces, segment))
    return spaces


def _joins(
    spaces: list[tuple[int, list[tuple[int, bool | None]], Segment]], segment: Segment
) -> tuple[int, list[tuple[int, bool | None]], Segment] | None:
    """The expandable segment that a run of pages continues; None if it begins a new one."""
    for space in reversed(spaces):
        first = space[2]
        if (first.stream, first.small) == (segment.stream, segment.small):
            return space if segment.address - space[0] < SAME_SPACE_BYTES else None
    return None


def _release(text: str) -> tuple[int, ...]:
    """major.minor of a torch release as numbers; () if it is not known."""
    numbers = text.split("+")[0].split(".")[:2]
    return tuple(int(number) for number in numbers) if numbers and all(n.isdigit() for n in numbers) else ()
