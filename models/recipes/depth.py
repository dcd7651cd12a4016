"""Which layers of a network repeat, so that a short network can represent a deep one.

Layer i is its block (place 2i + 1) and the gap after it. A network of n layers is `prefix` layers, `unit` layers that
repeat, the same again, and the rest. A deeper one has more units. Its walk follows by copying the entries of the first
unit; a copied lifetime moves with the unit if the second unit's does, and stays if both units' do.
"""

from __future__ import annotations

from collections.abc import Callable
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

LONGEST_UNIT = 12
"""Most layers that may repeat together; the longest pattern of published hybrids is 10."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """`prefix` layers come before the units of `unit` layers that repeat. `moves`: for each entry of the short walk,
    whether the place where it dies moves with the place that it belongs to."""

    prefix: int
    unit: int
    moves: npt.NDArray[np.bool_]


def short_depth(walk: Walk) -> tuple[int, int, int] | None:
    """(number of layers of the shortest network that represents this deep one, prefix, unit); None if no shorter one
    does."""
    kinds = [_kind(walk, layer) for layer in range(walk.num_layers)]
    blocks = [tuple(walk.labels[one] for one in _stretches(walk, 2 * layer + 1)) for layer in range(walk.num_layers)]
    found = []
    for unit in range(1, min(LONGEST_UNIT, walk.num_layers // 3) + 1):
        same = [one == other for one, other in zip(kinds, kinds[unit:], strict=False)]
        for prefix in range(1, len(same)):  # the first layer differs, as its input comes from the embedding
            run = next((i for i, equal in enumerate(same[prefix:]) if not equal), len(same) - prefix)
            rest = walk.num_layers - prefix - run - unit + (run + unit) % unit
            rest += unit * (rest == 0)  # the last gap is the head, which cannot be copied
            layers = prefix + 2 * unit + rest
            # the last layers of a network with fewer must be of the kinds that the last ones of this one are
            if run >= unit and blocks[layers - rest : layers] == blocks[-rest:]:
                found.append((layers, prefix, unit))
    shortest = min(found, default=None)
    return shortest if shortest is not None and shortest[0] < walk.num_layers else None


def _kind(walk: Walk, layer: int) -> tuple[object, ...]:
    """What a layer does. Layers of one kind are equal in this, and so are their neighbours, which free what the layer
    passes on."""
    places = (2 * layer + 1, 2 * layer + 2) if layer < walk.num_layers - 1 else (2 * layer + 1,)
    stretches = [stretch for place in places for stretch in _stretches(walk, place)]
    own = np.flatnonzero(np.isin(walk.lives[PLACE], places))
    columns = np.stack([walk.categories, walk.raw_bytes, *walk.lives[[BORN, DIES, HANDED_ON]]])[:, own]
    return tuple(walk.labels[one] for one in stretches), tuple(walk.names[i] for i in own), columns.tobytes()


def _stretches(walk: Walk, place: int) -> list[int]:
    """The stretches of a place: (forward, backward)."""
    return [place, 2 * walk.num_places - 1 - place]


def repeats(walk: Walk, prefix: int, unit: int) -> Repeats | None:
    """How the first of two units of a short `walk` is copied; None if the two are not equal."""
    place, dies = walk.lives[PLACE], place_of(walk.lives[DIES_STRETCH], walk.num_places)
    shift = 2 * unit
    first, second = (_of_unit(place, prefix + index * unit, unit) for index in (0, 1))
    if len(first) != len(second) or any(walk.names[a] != walk.names[b] for a, b in zip(first, second, strict=True)):
        return None
    alike = [walk.categories, walk.raw_bytes, *walk.lives[[BORN, DIES, HANDED_ON]], walk.gradients]
    if any(not np.array_equal(column[first], column[second]) for column in alike):
        return None
    moved, stayed = dies[second] == dies[first] + shift, dies[second] == dies[first]
    if not (moved | stayed | (walk.lives[DIES_STRETCH][first] < 0)).all():
        return None
    moves = np.zeros(len(place), dtype=bool)
    moves[first], moves[second] = moved, moved
    return Repeats(prefix, unit, moves)


def _of_unit(place: Ints, start: int, unit: int) -> Ints:
    """Indices of the entries that belong to `unit` layers from `start` on."""
    return np.flatnonzero((place > 2 * start) & (place <= 2 * (start + unit)))


def place_of(stretches: Ints, num_places: int) -> Ints:
    """The place of each stretch; -1 stays -1."""
    return np.where(stretches < 0, -1, np.minimum(stretches, 2 * num_places - 1 - stretches))


@dataclass(frozen=True, slots=True)
class Deep:
    """A deeper network, in terms of a short one. `sources` [num_places]: for each place, the short walk's place; `entries`:
    for each entry, the short walk's entry; `lives`: as `Walk.lives`."""

    num_places: int
    sources: Ints
    entries: Ints
    lives: Ints


def deepened(walk: Walk, how: Repeats | None, layers: int) -> Deep:
    """`walk` with this number of layers. Raises: ValueError if no such network follows from `how`."""
    more, num_places = layers - walk.num_layers, 2 * layers + 1
    if more == 0:
        return Deep(num_places, np.arange(num_places), np.arange(len(walk.names)), walk.lives)
    if how is None or more < 0 or more % how.unit:
        raise ValueError(f"a walk of {walk.num_layers} layers has no {layers}")
    shift, copies = 2 * how.unit, more // how.unit
    ends = 2 * (how.prefix + how.unit)  # the last place of the first unit
    unit = np.arange(ends - shift + 1, ends + 1)
    sources = np.concatenate([np.arange(ends + 1), np.tile(unit, copies), np.arange(ends + 1, walk.num_places)])
    place = walk.lives[PLACE]
    first = _of_unit(place, how.prefix, how.unit)
    entries = np.concatenate([np.arange(len(place)), np.tile(first, copies)])
    offsets = np.concatenate(
        [np.where(place > ends, shift * copies, 0), np.repeat(np.arange(1, copies + 1) * shift, len(first))]
    )
    lives = walk.lives[:, entries].copy()
    lives[PLACE] += offsets
    lives[BORN_STRETCH] = _renumbered(lives[BORN_STRETCH], walk.num_places, num_places, lambda _: offsets)
    stays = ~how.moves[entries]

    def fate(place: Ints) -> Ints:
        """How far the place of death moves."""
        return np.where(stays, np.where(place > ends, shift * copies, 0), offsets)

    lives[DIES_STRETCH] = _renumbered(lives[DIES_STRETCH], walk.num_places, num_places, fate)
    copied = np.arange(len(entries)) >= len(place)

    def handed_on(place: Ints) -> Ints:
        """How far the place moves where a gradient goes to its parameter."""
        return np.where(copied, offsets, np.where(place > ends, shift * copies, 0))

    lives[HANDED_ON_STRETCH] = _renumbered(lives[HANDED_ON_STRETCH], walk.num_places, num_places, handed_on)
    return Deep(num_places, sources, entries, lives)


def _renumbered(stretches: Ints, before: int, after: int, by: Callable[[Ints], Ints]) -> Ints:
    """`stretches` of a network of `before` places in one of `after` places, with their places moved `by`."""
    place = place_of(stretches, before)
    place = place + by(place)
    return np.where(stretches < 0, stretches, np.where(stretches >= before, 2 * after - 1 - place, place))
