"""One GPU's allocator history as a value: the state before the first event, the events in order, and recorded totals.

Addresses and sizes are bytes. Events have the names of PyTorch's own trace (`torch.cuda.memory._snapshot`, torch 2.13
`torch/csrc/cuda/memory_snapshot.cpp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice, zip_longest
from typing import NamedTuple

from peakcast.core.units import ALLOCATION_UNIT_BYTES, MIB, round_up
from peakcast.jobs.allocator_settings import Allocator

LARGEST_SLACK_BYTES = 1 * MIB
"""kSmallSize: a block of the large pool is split only if more than this would be left (`should_split`)."""
UNCATEGORISED = -1


class Action(StrEnum):
    """The kind of an event."""

    ALLOC = "alloc"
    FREE = "free"
    """The program freed the block, and it can be reused at once."""
    LET_GO = "free_requested"
    """The program freed the block while another stream still uses it..."""
    FREE_LATER = "free_completed"
    """...and it can be reused from here on."""
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    OUT_OF_MEMORY = "oom"
    MARK = "mark"
    """A mark that the program made, such as the beginning of an optimizer step; its text is the category."""


class Event(NamedTuple):
    """`num_bytes` is the requested size (for a segment, its own); `category` is an index into `History.categories`."""

    action: Action
    address: int = 0
    num_bytes: int = 0
    stream: int = 0
    category: int = UNCATEGORISED


class Segment(NamedTuple):
    """Memory that was reserved from the driver before the first event; for an expandable segment, one run of its pages."""

    address: int
    num_bytes: int
    stream: int
    small: bool


class HandedOut(NamedTuple):
    """A block that was allocated before the first event: its size and the requested size."""

    address: int
    num_bytes: int
    requested_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The recording of one GPU. `torch` and `gpu` are empty if the recording does not have them."""

    name: str
    device: int = 0
    torch: str = ""
    gpu: str = ""
    settings: Allocator = field(default_factory=Allocator)
    segments: tuple[Segment, ...] = ()
    blocks: tuple[HandedOut, ...] = ()
    events: tuple[Event, ...] = ()
    categories: tuple[str, ...] = ()
    peak_reserved_bytes: int
    """Largest sum of segments, from the state before the first event on."""

    @property
    def num_allocations(self) -> int:
        return sum(event.action is Action.ALLOC for event in self.events)

    @property
    def first_reserved_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


class Request(NamedTuple):
    """One call of the allocator: the event of its block, and the segments that it requested from the driver. `event` is
    None for segments without an allocation, as when memory ran out."""

    event: Event | None
    asked: tuple[Event, ...] = ()


def requests(events: Sequence[Event]) -> Iterator[Request]:
    """The events, each allocation together with the segments that it requested. PyTorch records a segment before its
    allocation, and some releases right after it (seen in torch 2.6)."""
    pending: tuple[Event, ...] = ()
    skip = False
    for event, after in zip_longest(events, islice(events, 1, None)):
        if skip:
            skip = False
        elif event.action is Action.SEGMENT_ALLOC:
            pending += (event,)
        elif event.action is Action.ALLOC:
            if not pending and after and after.action is Action.SEGMENT_ALLOC and after.address == event.address:
                pending, skip = (after,), True
            yield Request(event, pending)
            pending = ()
        else:
            yield Request(event)
    if pending:
        yield Request(None, pending)


def block_bytes(requested_bytes: int) -> int:
    """The least size of a request's block, in bytes. It is larger only if the rest of a block was too small to be split
    off."""
    return max(ALLOCATION_UNIT_BYTES, round_up(requested_bytes, ALLOCATION_UNIT_BYTES))
