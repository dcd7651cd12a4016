"""`Kind`: all networks for which one recipe stands, since they differ in widths, depth and other numbers alone.

What changes a size is found by walks in which one number of the configuration is another, and confirmed by walks in which
all are (`generalising.py`). What is no number, or changes which operations run, stays as recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peakcast.dialects.layer_count import with_layers
from peakcast.models.recipes.conditions import Conditions, conditions
from peakcast.models.recipes.recipe import Recipe
from peakcast.models.recipes.walk import Ints, Walk
from peakcast.models.recipes.widths import Widths
from peakcast.spec import TrainingJob


@dataclass(frozen=True)
class Kind:
    """Networks like the recorded one, which has `conditions`. Layers are counted as its configuration does."""

    conditions: Conditions
    """At the recorded depth."""
    defaults: Conditions
    """What the library takes where a configuration says nothing."""
    layers: int
    """That were recorded."""
    prefix: int
    """Layers before those that repeat."""
    unit: int
    """Layers that repeat together; 0: none do, and the depth is as recorded."""
    idle: tuple[str, ...]
    """Numbers that change nothing, as long as they are there: a dropout of 0 and no soft cap run other operations."""
    same_as: Mapping[str, str]
    """Numbers that have to be equal to others, which are keys of `widths`."""
    widths: Widths
    confirmed: Ints
    """[num_walks, num_keys]: the values of `widths.keys` that were walked."""

    def values(self, job: TrainingJob) -> list[int] | None:
        """The values of `widths.keys` in the job's network; None where that is of another kind."""
        order = self._layers_of(job.architecture.num_hidden_layers)
        if order is None:
            return None
        asked = conditions(job.replace(architecture=with_layers(job.architecture, self.layers)), self.defaults)
        if any(asked.get(name) != asked.get(leader) for name, leader in self.same_as.items()):
            return None
        if not all(_is_number_like(asked.get(name), self.conditions.get(name)) for name in self.idle):
            return None
        values = [asked.get(key) for key in self.widths.keys]
        if self._fixed(asked) != self._fixed(self.conditions) or not self._confirms(values):
            return None
        deep = conditions(job, self.defaults)
        for name, short in self.conditions.items():
            of_layers = isinstance(short, list) and len(short) == self.layers < len(order)
            if of_layers and deep.get(name) not in (short, [short[layer] for layer in order]):
                return None
        return [int(value) for value in values if value is not None]

    def _layers_of(self, layers: int) -> list[int] | None:
        """For each of `layers` layers the recorded one that it is like; None where there cannot be so many."""
        more, ends = layers - self.layers, self.prefix + self.unit
        if more < 0 or (more and (not self.unit or more % self.unit)):
            return None
        repeated = [*range(self.prefix, ends)] * (more // self.unit if more else 0)
        return [*range(ends), *repeated, *range(ends, self.layers)]

    def _fixed(self, asked: Conditions) -> dict[str, object]:
        """What has to be as recorded."""
        free = {*self.widths.keys, *self.idle, *self.same_as}
        return {name: value for name, value in asked.items() if name not in free}

    def _confirms(self, values: Sequence[object]) -> bool:
        """Whether values lie between walked ones, as even as those, and are equal to one another where walked ones were."""
        if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            return False
        asked = np.array(values, dtype=np.int64)
        if (asked < self.confirmed.min(axis=0)).any() or (asked > self.confirmed.max(axis=0)).any():
            return False
        if (_twos(asked) < _twos(self.confirmed).min(axis=0)).any():
            return False
        equal = self.confirmed[:, :, None] == self.confirmed[:, None, :]
        own = asked[:, None] == asked[None, :]
        return bool((equal == own).any(axis=0).all())


def with_values(recipe: Recipe, widths: Widths, values: Sequence[int], layers: int) -> Recipe:
    """`recipe` of a network with these values of `widths.keys` and so many blocks. Raises: ValueError where none is."""
    walk, sizes = recipe.walk, recipe.sizes
    num_entries = len(walk.names)
    sides = [side for _, _, shape, _, _ in walk.parameters for side in shape]
    columns = np.ones((len(sizes.coefficients), num_entries + len(sides)), dtype=np.int64)
    columns[:, :num_entries], columns[:, num_entries:] = sizes.coefficients, sides
    scaled = widths.scaled(columns, values)
    rest = iter(scaled[0, num_entries:].tolist())
    parameters = tuple(
        (m, n, tuple(next(rest) for _ in shape), size, trains) for m, n, shape, size, trains in walk.parameters
    )
    return replace(
        recipe,
        walk=replace(walk, parameters=parameters),
        sizes=replace(sizes, coefficients=scaled[:, :num_entries]),
        layers=layers,
    )


def numbers_of(walk: Walk, num_bytes: Ints) -> Ints:
    """What widths explain: the bytes of every tensor, and then the sides of every weight."""
    sides = [side for _, _, shape, _, _ in walk.parameters for side in shape]
    return np.array([*num_bytes.tolist(), *sides], dtype=np.int64)


def _is_number_like(value: object, recorded: object) -> bool:
    """Whether a number that changes nothing is one as that which was recorded: neither missing nor 0, nor 1 of a count."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value:
        return False
    return isinstance(recorded, float) or value > 1


def _twos(values: Ints) -> Ints:
    """The largest power of two that divides each value."""
    return values & -values
