"""The simulated allocator against 85 histories that GPUs recorded: every allocation lands at its recorded address, and the
sum of segments is as recorded after every event."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from peakcast.core.units import MIB
from peakcast.histories.files import read_histories
from peakcast.histories.history import Action, Event, HandedOut, History, Segment, block_bytes
from peakcast.jobs.allocator_settings import Allocator
from peakcast.models.allocator import replay as allocator
from peakcast.models.allocator.caching_allocator import CachingAllocator
from peakcast.models.allocator.events import AllocatorEvents
from peakcast.models.allocator.history_replay import replay_history
from peakcast.models.allocator.segments import ADDRESS_SPACE_BYTES

FOLDER = Path(__file__).resolve().parents[2] / "datasets" / "published" / "histories"
FILES = sorted(FOLDER.glob("*.jsonl.gz"))
FEW = [
    path
    for _, files in itertools.groupby(FILES, key=lambda path: path.name.partition("-")[0])
    for path in sorted(files, key=lambda path: path.stat().st_size)[:3]
]
"""The smallest three of each who published some, for every test run; the others run with -m whole."""
AMONG_EQUALS = {"niuhuangxiaozi-forward-snap-100-baf8.jsonl.gz": 2}
"""With addresses of its own the simulation takes another of two equal blocks here: events until both are the same again."""


@cache
def history_of(path: Path) -> History:
    (history,) = read_histories(path)
    return history


@pytest.mark.whole
def test_every_published_history_is_there():
    histories = [history_of(path) for path in FILES]
    assert len(FILES) == 85
    assert sum(history.num_allocations for history in histories) == 252_051
    assert sum(history.settings.expandable_segments for history in histories) == 3


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.whole] * (path not in FEW)) for path in FILES],
    ids=lambda path: path.name.removesuffix(".jsonl.gz"),
)
def test_every_allocation_lands_where_it_did(path):
    history = history_of(path)
    found = replay_history(history)
    assert found.agrees
    assert found.same_place == found.allocations == history.num_allocations > 0
    assert found.reserved_differs == 0
    assert found.peak_reserved_bytes == found.recorded_peak_reserved_bytes
    assert found.reserved_differs_own_addresses == AMONG_EQUALS.get(path.name, 0)


# -- the compiled replay ------------------------------------------------------------------------------------------------


def as_run(history: History) -> AllocatorEvents:
    """The calls of a history that began on an empty allocator."""
    events, sizes, streams, held = [], [], [], {}
    for event in history.events:
        if event.action is Action.ALLOC:
            held[event.address] = len(sizes)
            events.append(len(sizes))
            sizes.append(event.num_bytes)
            streams.append(event.stream)
        elif event.action is Action.FREE:
            events.append(~held.pop(event.address))
    columns = (np.array(each, dtype=np.int64) for each in (events, sizes, streams))
    return AllocatorEvents(*columns, peak_requested_bytes=0)


def begun_empty(paths: Iterable[Path]) -> list[tuple[str, History]]:
    histories = [(path.name, history_of(path)) for path in paths]
    gives_back = (Action.SEGMENT_FREE, Action.LET_GO)
    return [
        (name, each)
        for name, each in histories
        if not each.segments and not any(event.action in gives_back for event in each.events)
    ]


@pytest.mark.parametrize("paths", [FEW, pytest.param(FILES, marks=pytest.mark.whole)], ids=["few", "all"])
def test_the_compiled_replay_reserves_as_much_as_was_recorded(paths):
    if allocator.compiled is None:
        pytest.skip("no compiler was there when peakcast was installed")
    histories = begun_empty(paths)
    assert len(histories) >= (5 if paths is FEW else 10)
    for name, history in histories:
        found = allocator._replay_compiled(as_run(history), history.settings, None, newest_first=True)
        assert found is not None
        assert found.peak_reserved_bytes == history.peak_reserved_bytes, name


# -- what a replay must notice ------------------------------------------------------------------------------------------


def small_history() -> History:
    """Two tensors of 4 MiB, the first freed and used again; one segment of 20 MiB."""
    events = (
        Event(Action.SEGMENT_ALLOC, 64 * MIB, 20 * MIB),
        Event(Action.ALLOC, 64 * MIB, 4 * MIB, 0, 0),
        Event(Action.ALLOC, 68 * MIB, 4 * MIB, 0, 0),
        Event(Action.FREE, 64 * MIB, 4 * MIB),
        Event(Action.ALLOC, 64 * MIB, 4 * MIB, 0, 0),
    )
    return History(name="small", events=events, categories=("empty",), peak_reserved_bytes=20 * MIB)


def test_a_history_by_hand_agrees():
    found = replay_history(small_history())
    assert (found.allocations, found.same_place, found.reserved_differs) == (3, 3, 0)
    assert found.agrees
    assert found.first_difference is None


def test_an_allocation_elsewhere_is_noticed():
    history = small_history()
    elsewhere = history.events[4]._replace(address=72 * MIB)
    found = replay_history(replace(history, events=(*history.events[:4], elsewhere)))
    assert (found.same_place, found.first_difference, found.agrees) == (2, 4, False)


def test_a_segment_that_the_simulation_would_not_ask_for_is_noticed():
    history = small_history()
    asked = Event(Action.SEGMENT_ALLOC, 128 * MIB, 20 * MIB)
    moved = history.events[4]._replace(address=128 * MIB)
    events = (*history.events[:4], asked, moved)
    found = replay_history(replace(history, events=events, peak_reserved_bytes=40 * MIB))
    assert found.reserved_differs == 1
    assert not found.agrees


def test_the_state_before_the_first_event_is_taken_over():
    """A block of 18.5 MiB of a segment of 20 keeps what is too small to be split off."""
    blocks = (HandedOut(0, 4 * MIB, 4 * MIB), HandedOut(30 * MIB, 10 * MIB, 10 * MIB - 1000))
    segments = (Segment(0, 20 * MIB, 0, False), Segment(30 * MIB, 10 * MIB, 0, False))
    events = (
        Event(Action.ALLOC, 4 * MIB, 15 * MIB + MIB // 2, 0, 0),
        Event(Action.FREE, 30 * MIB, 10 * MIB - 1000),
        Event(Action.SEGMENT_FREE, 30 * MIB, 10 * MIB),
    )
    history = History(
        name="later", segments=segments, blocks=blocks, events=events, categories=("x",), peak_reserved_bytes=30 * MIB
    )
    found = replay_history(history)
    assert found.agrees
    assert found.peak_allocated_bytes == 30 * MIB


@pytest.mark.parametrize("newest_first", [False, True])
def test_pages_are_counted_from_where_an_expandable_segment_begins(newest_first):
    """The address space where the GPU's memory is not known is no whole number of pages of 20 MiB."""
    assert ADDRESS_SPACE_BYTES % (20 * MIB)
    simulated = CachingAllocator(Allocator(expandable_segments=True), newest_first=newest_first)
    blocks = [simulated.allocate(20 * MIB) for _ in range(3)]
    simulated.release(blocks[1])
    simulated.empty_cache()
    assert simulated.reserved_bytes == 40 * MIB
    simulated.release(blocks[0])
    simulated.release(blocks[2])
    simulated.empty_cache()
    assert simulated.reserved_bytes == 0


def test_a_block_is_a_multiple_of_512_bytes():
    assert [block_bytes(size) for size in (0, 1, 512, 513)] == [512, 512, 512, 1024]
