"""A loss that goes in chunks of tokens: a walk of few chunks gives that of many.

Each number of tokens runs another number of operations then. A loop runs the same operations once for each chunk, in
forward the first chunk first, in backward the last one. The short walk has `KEPT` chunks: the first, two that are alike,
and the last, which may have fewer tokens; more follow by copying the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peakcast.core.errors import CollectorError
from peakcast.models.recipes.walk import (
    BORN_AT,
    BORN_STRETCH,
    DIES_AT,
    DIES_STRETCH,
    HANDED_ON_AT,
    HANDED_ON_STRETCH,
    Ints,
    Visit,
    Walk,
)

KEPT = 4
"""Chunks of a short walk."""


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """How tokens are cut into chunks of `size`. `by_length`: along the sequences, whose last tokens are left out after
    that; else the rows of all sequences are, each without its last token."""

    size: int
    by_length: bool

    def number(self, batch: int, length: int) -> int:
        """The number of chunks of a micro-batch."""
        return -(-(length if self.by_length else batch * (length - 1)) // self.size)

    def ends_empty(self, length: int) -> bool:
        """Whether the last chunk has no row."""
        return self.by_length and length % self.size == 1


@dataclass(frozen=True, slots=True)
class Loop:
    """Operations that run once for each chunk, `unit` of them from the instant `start` of the last place's forward or
    `backward`."""

    backward: bool
    start: int
    unit: int

    def chunk_at(self, instant: int, number: int) -> int:
        """The chunk, of `number`, whose operation is at this instant; -1 if it is not in the loop."""
        turn = (instant - self.start) // self.unit
        return -1 if not 0 <= turn < number else number - 1 - turn if self.backward else turn

    def among(self, number: int, others: Sequence[Loop]) -> Loop:
        """The same loop where each of `others` before it has `number` more turns."""
        before = (other for other in others if other.backward == self.backward and other.start < self.start)
        return replace(self, start=self.start + number * sum(other.unit for other in before))


@dataclass(frozen=True)
class Chunking:
    """The chunks of a recipe: its walk has KEPT of them, in these loops."""

    rule: ChunkRule
    loops: tuple[Loop, ...]

    def covers(self, batch: int, length: int) -> bool:
        """Whether a micro-batch has enough chunks, with tokens in the last one."""
        return self.rule.number(batch, length) >= KEPT and not self.rule.ends_empty(length)

    def shortening(self, record: Callable[..., Walk]) -> Callable[..., Walk]:
        """`record` (as of `walked.Record`), whose walks have KEPT chunks. It raises CollectorError where they do not
        repeat."""

        def short(layers: int | None, batch: int, length: int, *rest: object) -> Walk:
            walk = shortened(record(layers, batch, length, *rest), self.loops, self.rule.number(batch, length))
            if walk is None:
                raise CollectorError("its chunks are not alike.")
            return walk

        return short


def loops_of(walk: Walk, number: int) -> tuple[Loop, ...]:
    """The loops of a walk of so many chunks, by their places in a walk of KEPT chunks."""
    found: list[Loop] = []
    for backward in (False, True):
        labels, start = walk.labels[_stretch(walk, backward)], 0
        while start < len(labels):
            units = range(1, (len(labels) - start) // number + 1)
            unit = next((one for one in units if _turns(labels[start:], one) == number), 0)
            if unit:
                found.append(Loop(backward, start, unit))
            start += number * unit or 1
    return tuple(loop.among(KEPT - number, found) for loop in found)


def _turns(labels: Sequence[str], unit: int) -> int:
    """How many times the first `unit` labels stand there, one time after the other."""
    alike = (one == other for one, other in zip(labels, labels[unit:], strict=False))
    return (next((i for i, same in enumerate(alike) if not same), len(labels) - unit) + unit) // unit


def shortened(walk: Walk, loops: Sequence[Loop], number: int) -> Walk | None:
    """`walk`, of `number` chunks, with KEPT of them; None if copies of the second do not make `walk` again. `loops`: as
    they stand with KEPT chunks."""
    own = [loop.among(number - KEPT, loops) for loop in loops]
    if number < KEPT or not _repeat(walk, own, number):
        return None
    chunk = _chunks(walk, own, number)
    stays = (chunk < 2) | (chunk >= number - 2)
    lives, labels, phases, visits = walk.lives[:, stays].copy(), list(walk.labels), list(walk.phases), list(walk.visits)
    for backward in (False, True):
        stretch = _stretch(walk, backward)
        those = [loop for loop in own if loop.backward == backward]
        kept = np.array([_is_kept(instant, those, number) for instant in range(len(walk.phases[stretch]))], dtype=bool)
        before = np.concatenate([[0], np.cumsum(kept)])
        for row, instants in ((BORN_STRETCH, BORN_AT), (DIES_STRETCH, DIES_AT), (HANDED_ON_STRETCH, HANDED_ON_AT)):
            here = lives[row] == stretch
            lives[instants, here] = before[lives[instants, here]]
        labels[stretch] = tuple(label for label, stay in zip(labels[stretch], kept, strict=True) if stay)
        phases[stretch] = bytes(phase for phase, stay in zip(phases[stretch], kept, strict=True) if stay)
        visits[stretch] = tuple(
            replace(visit, instant=int(before[visit.instant]))
            for visit, begun in _begun(walk.visits[stretch])
            if _is_kept(begun, those, number)
        )
    renumbered = np.cumsum(stays) - 1
    short = replace(
        walk,
        labels=tuple(labels),
        phases=tuple(phases),
        visits=tuple(visits),
        names=tuple(name for name, stay in zip(walk.names, stays, strict=True) if stay),
        categories=walk.categories[stays],
        raw_bytes=walk.raw_bytes[stays],
        gradients=walk.gradients[stays],
        lives=lives,
        returned=tuple(int(renumbered[entry]) for entry in walk.returned if stays[entry]),
    )
    again = lengthened(short, loops, number)
    return short if again is not None and _same(again[0], walk) else None


def _with_longer_stretches(walk: Walk, loops: Sequence[Loop], more: int, places: _Moved) -> Walk:
    """`walk` with the instants and visits of `more` turns of each loop; its entries are as before."""
    labels, phases, visits = list(walk.labels), list(walk.phases), list(walk.visits)
    for backward in (False, True):
        stretch = _stretch(walk, backward)
        order = _order(len(phases[stretch]), [loop for loop in loops if loop.backward == backward], more)
        labels[stretch] = tuple(labels[stretch][instant] for instant in order)
        phases[stretch] = bytes(phases[stretch][instant] for instant in order)
        visits[stretch] = tuple(_visits(visits[stretch], loops, backward, places))
    return replace(walk, labels=tuple(labels), phases=tuple(phases), visits=tuple(visits))


def lengthened(walk: Walk, loops: Sequence[Loop], number: int) -> tuple[Walk, Ints] | None:
    """(`walk`, which has KEPT chunks, with `number` of them; for each of its entries, the entry of `walk`); None if its
    second and third chunk are not alike."""
    more, chunk = number - KEPT, _chunks(walk, loops, KEPT)
    first, second = np.flatnonzero(chunk == 1), np.flatnonzero(chunk == 2)
    if [walk.names[entry] for entry in first] != [walk.names[entry] for entry in second]:
        return None
    follows = _following(walk, loops, first, second)
    if follows is None:
        return None
    entries = np.concatenate([np.arange(len(chunk)), np.tile(first, more)])
    copy = np.concatenate([np.zeros(len(chunk), dtype=np.int64), np.repeat(np.arange(1, more + 1), len(first))])
    lives, places = walk.lives[:, entries].copy(), _Moved(loops, more)
    for row, instants in ((BORN_STRETCH, BORN_AT), (DIES_STRETCH, DIES_AT), (HANDED_ON_STRETCH, HANDED_ON_AT)):
        forward, backward = lives[row] == _stretch(walk, False), lives[row] == _stretch(walk, True)
        for entry in np.flatnonzero(forward | backward).tolist():
            back, instant, source = bool(backward[entry]), int(lives[instants, entry]), int(entries[entry])
            within = follows.get(source) if row == DIES_STRETCH else None
            if row == BORN_STRETCH:
                within = _loop_at(loops, back, instant)
            lives[instants, entry] = places.of(back, instant, within, int(chunk[source]), int(copy[entry]))
    copies = {entry: np.flatnonzero(entries == entry).tolist() for entry in walk.returned}
    long = replace(
        _with_longer_stretches(walk, loops, more, places),
        names=tuple(walk.names[entry] for entry in entries),
        categories=walk.categories[entries],
        raw_bytes=walk.raw_bytes[entries],
        gradients=walk.gradients[entries],
        lives=lives,
        returned=tuple(one for entry in walk.returned for one in copies[entry]),
    )
    return long, entries


@dataclass(frozen=True, slots=True)
class _Moved:
    """Where instants of a walk of KEPT chunks are in one with `more`. Copies are in the middle of each loop."""

    loops: Sequence[Loop]
    more: int

    def of(self, backward: bool, instant: int, within: Loop | None = None, chunk: int = -1, copy: int = 0) -> int:
        """The instant in a stretch. `within`: the loop in which it moves with its chunk, which is `chunk` or the copy of it
        with this number."""
        moved = instant
        for loop in self.loops:
            if loop.backward == backward:
                beyond = instant >= loop.start + 2 * loop.unit
                if loop == within:
                    beyond = (chunk < 2) if backward else (chunk >= 2)
                    moved += copy * loop.unit * (-1 if backward else 1)
                moved += self.more * loop.unit * beyond
        return moved


def _following(walk: Walk, loops: Sequence[Loop], first: Ints, second: Ints) -> dict[int, Loop] | None:
    """For each entry of two chunks that follow each other, the loop in whose next turns they die; None if they die in some
    other way. Those that die at one instant are left out."""
    found: dict[int, Loop] = {}
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        stretch = walk.lives[DIES_STRETCH, one]
        if stretch != walk.lives[DIES_STRETCH, other]:
            return None
        early, late = sorted((int(walk.lives[DIES_AT, one]), int(walk.lives[DIES_AT, other])))
        if early == late:
            continue
        backward = bool(stretch == _stretch(walk, True))
        step = walk.lives[DIES_AT, other] - walk.lives[DIES_AT, one]
        fitting = (
            loop
            for loop in loops
            if loop.backward == backward
            and loop.start <= early < late <= loop.start + KEPT * loop.unit
            and step == (-loop.unit if backward else loop.unit)
        )
        loop = next(fitting, None)
        if loop is None:
            return None
        found[one] = found[other] = loop
    return found


def _chunks(walk: Walk, loops: Sequence[Loop], number: int) -> Ints:
    """The chunk of each entry of a walk of `number` chunks, -1 for others. What a step before left is in the order of its
    chunks."""
    found = np.full(len(walk.names), -1, dtype=np.int64)
    left = set()
    for entry in range(len(found)):
        for backward in (False, True):
            if walk.lives[BORN_STRETCH, entry] == _stretch(walk, backward):
                instant = int(walk.lives[BORN_AT, entry])
                those = (loop for loop in loops if loop.backward == backward)
                found[entry] = max((loop.chunk_at(instant, number) for loop in those), default=-1)
        if found[entry] >= 0 and walk.lives[DIES_STRETCH, entry] < 0:
            left.add(walk.names[entry])
    earlier = (walk.lives[BORN_STRETCH] < 0) & (walk.lives[BORN_AT] > 0)
    start = 0
    while start < len(found):
        end = start + 1
        while end < len(found) and walk.names[end] == walk.names[start] and _equal(walk.lives, start, end):
            end += 1
        if earlier[start] and walk.names[start] in left and end - start == number:
            found[start:end] = np.arange(number)
        start = end
    return found


def _equal(lives: Ints, one: int, other: int) -> bool:
    return bool((lives[:, one] == lives[:, other]).all())


def _repeat(walk: Walk, loops: Sequence[Loop], number: int) -> bool:
    """Whether the labels of `walk` are those of loops with `number` turns."""
    return all(
        len(labels := walk.labels[_stretch(walk, loop.backward)][loop.start : loop.start + number * loop.unit])
        == number * loop.unit
        and _turns(labels, loop.unit) == number
        for loop in loops
    )


def _stretch(walk: Walk, backward: bool) -> int:
    """The stretch of the last place."""
    return walk.num_places - 1 + backward


def _loop_at(loops: Sequence[Loop], backward: bool, instant: int) -> Loop | None:
    """The loop of KEPT chunks that an instant belongs to."""
    return next((loop for loop in loops if loop.backward == backward and loop.chunk_at(instant, KEPT) >= 0), None)


def _is_kept(instant: int, loops: Sequence[Loop], number: int) -> bool:
    """Whether an instant of a walk of `number` chunks is in one of KEPT chunks too."""
    return not any(2 <= loop.chunk_at(instant, number) < number - 2 for loop in loops)


def _order(count: int, loops: Sequence[Loop], more: int) -> list[int]:
    """For each instant with `more` chunks, the instant of a stretch of `count` that it is or copies."""
    order: list[int] = []
    for instant in range(count + 1):
        for loop in loops:
            if instant == loop.start + 2 * loop.unit:
                copied = instant if loop.backward else instant - loop.unit
                order += [*range(copied, copied + loop.unit)] * more
        order += [instant] if instant < count else []
    return order


def _begun(visits: Sequence[Visit]) -> Iterator[tuple[Visit, int]]:
    """Each visit, with the instant at which its module was entered."""
    entered: list[tuple[tuple[str, str], int]] = []
    for visit in visits:
        key = (visit.runs, visit.module)
        if visit.enters:
            entered.append((key, visit.instant))
            yield visit, visit.instant
        else:
            at = next((i for i in reversed(range(len(entered))) if entered[i][0] == key), None)
            yield visit, visit.instant if at is None else entered.pop(at)[1]


def _visits(visits: Sequence[Visit], loops: Sequence[Loop], backward: bool, places: _Moved) -> Iterator[Visit]:
    """The visits of a stretch with more chunks: those of the second chunk's turn also for each copy."""
    turn: list[tuple[Visit, Loop]] = []

    def turns() -> Iterator[Visit]:
        copies = range(places.more + 1) if turn else ()
        for copy in reversed(copies) if backward else copies:
            for visit, loop in turn:
                yield replace(visit, instant=places.of(backward, visit.instant, loop, 1, copy))
        turn.clear()

    for visit, begun in _begun(visits):
        loop = _loop_at(loops, backward, begun)
        chunk = loop.chunk_at(begun, KEPT) if loop else -1
        if loop and chunk == 1:
            if turn and turn[0][1] != loop:
                yield from turns()
            turn.append((visit, loop))
            continue
        yield from turns()
        yield replace(visit, instant=places.of(backward, visit.instant, loop, chunk))
    yield from turns()


def _same(one: Walk, other: Walk) -> bool:
    """Whether two walks have the same operations and tensors, in whichever order these are listed."""
    ours, theirs = (np.vstack([walk.lives, walk.raw_bytes, walk.categories, walk.gradients]) for walk in (one, other))
    return (
        (one.labels, one.phases, one.visits) == (other.labels, other.phases, other.visits)
        and sorted(one.names) == sorted(other.names)
        and np.array_equal(ours[:, np.lexsort(ours)], theirs[:, np.lexsort(theirs)])
    )
