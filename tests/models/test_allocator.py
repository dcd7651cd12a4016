"""The simulated caching allocator: hand-counted cases, and invariants under random traffic."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.models.allocator import replay, replay_run
from peakcast.models.caching_allocator import Block, CachingAllocator, SimulatedOutOfMemoryError, segment_bytes
from peakcast.timeline import Category, Entry, Phase, Timeline
from peakcast.units import MIB

KIB = 1024


def step(*entries: tuple[str, int, int, int], num_instants: int = 4) -> Timeline:
    return Timeline.from_entries(
        [Entry(name, Category.ACTIVATIONS, size, born, dies) for name, size, born, dies in entries],
        [Phase.FORWARD] * num_instants,
    )


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segment_sizes_of_the_driver_requests(request_bytes, segment):
    assert segment_bytes(request_bytes) == segment


def test_unsplit_slack_counts_as_allocated():
    allocator = CachingAllocator()
    allocator.allocate(23 * MIB // 2)  # 11.5 MiB in a 12 MiB segment: half a MiB is left, too little to split
    assert allocator.allocated_bytes == 12 * MIB
    assert allocator.reserved_bytes == 12 * MIB


def test_a_large_block_is_split_when_more_than_a_mib_is_left():
    allocator = CachingAllocator()
    allocator.allocate(5 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (5 * MIB, 20 * MIB)
    allocator.allocate(14 * MIB)  # fits the rest of 15 MiB; the MiB that stays over is not split off
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (20 * MIB, 20 * MIB)


def test_requests_are_rounded_to_512_and_small_ones_share_a_segment():
    allocator = CachingAllocator()
    for _ in range(4096):
        allocator.allocate(1)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MIB, 2 * MIB)


def test_best_fit_takes_the_smallest_block_that_holds():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(29 * MIB) is small


def test_streams_do_not_share_blocks():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(40 * MIB, stream=0))
    allocator.allocate(40 * MIB, stream=1)
    assert allocator.reserved_bytes == 80 * MIB


def test_neighbours_merge_when_freed():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for block in blocks:
        allocator.release(block)
    assert [block.size for block in allocator.free_blocks()] == [20 * MIB]


def test_expandable_segments_grow_by_pages_instead_of_new_segments():
    native, expandable = CachingAllocator(), CachingAllocator(expandable_segments=True)
    for allocator in (native, expandable):
        first = allocator.allocate(50 * MIB)
        allocator.release(first)
        allocator.allocate(55 * MIB)
    assert native.reserved_bytes == 50 * MIB + 56 * MIB
    assert expandable.reserved_bytes == 60 * MIB  # three pages of 20 MiB: the freed tail is extended


def test_a_full_gpu_gives_whole_cached_segments_back_before_it_runs_out():
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.release(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved_bytes, allocator.num_retries) == (80 * MIB, 1)
    with pytest.raises(SimulatedOutOfMemoryError):
        allocator.allocate(30 * MIB)


def check_invariants(allocator: CachingAllocator, held: list[Block]) -> None:
    free = allocator.free_blocks()
    assert sum(block.size for block in held) == allocator.allocated_bytes
    assert sum(block.size for block in free) + allocator.allocated_bytes == allocator.reserved_bytes
    everything = sorted(free + held, key=lambda block: block.address)
    for before, after in itertools.pairwise(everything):
        assert before.address + before.size <= after.address, "blocks overlap"
    for block in everything:
        assert block.free == (block in free)
        if block.next is not None:
            assert block.next.previous is block
            assert block.address + block.size == block.next.address
            assert not (block.free and block.next.free), "free neighbours were not merged"
    assert allocator.peak_reserved_bytes >= allocator.reserved_bytes
    assert allocator.peak_allocated_bytes >= allocator.allocated_bytes


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), expandable=st.booleans(), tight=st.booleans())
def test_invariants_hold_under_random_traffic(seed, expandable, tight):
    random = np.random.default_rng(seed)
    capacity = 400 * MIB if tight else None
    allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=capacity)
    held: list[Block] = []
    for _ in range(150):
        if held and random.random() < 0.45:
            allocator.release(held.pop(int(random.integers(len(held)))))
        else:
            size = int(2 ** random.uniform(0, 26))
            try:
                held.append(allocator.allocate(size, stream=int(random.integers(3))))
            except SimulatedOutOfMemoryError:
                continue
            assert held[-1].size >= size
    assert capacity is None or allocator.peak_reserved_bytes <= capacity
    check_invariants(allocator, held)
    for block in held:
        allocator.release(block)
    check_invariants(allocator, [])


def test_what_dies_at_an_instant_makes_room_for_what_is_born_there():
    result = replay(step(("a", 40 * MIB, 0, 2), ("b", 40 * MIB, 2, 4)))
    assert result.peak_reserved_bytes == 40 * MIB
    assert result.peak_allocated_bytes == result.peak_requested_bytes == 40 * MIB


def test_entries_that_never_live_are_skipped_and_those_that_stay_are_allocated_at_the_end():
    result = replay(step(("never", 40 * MIB, 2, 2), ("stays", 30 * MIB, 1, 99)))
    assert (result.peak_reserved_bytes, result.allocated_bytes, result.num_events) == (30 * MIB, 30 * MIB, 1)


def test_later_steps_take_over_what_earlier_ones_leave():
    first = step(("weights", 30 * MIB, 0, 99), ("activation", 50 * MIB, 0, 2), ("states", 60 * MIB, 3, 99))
    steady = step(("weights", 30 * MIB, 0, 99), ("states", 60 * MIB, 0, 99), ("activation", 50 * MIB, 0, 2))
    run = replay_run([first, steady, steady])
    # the states do not fit the activation's hole in step 1, and the hole serves the activation again from step 2 on
    assert run.peak_reserved_bytes == (30 + 50 + 60) * MIB
    assert run.allocated_bytes == (30 + 60) * MIB


def test_what_no_entry_takes_over_is_freed_between_steps():
    run = replay_run([step(("gradient", 30 * MIB, 0, 99)), step(("activation", 30 * MIB, 1, 2))])
    assert run.allocated_bytes == 0
    assert run.peak_reserved_bytes == 30 * MIB


def test_twenty_thousand_events_take_tens_of_milliseconds():
    random = np.random.default_rng(0)
    born = np.sort(random.integers(0, 5000, 10_000))
    timeline = Timeline(
        names=["tensor"] * 10_000,
        modules=[""] * 10_000,
        categories=np.zeros(10_000, dtype=np.int8),
        num_bytes=random.choice(np.array([512, 16 * KIB, MIB, 3 * MIB, 33 * MIB]), 10_000),
        born=born,
        dies=born + random.integers(1, 400, 10_000),
        phases=np.ones(5400, dtype=np.int8),
    )
    best = min(_seconds(timeline) for _ in range(3))
    assert best < 0.25  # some 20 ms on an idle core; the margin is for busy ones


def _seconds(timeline: Timeline) -> float:
    start = time.perf_counter()
    assert replay(timeline).num_events == 20_000
    return time.perf_counter() - start
