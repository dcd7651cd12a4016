"""How PyTorch's caching allocator rounds the size of a request. Constants are those of c10/cuda/CUDACachingAllocator.cpp
and c10/core/AllocatorConfig.h of torch 2.13."""

from __future__ import annotations

from peakcast.core.units import ALLOCATION_UNIT_BYTES, MIB, round_up
from peakcast.jobs.allocator_settings import NUM_INTERVALS

MIN_BLOCK_BYTES = ALLOCATION_UNIT_BYTES
"""kMinBlockSize: every request is rounded up to a multiple of it."""
SMALL_BYTES = 1 * MIB
"""kSmallSize: requests up to this size use the small pool; a large block is split only if more than this is left."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""kSmallBuffer: the size that the small pool requests from the driver; also the page size of small expandable segments."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""`large_segment_size_mb` (before 2.11 a constant, kLargeBuffer): requests of 1 to 10 MiB get a segment of this size; also
the page size of large expandable segments and the default of `max_non_split_rounding_mb`."""
MIN_LARGE_BYTES = 10 * MIB
"""kMinLargeAlloc: requests from this size on get a segment of their own size..."""
LARGE_ROUND_BYTES = 2 * MIB
"""kRoundLarge: ...rounded up to a multiple of this."""


def round_request(num_bytes: int, divisions: tuple[int, ...]) -> int:
    """The size to which a request is rounded (`round_size`, `roundup_power2_next_division`). `divisions`: one for each
    power of two from 1 MiB on."""
    if num_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    steps = divisions[min(max(num_bytes.bit_length() - 21, 0), NUM_INTERVALS - 1)]
    if steps <= 1 or num_bytes <= MIN_BLOCK_BYTES * steps:
        return round_up(num_bytes, MIN_BLOCK_BYTES)
    return round_up(num_bytes, (1 << (num_bytes.bit_length() - 1)) // steps)


def segment_bytes(size: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """Bytes that a rounded request of `size` requests from the driver if no cached block fits (`get_allocation_size`)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return large_segment_bytes
    return round_up(size, LARGE_ROUND_BYTES)
