"""Which layers of a network repeat, so that the walk of a short network gives that of a deep one.

A layer takes two places: its block (layer i: place 2i + 1) and the gap after it. The short network has `prefix` layers that
differ, then two equal units of `unit` layers each, then the rest. A deeper network has more units in the middle, and its
walk follows from the short one's: the entries of the first unit are copied. An entry may die outside its unit: if those of
both units die at the same place, so do all copies; if the second unit's dies one unit after the first's, each copy dies one
unit later again. An encoder-decoder is two such stacks, equally deep, which grow together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peakcast.models.recipes.walk import (
    BORN,
    BORN_STRETCH,
    DIES,
    DIES_STRETCH,
    HANDED_ON,
    HANDED_ON_STRETCH,
    PLACE,
    Ints,
    Walk,
)
from peakcast.timelines.places import block_name

LONGEST_UNIT = 12
"""Most layers that may repeat together; the longest pattern of published hybrids is 10."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """How the layers of a short network repeat. `prefixes`: for each stack, the number of layers of the network before its
    first unit; `unit`: layers in a unit; `moves`: for each entry of the short walk, whether the place where it dies moves
    together with the place that it belongs to."""

    prefixes: tuple[int, ...]
    unit: int
    moves: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Short:
    """The shortest network whose walk gives a deep one's. `layers`: the number of all stacks' layers together; `prefixes`,
    `unit`: as in `Repeats`."""

    layers: int
    prefixes: tuple[int, ...]
    unit: int


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
            return Short(shortest[0] * walk.stacks, *shortest[1:])
    return None


def _options(
    kinds: Sequence[object], blocks: Sequence[object], unit: int, last_differs: bool
) -> Iterator[tuple[int, int]]:
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
    """A key that is equal for layers with equal operations and tensors, the gap to the next layer included, where tensors
    that a layer hands on are freed."""
    places = (2 * layer + 1, 2 * layer + 2) if layer < walk.num_layers - 1 else (2 * layer + 1,)
    stretches = [stretch for place in places for stretch in _stretches(walk, place)]
    own = np.flatnonzero(np.isin(walk.lives[PLACE], places))
    columns = np.stack([walk.categories, walk.raw_bytes, *walk.lives[[BORN, DIES, HANDED_ON]]])[:, own]
    return tuple(walk.labels[one] for one in stretches), tuple(walk.names[i] for i in own), columns.tobytes()


def _stretches(walk: Walk, place: int) -> list[int]:
    """The stretches of a place: (forward, backward)."""
    return [place, 2 * walk.num_places - 1 - place]


def repeats(walk: Walk, prefixes: Sequence[int], unit: int) -> Repeats | None:
    """How the units of a short `walk` repeat; None if the two units of a stack are not equal."""
    dies = place_of(walk.lives[DIES_STRETCH], walk.num_places)
    moves = np.zeros(len(dies), dtype=bool)
    for prefix in prefixes:
        first, second = (_of_unit(walk.lives[PLACE], prefix + index * unit, unit) for index in (0, 1))
        if len(first) != len(second) or any(walk.names[a] != walk.names[b] for a, b in zip(first, second, strict=True)):
            return None
        alike = [walk.categories, walk.raw_bytes, *walk.lives[[BORN, DIES, HANDED_ON]], walk.gradients]
        if any(not np.array_equal(column[first], column[second]) for column in alike):
            return None
        moved, stayed = dies[second] == dies[first] + 2 * unit, dies[second] == dies[first]
        if not (moved | stayed | (walk.lives[DIES_STRETCH][first] < 0)).all():
            return None
        moves[first], moves[second] = moved, moved
    return Repeats(tuple(prefixes), unit, moves)


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


def deepened(walk: Walk, how: Repeats | None, layers: int) -> Deep:
    """`walk` with this number of layers. Raises: ValueError if no such network follows from `how`."""
    more, num_places, before = layers - walk.num_layers, 2 * layers + 1, np.arange(walk.num_places)
    if more == 0:
        return Deep(num_places, before, before, np.arange(len(walk.names)), walk.lives)
    if how is None or more < 0 or more % (how.unit * len(how.prefixes)):
        raise ValueError(f"a walk of {walk.num_layers} layers has no {layers}")
    shift, copies = 2 * how.unit, more // how.unit // len(how.prefixes)
    ends = [2 * (prefix + how.unit) for prefix in how.prefixes]  # the last place of each first unit
    places = before + sum(np.where(before > end, shift * copies, 0) for end in ends)
    place = walk.lives[PLACE]
    entries, offsets = [np.arange(len(place))], [(places - before)[place]]
    for prefix in how.prefixes:
        own = _of_unit(place, prefix, how.unit)
        entries.append(np.tile(own, copies))
        beyond = np.repeat(np.arange(1, copies + 1) * shift, len(own))
        offsets.append(np.tile((places - before)[place[own]], copies) + beyond)
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
    return Deep(num_places, _sources(places, ends, shift, num_places), places, entry, lives)


def _sources(places: Ints, ends: Sequence[int], shift: int, num_places: int) -> Ints:
    """For each of `num_places` places of the deep network, the place of the short walk that it is, as `places` says, or
    that it copies: the units that end at the short walk's places `ends` are copied."""
    sources = np.full(num_places, -1, dtype=np.int64)
    sources[places] = np.arange(len(places))
    for end in ends:
        unit = np.arange(end - shift + 1, end + 1)
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
