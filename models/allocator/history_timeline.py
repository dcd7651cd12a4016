"""A recorded allocator history as a `Timeline`, so that it can be compared with the ledger's or a trace's."""

from __future__ import annotations

from typing import NamedTuple

from peakcast.histories.categories import is_hidden, phases
from peakcast.histories.history import Action, History, block_bytes
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

BEFORE = "there before the recording"


class _AllocatedBlock(NamedTuple):
    """A block that was allocated; when it is freed is not known yet."""

    name: str
    category: Category
    num_bytes: int
    born: int
    stream: int


def recorded_timeline(history: History) -> Timeline:
    """What was allocated. Instant 0 is before the first event; every later instant follows an allocation.

    An entry has the requested bytes, rounded to 512; what a block keeps beyond them is in no entry. Memory that a kernel or
    a library allocated has the category WORKSPACES, everything else OTHER, as a recording does not say what a tensor is
    for.
    """
    made: list[_AllocatedBlock] = []
    dies: dict[int, int] = {}
    alive: dict[int, int] = {}
    for block in history.blocks:
        alive[block.address] = len(made)
        made.append(_AllocatedBlock(BEFORE, Category.OTHER, block_bytes(block.requested_bytes), 0, 0))
    instants, labels = [Phase.INIT], [BEFORE]
    for event, phase in zip(history.events, phases(history), strict=True):
        if event.action is Action.ALLOC:
            name = history.categories[event.category] if event.category >= 0 else "no frames"
            category = Category.WORKSPACES if is_hidden(name) else Category.OTHER
            alive[event.address] = len(made)
            made.append(_AllocatedBlock(name, category, block_bytes(event.num_bytes), len(instants), event.stream))
            instants.append(phase)
            labels.append(name)
        elif event.action in (Action.FREE, Action.LET_GO) and event.address in alive:
            dies[alive.pop(event.address)] = len(instants)
    if len(instants) > 1:
        instants[0] = instants[1]
    end = len(instants)
    entries = [
        Entry(one.name, one.category, one.num_bytes, one.born, dies.get(number, end), stream=min(one.stream, 127))
        for number, one in enumerate(made)
    ]
    return Timeline.from_entries(entries, instants, labels)
