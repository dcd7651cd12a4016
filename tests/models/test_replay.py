"""Timelines replayed through the allocator: the order of events, what steps hand on, the compiled loop beside the calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.core.units import MIB
from peakcast.jobs.allocator_settings import Allocator
from peakcast.models.allocator import events as allocator_events
from peakcast.models.allocator import replay as allocator_module
from peakcast.models.allocator.caching_allocator import CachingAllocator, SimulatedOutOfMemoryError
from peakcast.models.allocator.events import AllocatorEvents
from peakcast.models.allocator.replay import replay, replay_run
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline


def step(*entries: tuple[str, int, int, int], num_instants: int = 4) -> Timeline:
    return Timeline.from_entries(
        [Entry(name, Category.ACTIVATIONS, size, born, dies) for name, size, born, dies in entries],
        [Phase.FORWARD] * num_instants,
    )


def random_step(seed: int, num_streams: int, num_entries: int = 300) -> Timeline:
    """Entries of sizes that repeat, as a step's do; the blocks of some wait for another stream."""
    random = np.random.default_rng(seed)
    sizes = (2 ** random.uniform(8, 26, 12)).astype(np.int64)
    born = np.sort(random.integers(0, 120, num_entries))
    dies = born + random.choice([1, 2, 3, 30, 500], num_entries)
    return Timeline(
        names=[f"tensor.{i % 7}" for i in range(num_entries)],
        modules=[""] * num_entries,
        categories=np.zeros(num_entries, dtype=np.int8),
        num_bytes=random.choice(sizes, num_entries),
        born=born,
        dies=dies,
        phases=np.ones(120, dtype=np.int8),
        streams=random.integers(0, num_streams, num_entries).astype(np.int8),
        reusable=dies + random.choice([0, 0, 0, 1, 9, 500], num_entries),
    )


built = pytest.mark.skipif(allocator_module.compiled is None, reason="there was no compiler when peakcast was installed")


@pytest.mark.skipif(allocator_events.compiled is None, reason="there was no compiler when peakcast was installed")
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0, 0.5, 1]))
def test_the_compiled_order_of_events_equals_the_sort(seed, share):
    timeline = random_step(seed, 1)
    random = np.random.default_rng(seed)
    holders, handed_over = random.permutation(len(timeline.born)), random.random(len(timeline.born)) < share
    columns = timeline, holders, handed_over, len(holders)
    assert allocator_events._events(*columns).tolist() == allocator_events._sorted_events(*columns).tolist()


@built
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    chosen=st.builds(
        Allocator,
        expandable_segments=st.booleans(),
        roundup_power2_divisions=st.sampled_from([None, "4", "[16:4,>:1]"]),
        large_segment_size_mb=st.sampled_from([None, 14]),
    ),
    tightness=st.sampled_from([None, 0.8, 0.9, 0.97, 0.995]),
    num_streams=st.integers(1, 2),
    newest_first=st.booleans(),
)
def test_the_compiled_replay_equals_call_by_call(seed, chosen, tightness, num_streams, newest_first):
    run = AllocatorEvents.of([random_step(seed, num_streams), random_step(seed + 1, num_streams)])
    order = {"newest_first": newest_first}
    roomy = allocator_module._replay_calls(run, CachingAllocator(chosen, **order))
    assert allocator_module._replay_compiled(run, chosen, None, **order) == roomy
    if tightness is not None:
        capacity = int(roomy.peak_reserved_bytes * tightness)
        found = outcome(allocator_module._replay_compiled, run, chosen, capacity, **order)
        if found is not None:  # else the run is replayed call by call
            limited = CachingAllocator(chosen, capacity_bytes=capacity, **order)
            assert found == outcome(allocator_module._replay_calls, run, limited)


def outcome(replays, *arguments, **options):
    """What a replay ends with, or what it says when it runs out of memory."""
    try:
        return replays(*arguments, **options)
    except SimulatedOutOfMemoryError as error:
        return str(error)


@built
def test_the_compiled_replay_covers_runs_that_give_memory_back():
    retried = ran_out = 0
    for seed in range(40):
        run = AllocatorEvents.of([random_step(seed, 1), random_step(seed + 1, 1)])
        roomy = allocator_module._replay_compiled(run, Allocator(), None)
        assert roomy is not None
        tightness = (0.97, 0.8)[seed % 2]  # what waits goes back too, so that a run needs a good deal less than it reserves
        tight = outcome(allocator_module._replay_compiled, run, Allocator(), int(roomy.peak_reserved_bytes * tightness))
        assert tight is not None
        ran_out += isinstance(tight, str)
        retried += not isinstance(tight, str) and tight.num_retries > 0
    assert retried > 10
    assert ran_out > 2


@pytest.mark.parametrize("sizes", [(2**50, 2**20), (2**38,) * 40])
def test_more_than_any_gpu_has_is_replayed_all_the_same(sizes):
    """Beyond the addresses that the compiled replay tells apart: one tensor, or all of them together."""
    steps = [step(*((f"t{i}", size, i, i + 2) for i, size in enumerate(sizes)))]
    expected = allocator_module._replay_calls(AllocatorEvents.of(steps), CachingAllocator())
    assert replay_run(steps) == expected
    with pytest.raises(SimulatedOutOfMemoryError):
        replay_run(steps, capacity_bytes=80 * 2**30)


def test_without_the_compiled_replay_the_answer_is_the_same(monkeypatch):
    steps = [random_step(1, 2), random_step(2, 2)]
    found = replay_run(steps)
    monkeypatch.setattr(allocator_module, "compiled", None)
    assert replay_run(steps) == found


def test_what_dies_at_an_instant_makes_room_for_what_is_born_there():
    result = replay(step(("a", 40 * MIB, 0, 2), ("b", 40 * MIB, 2, 4)))
    assert result.peak_reserved_bytes == 40 * MIB
    assert result.peak_allocated_bytes == result.peak_requested_bytes == 40 * MIB


def test_entries_that_never_live_are_skipped_and_those_that_stay_are_allocated_at_the_end():
    result = replay(step(("never", 40 * MIB, 2, 2), ("stays", 30 * MIB, 1, 99)))
    assert (result.peak_reserved_bytes, result.allocated_bytes, result.num_events) == (30 * MIB, 30 * MIB, 1)


def waiting(*entries: tuple[int, int, int, int], num_instants: int = 8) -> Timeline:
    """Tensors as (MiB, born, dies, reusable)."""
    return Timeline.from_entries(
        [
            Entry(f"t{i}", Category.COMMUNICATION_BUFFERS, size * MIB, born, dies, stream=2, reusable=reusable)
            for i, (size, born, dies, reusable) in enumerate(entries)
        ],
        [Phase.FORWARD] * num_instants,
    )


def test_a_block_that_waits_is_not_allocated_and_not_free():
    """`DeviceCachingAllocator::free` counts the block as freed at once, `insert_events` keeps it from the pool, and the
    first `malloc` that finds its event done puts it back (`process_events`): two blocks serve tensors that stand alone."""
    turns = [(40, 2 * i, 2 * i + 2, 2 * i + 4) for i in range(3)]  # each waits until the next one has gone
    result = replay(waiting(*turns))
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes, result.num_segments) == (40 * MIB, 80 * MIB, 2)
    at_once = replay(waiting(*((size, born, dies, dies) for size, born, dies, _ in turns)))
    assert (at_once.peak_allocated_bytes, at_once.peak_reserved_bytes) == (40 * MIB, 40 * MIB)


def test_what_waits_at_the_end_of_a_step_is_free_in_the_next():
    run = replay_run([waiting((40, 0, 7, 99)), waiting((40, 0, 7, 99))])
    assert run.peak_reserved_bytes == 40 * MIB


@pytest.mark.parametrize("capacity_mib", [None, 100])
def test_a_full_gpu_waits_for_what_waits(capacity_mib):
    """`release_cached_blocks` synchronizes all events first; the instant at which the block was to be free passes by."""
    steps = [waiting((60, 0, 1, 5), (80, 2, 4, 4), (60, 6, 7, 7))]
    capacity = capacity_mib and capacity_mib * MIB
    found = replay_run(steps, capacity_bytes=capacity)
    assert found == allocator_module._replay_calls(AllocatorEvents.of(steps), CachingAllocator(capacity_bytes=capacity))
    # 60 and, beside it, 80 for the 80; both then serve: 60 with room for two, 80 where only one fitted
    assert (found.peak_reserved_bytes, found.num_retries) == ((80 * MIB, 1) if capacity_mib else (140 * MIB, 0))


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


def test_equal_tensors_continue_one_by_one_then_those_of_equal_size_and_the_rest_is_freed():
    left_by = [("a", 2), ("a", 2), ("b", 2), ("c", 2), ("d", 1)]
    before = step(*((name, size * MIB, 0, 99) for name, size in left_by))
    after = step(*((name, size * MIB, 0, 99) for name, size in [("b", 2), ("a", 2), ("new name", 2), ("larger", 9)]))
    continued, holders, left = allocator_events._match_survivors(after, before, np.arange(5))
    exact = dict(zip(continued.tolist(), holders.tolist(), strict=True))
    assert (exact[0], exact[1]) == (2, 0)
    assert set(exact) == {0, 1, 2}  # nothing had the size of the larger one
    assert exact[2] in (1, 3)
    assert set(left.tolist()) == {1, 3, 4} - {exact[2]}
