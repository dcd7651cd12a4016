"""Which layers of a network repeat, so that a short network can represent a deep one.

Layer i is its block (place 2i + 1) and the gap after it. A network of n layers is `prefix` layers, `unit` layers that
repeat, the same again, and the rest. A deeper one has more units. Its walk follows by copying the entries of the first
unit; a copied lifetime moves with the unit if the second unit's does, and stays if both units' do. An encoder-decoder is
two such stacks, equally deep, which grow together.
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
    """In each stack, `prefixes` of the network's layers come before the units of `unit` layers that repeat. `moves`: for
    each entry of the short walk, whether the place where it dies moves with the place that it belongs to."""

    prefixes: tuple[int, ...]
    unit: int
    moves: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Short:
    """The shortest network from whose walk a deep one's can be composed. `layers`: those of all stacks; `prefixes`, `unit`:
    as in `Repeats`."""

    layers: int
    prefixes: tuple[int, ...]
    unit: int


def short_depth(walk: Walk, told: Sequence[object] = ()) -> Short | None:
    """The fewest layers from whose walk the deep network's can be composed; None if all layers are needed. `told`: for each
    layer of a stack, what distinguishes it beyond its operations, such as its entry of `layer_types`."""
    deep = walk.num_layers // walk.stacks
    of_layer = [told[layer % deep] if told else None for layer in range(walk.num_layers)]
    kinds = [(_kind(walk, layer), of_layer[layer]) for layer in range(walk.num_layers)]
    own = [[walk.labels[one] for one in _stretches(walk, 2 * layer + 1)] for layer in range(walk.num_layers)]
    blocks = list(zip(own, of_layer, strict=True))
    stacks = [slice(first, first + deep) for first in range(0, walk.num_layers, deep)]
    for last_differs in (False, True):  # as it may in its backward, with which an accumulated gradient begins
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
    """(number of layers, prefix) of stacks that represent the one with these layers, the longest prefix first.
    `last_differs`: whether the last layer may be of a kind of its own."""
    same = [one == other for one, other in zip(kinds, kinds[unit:], strict=False)]
    for prefix in reversed(range(1, len(same))):  # the first layer differs, as its input comes from the embedding
        run = next((i for i, equal in enumerate(same[prefix:]) if not equal), len(same) - prefix)
        rest = len(kinds) - prefix - run - unit + (run + unit) % unit
        rest += unit * (rest == 0)  # the last gap is the head, which cannot be copied
        layers = prefix + 2 * unit + rest
        # the last layers of a network with fewer must be of the kinds that the last ones of this one are
        if run >= unit and _alike(blocks[layers - rest : layers], blocks[-rest:], last_differs):
            yield layers, prefix


def _alike(some: Sequence[object], others: Sequence[object], last_differs: bool) -> bool:
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
    """How the first of two units of each stack of a short `walk` is copied; None if two are not equal."""
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
    """A deeper network, in terms of a short one. `sources` [num_places]: for each place, the short walk's place; `places`
    [short places]: for each of those, the place that it has here; `entries`: for each entry, the short walk's entry;
    `lives`: as `Walk.lives`."""

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
        """How far a place of the short walk moves; an entry that lives on has none."""
        return np.where(place < 0, 0, (places - before)[place])

    lives[DIES_STRETCH] = _renumbered(
        lives[DIES_STRETCH], walk.num_places, num_places, lambda place: np.where(stays, own_offset(place), offset)
    )
    lives[HANDED_ON_STRETCH] = _renumbered(
        lives[HANDED_ON_STRETCH], walk.num_places, num_places, lambda place: np.where(copied, offset, own_offset(place))
    )
    return Deep(num_places, _sources(places, ends, shift, num_places), places, entry, lives)


def _sources(places: Ints, ends: Sequence[int], shift: int, num_places: int) -> Ints:
    """For each of `num_places` places, the place of the short walk that is at `places`, or whose copy it is: the units that
    end at `ends` are copied."""
    sources = np.full(num_places, -1, dtype=np.int64)
    sources[places] = np.arange(len(places))
    for end in ends:
        unit = np.arange(end - shift + 1, end + 1)
        copies = np.arange(places[end] + 1, num_places if end + 1 == len(places) else places[end + 1])
        sources[copies] = np.resize(unit, len(copies))
    return sources


def _renumbered(stretches: Ints, before: int, after: int, by: Callable[[Ints], Ints]) -> Ints:
    """`stretches` of a network of `before` places in one of `after` places, with their places moved `by`."""
    place = place_of(stretches, before)
    place = place + by(place)
    return np.where(stretches < 0, stretches, np.where(stretches >= before, 2 * after - 1 - place, place))


def deep_names(walk: Walk, deep: Deep) -> dict[str, str]:
    """The name of each block of the short `walk` -> the one that it has in the deep network."""
    places = enumerate(deep.places.tolist())
    return {block_name(place, walk.num_places): block_name(there, deep.num_places) for place, there in places}
