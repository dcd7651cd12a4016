"""Which layers of a network repeat, so that the walk of a short network gives that of a deep one.

A layer takes two places: its block (layer i: place 2i + 1) and the gap after it. The short network has two equal units of
`unit` layers each, after the `prefix` layers before them; the deep network has more of these units, and its walk follows by
copying the entries of the first unit. An entry may die outside its unit: if those of both units die at one place, so do all
copies; if the second unit's dies one unit after the first's, each copy dies one unit later again. An encoder-decoder is two
such stacks, equally deep, which grow together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from peakcast.models.recipes.walk import (
    BORN_AT,
    BORN_STRETCH,
    DIES_AT,
    DIES_STRETCH,
    HANDED_ON_AT,
    HANDED_ON_STRETCH,
    PLACE,
    Ints,
    Walk,
)
from peakcast.timelines.places import block_name

LONGEST_UNIT = 12
"""Most layers that may repeat together; the longest pattern of published hybrids is 10."""


@dataclass(frozen=True, slots=True)
class Run:
    """Layers that repeat: `prefix` layers of the network come before the units of `unit` layers."""

    prefix: int
    unit: int


@dataclass(frozen=True, slots=True)
class Repeats:
    """A short walk has two units of each of these `runs`, in order. `moves`: for each entry of the walk, whether the place
    where it dies moves with the place that it belongs to."""

    runs: tuple[Run, ...]
    moves: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Short:
    """The shortest network from whose walk a deep one's can be composed. `layers`: those of all stacks; `runs`: one in each
    stack."""

    layers: int
    runs: tuple[Run, ...]


def short_depth(walk: Walk, told: Sequence[object] = ()) -> Short | None:
    """The shortest network whose walk gives that of the deep network with this `walk`; None if all layers are needed.
    `told`: for each layer of a stack, what distinguishes it besides its operations, such as its entry of `layer_types`."""
    deep = walk.num_layers // walk.stacks
    of_layer = [told[layer % deep] if told else None for layer in range(walk.num_layers)]
    kinds = [(_kind(walk, layer), of_layer[layer]) for layer in range(walk.num_layers)]
    own = [[walk.labels[one] for one in _stretches(walk, 2 * layer + 1)] for layer in range(walk.num_layers)]
    blocks = list(zip(own, of_layer, strict=True))
    stacks = [slice(first, first + deep) for first in range(0, walk.num_layers, deep)]
    for last_differs in (False, True):  # in its backward, which runs first and so may begin a sum of gradients
        found = []
        for unit in range(1, min(LONGEST_UNIT, deep // 3) + 1):
            options = [dict(_options(kinds[stack], blocks[stack], unit, last_differs)) for stack in stacks]
            for layers in set.intersection(*map(set, options)):
                prefixes = tuple(index * layers + one[layers] for index, one in enumerate(options))
                found.append((layers, prefixes, unit))
        shortest = min(found, default=None)
        if shortest is not None and shortest[0] < deep:
            layers, prefixes, unit = shortest
            return Short(layers * walk.stacks, tuple(Run(prefix, unit) for prefix in prefixes))
    return None


def _options(kinds: Sequence[object], blocks: Sequence[object], unit: int, last_differs: bool) -> Iterator[tuple[int, int]]:
    """(number of layers, prefix) of the short stacks whose walk gives that of the stack with these layers, the longest
    prefix first. `last_differs`: whether the last layer may be of a kind of its own."""
    same = [one == other for one, other in zip(kinds, kinds[unit:], strict=False)]
    for prefix in reversed(range(1, len(same))):  # the first layer differs, as its input comes from the embedding
        run = next((i for i, equal in enumerate(same[prefix:]) if not equal), len(same) - prefix)
        rest = len(kinds) - prefix - run - unit + (run + unit) % unit
        rest += unit * (rest == 0)  # the last gap is the head, which cannot be copied
        layers = prefix + 2 * unit + rest
        # the short network's last layers must be of the same kinds as those of the deep one
        if run >= unit and _alike(blocks[layers - rest : layers], blocks[-rest:], last_differs):
            yield layers, prefix


def _alike(some: Sequence[object], others: Sequence[object], last_differs: bool) -> bool:
    """Whether two runs of layers are equal, if `last_differs` but for the last layer of each."""
    return some[:-1] == others[:-1] and (last_differs or some[-1:] == others[-1:])


def _kind(walk: Walk, layer: int) -> tuple[object, ...]:
    """A key that is equal for layers with equal operations and tensors, the gap to the next layer included, in which
    tensors that a layer returns are freed."""
    places = (2 * layer + 1, 2 * layer + 2) if layer < walk.num_layers - 1 else (2 * layer + 1,)
    stretches = [stretch for place in places for stretch in _stretches(walk, place)]
    own = np.flatnonzero(np.isin(walk.lives[PLACE], places))
    columns = np.stack([walk.categories, walk.raw_bytes, *walk.lives[[BORN_AT, DIES_AT, HANDED_ON_AT]]])[:, own]
    return tuple(walk.labels[one] for one in stretches), tuple(walk.names[i] for i in own), columns.tobytes()


def _stretches(walk: Walk, place: int) -> list[int]:
    """The stretches of a place: (forward, backward)."""
    return [place, 2 * walk.num_places - 1 - place]


@dataclass(frozen=True, slots=True)
class Thinned:
    """A network without some of its layers. `skipped`: their numbers; `runs`, `copies`: what is left of each run of layers
    that repeat, and how many units of it were taken out."""

    skipped: tuple[int, ...]
    runs: tuple[Run, ...]
    copies: tuple[int, ...]


def thinned(walk: Walk) -> Thinned:
    """The network of `walk` with two units of each run of three or more, so that as few layers as possible are left."""
    kinds = [(walk.kinds[layer], _kind(walk, layer)) for layer in range(walk.num_layers)]
    own = [_of_unit(walk.lives[PLACE], layer, 1) for layer in range(walk.num_layers)]
    dies = place_of(walk.lives[DIES_STRETCH], walk.num_places)

    @cache
    def repeats_in(layer: int, unit: int) -> bool:
        """Whether the layer `unit` layers later is a copy of it."""
        if kinds[layer] != kinds[layer + unit]:
            return False
        distance = dies[own[layer + unit]] - dies[own[layer]]
        return bool(((distance == 2 * unit) | (distance == 0) | (dies[own[layer]] < 0)).all())

    left: list[tuple[int, int, tuple[int, int]]] = [(0, 0, (1, 1))]
    """From each layer on, the last one first: (layers that stay, runs, what begins there as (unit, number of units))."""
    for start in reversed(range(walk.num_layers)):
        options = []
        for unit, units in [(1, 1), *_units_from(repeats_in, start, walk.num_layers)]:
            after = left[walk.num_layers - start - unit * units]
            options.append((after[0] + unit * min(2, units), after[1] + (units > 1), (unit, units)))
        left.append(min(options))
    skipped: list[int] = []
    runs, copies, start = [], [], 0
    while start < walk.num_layers:
        unit, units = left[walk.num_layers - start][2]
        if units > 1:
            runs.append(Run(start - len(skipped), unit))
            copies.append(units - 2)
            skipped += range(start + 2 * unit, start + unit * units)
        start += unit * units
    return Thinned(tuple(skipped), tuple(runs), tuple(copies))


def _units_from(repeats_in: Callable[[int, int], bool], start: int, layers: int) -> Iterator[tuple[int, int]]:
    """(unit, number of units) of every run of three units or more that begins at `start`. `repeats_in`: whether a layer is
    repeated so many layers later."""
    for unit in range(1, min(LONGEST_UNIT, (layers - start) // 3) + 1):
        unlike = (layer for layer in range(start, layers - unit) if not repeats_in(layer, unit))
        alike = next(unlike, layers - unit) - start
        yield from ((unit, units) for units in range(3, alike // unit + 2))


def repeats(walk: Walk, runs: Sequence[Run]) -> Repeats | None:
    """How the first of two units of each run of a short `walk` is copied; None if there is none, or two
    units are not equal."""
    dies = place_of(walk.lives[DIES_STRETCH], walk.num_places)
    moves = np.zeros(len(dies), dtype=bool)
    for run in runs:
        first, second = (_of_unit(walk.lives[PLACE], run.prefix + start, run.unit) for start in (0, run.unit))
        if len(first) != len(second) or any(walk.names[a] != walk.names[b] for a, b in zip(first, second, strict=True)):
            return None
        alike = [walk.categories, walk.raw_bytes, *walk.lives[[BORN_AT, DIES_AT, HANDED_ON_AT]], walk.gradients]
        if any(not np.array_equal(column[first], column[second]) for column in alike):
            return None
        moved, stayed = dies[second] == dies[first] + 2 * run.unit, dies[second] == dies[first]
        if not (moved | stayed | (walk.lives[DIES_STRETCH][first] < 0)).all():
            return None
        moves[first], moves[second] = moved, moved
    return Repeats(tuple(runs), moves) if runs else None


def _of_unit(place: Ints, start: int, unit: int) -> Ints:
    """Indices of the entries that belong to `unit` layers from `start` on."""
    return np.flatnonzero((place > 2 * start) & (place <= 2 * (start + unit)))


def place_of(stretches: Ints, num_places: int) -> Ints:
    """The place of each stretch; -1 stays -1."""
    return np.where(stretches < 0, -1, np.minimum(stretches, 2 * num_places - 1 - stretches))


@dataclass(frozen=True, slots=True)
class Deep:
    """A deep network in terms of a short one. `sources` [num_places]: for each of its places, the place of the short walk
    that it is or copies; `places` [places of the short walk]: where each of those is in the deep network; `entries`: for
    each of its entries, the entry of the short walk; `lives`: as `Walk.lives`."""

    num_places: int
    sources: Ints
    places: Ints
    entries: Ints
    lives: Ints


def deepened(walk: Walk, how: Repeats | None, copies: Sequence[int]) -> Deep:
    """`walk` with so many more units of each run of `how`."""
    before = np.arange(walk.num_places)
    runs = [(run, more) for run, more in zip(how.runs if how else (), copies, strict=True) if more]
    if how is None or not runs:
        return Deep(walk.num_places, before, before, np.arange(len(walk.names)), walk.lives)
    ends = [2 * (run.prefix + run.unit) for run, _ in runs]  # the last place of each first unit
    added = [2 * run.unit * more for run, more in runs]
    places = before + sum(np.where(before > end, more, 0) for end, more in zip(ends, added, strict=True))
    num_places = walk.num_places + sum(added)
    place = walk.lives[PLACE]
    entries, offsets = [np.arange(len(place))], [(places - before)[place]]
    for run, more in runs:
        own = _of_unit(place, run.prefix, run.unit)
        entries.append(np.tile(own, more))
        beyond = np.repeat(np.arange(1, more + 1) * 2 * run.unit, len(own))
        offsets.append(np.tile((places - before)[place[own]], more) + beyond)
    entry, offset = np.concatenate(entries), np.concatenate(offsets)
    lives = walk.lives[:, entry].copy()
    lives[PLACE] += offset
    lives[BORN_STRETCH] = _renumbered(lives[BORN_STRETCH], walk.num_places, num_places, lambda _: offset)
    stays, copied = ~how.moves[entry], np.arange(len(entry)) >= len(place)

    def own_offset(place: Ints) -> Ints:
        """How far a place of the short walk moves; 0 for the -1 of an entry that does not die."""
        return np.where(place < 0, 0, (places - before)[place])

    lives[DIES_STRETCH] = _renumbered(
        lives[DIES_STRETCH], walk.num_places, num_places, lambda place: np.where(stays, own_offset(place), offset)
    )
    lives[HANDED_ON_STRETCH] = _renumbered(
        lives[HANDED_ON_STRETCH], walk.num_places, num_places, lambda place: np.where(copied, offset, own_offset(place))
    )
    return Deep(num_places, _sources(places, [run for run, _ in runs], num_places), places, entry, lives)


def _sources(places: Ints, runs: Sequence[Run], num_places: int) -> Ints:
    """For each of `num_places` places of the deep network, the place of the short walk that it is, as `places` says, or
    that it copies: the first unit of each run is copied."""
    sources = np.full(num_places, -1, dtype=np.int64)
    sources[places] = np.arange(len(places))
    for run in runs:
        end = 2 * (run.prefix + run.unit)
        unit = np.arange(end - 2 * run.unit + 1, end + 1)
        copies = np.arange(places[end] + 1, num_places if end + 1 == len(places) else places[end + 1])
        sources[copies] = np.resize(unit, len(copies))
    return sources


def _renumbered(stretches: Ints, before: int, after: int, by: Callable[[Ints], Ints]) -> Ints:
    """`stretches` of a network of `before` places, numbered for one of `after` places; `by` says how far a place moves."""
    place = place_of(stretches, before)
    place = place + by(place)
    return np.where(stretches < 0, stretches, np.where(stretches >= before, 2 * after - 1 - place, place))


def deep_names(walk: Walk, deep: Deep) -> dict[str, str]:
    """The name of each block of the short `walk` -> the one that it has in the deep network."""
    places = enumerate(deep.places.tolist())
    return {block_name(place, walk.num_places): block_name(there, deep.num_places) for place, there in places}
