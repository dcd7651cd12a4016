"""`NetworkKind`: all networks that one recipe represents, because they differ only in widths, depth and other numbers.

Walks in which one number of the configuration is changed show what it does to sizes; walks in which all are changed confirm
it (`generalising.py`). What is not a number, or changes which operations run, must be as recorded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peakcast.dialects.common.network_values import NETWORK_PREFIX
from peakcast.jobs.spec import TrainingJob
from peakcast.models.recipes.conditions import Conditions, conditions
from peakcast.models.recipes.recipe import EVEN, Recipe
from peakcast.models.recipes.walk import Ints, Walk
from peakcast.models.recipes.widths import Widths
from peakcast.networks.layer_count import OF_DECODER, depths, equally_deep, with_layers

HIDDEN = re.compile(r"hidden_size|d_model|n_embd|dim")
HEADS = re.compile(r"num_(attention_)?heads|n_heads?|\w*encoder_attention_heads|\w*decoder_attention_heads")
"""Names of a network's width and of its numbers of heads."""
NUMBERED = re.compile(r"\w*(idxs|indices|layer_ids|only_layers)")
"""Names of lists with the numbers of the layers of one kind."""


@dataclass(frozen=True)
class NetworkKind:
    """All networks that one recipe represents: how they may differ from the recorded network. Layers are counted as
    `num_hidden_layers` counts them."""

    conditions: Conditions
    """Those of the recorded network, at the recorded depth."""
    defaults: Conditions
    """The library's defaults, for what a configuration does not say."""
    layers: int
    """Number of layers that were recorded, of each stack."""
    prefix: int
    """Number of layers of the (first) stack before those that repeat."""
    unit: int
    """Number of layers that repeat together; 0: none do, so the depth must be as recorded."""
    idle: tuple[str, ...]
    """Numbers that change nothing as long as they are present: a dropout of 0, or no soft cap, runs other operations."""
    same_as: Mapping[str, str]
    """Numbers that must equal others: name -> a key of `widths`."""
    widths: Widths
    confirmed: Ints
    """[num_walks, num_keys]: the values of `widths.keys` in the walks."""
    read: frozenset[str] = frozenset()
    """Names of values that the library's code reads from a configuration; empty if that is not known."""

    def values(self, job: TrainingJob) -> list[int] | None:
        """The values of `widths.keys` in the job's network; None if the network is of another kind."""
        job, decoder = self._equally_deep(job)
        order = self._layers_of(job.architecture.num_hidden_layers)
        if order is None or self._layers_of(decoder) is None:
            return None
        asked = self._conditions(job.replace(architecture=with_layers(job.architecture, self.layers)))
        if any(asked.get(name) != asked.get(leader) for name, leader in self.same_as.items()):
            return None
        if not all(_is_number_like(asked.get(name), self.conditions.get(name)) for name in self.idle):
            return None
        values = [asked.get(key) for key in self.widths.keys]
        if self._fixed(asked) != self._fixed(self.conditions) or not self._confirms(values):
            return None
        even = decoder == job.architecture.num_hidden_layers
        if not self._repeats(self._conditions(job), order, even=even):
            return None
        return [int(value) for value in values if value is not None]

    def _repeats(self, deep: Conditions, order: Sequence[int], *, even: bool) -> bool:
        """Whether the conditions `deep` say about each layer what the recorded network's say about the layer of which it is
        a copy (`order`). `even`: both stacks are equally deep."""
        for name, short in self.conditions.items():
            if not isinstance(short, list) or len(order) == self.layers:
                continue
            if NUMBERED.fullmatch(name.rpartition(".")[2]):
                told, fits = [number for number, layer in enumerate(order) if layer in short], False
            elif len(short) == self.layers:
                told, fits = [short[layer] for layer in order], deep.get(name) == short
            else:
                continue
            if not fits and (not even or deep.get(name) != told):
                return False
        return True

    def _equally_deep(self, job: TrainingJob) -> tuple[TrainingJob, int]:
        """(`job`, with a decoder as deep as its encoder if those of the recorded network are equally deep, the number of
        layers of its decoder)."""
        encoder, decoder = depths(job.architecture)
        if encoder == decoder or any(NETWORK_PREFIX + name in self.conditions for name in OF_DECODER):
            return job, encoder
        return job.replace(architecture=equally_deep(job.architecture)), decoder

    def otherwise(self, job: TrainingJob) -> dict[str, object]:
        """What is fixed for networks of this kind and is another in `job`: name -> the recorded value (None: not given)."""
        job, _ = self._equally_deep(job)
        asked = self._conditions(job.replace(architecture=with_layers(job.architecture, self.layers)))
        ours, theirs = self._fixed(self.conditions), self._fixed(asked)
        return {name: ours.get(name) for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)}

    def _conditions(self, job: TrainingJob) -> Conditions:
        return conditions(job, self.defaults, self.read)

    def _layers_of(self, layers: int) -> list[int] | None:
        """For each layer of a network with `layers` layers, the index of the recorded layer that it is a copy of; None if
        that depth cannot be composed of the recorded layers."""
        more, ends = layers - self.layers, self.prefix + self.unit
        if more < 0 or (more and (not self.unit or more % self.unit)):
            return None
        repeated = [*range(self.prefix, ends)] * (more // self.unit if more else 0)
        return [*range(ends), *repeated, *range(ends, self.layers)]

    def _fixed(self, asked: Conditions) -> dict[str, object]:
        """The conditions that must be as recorded."""
        free = {*self.widths.keys, *self.idle, *self.same_as}
        return {name: value for name, value in asked.items() if name not in free}

    def _confirms(self, values: Sequence[object]) -> bool:
        """Whether values are between those of walks, divisible by at least the same powers of two, and equal to each other
        where those of a walk were."""
        if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            return False
        asked = np.array(values, dtype=np.int64)
        if (asked < self.confirmed.min(axis=0)).any() or (asked > self.confirmed.max(axis=0)).any():
            return False
        if (_powers_of_two(asked) < _powers_of_two(self.confirmed).min(axis=0)).any():
            return False
        if self._pads_heads(asked):
            return False
        equal = self.confirmed[:, :, None] == self.confirmed[:, None, :]
        own = asked[:, None] == asked[None, :]
        return bool((equal == own).any(axis=0).all())

    def _pads_heads(self, asked: Ints) -> bool:
        """Whether the width of a head, which follows from that of the network, is no multiple of `EVEN` although it was in
        every walk: attention's kernels pad such heads, with operations that no walk has (attention.py `_flash`)."""
        names = [key.rpartition(".")[2] for key in self.widths.keys]
        if any(name.endswith("head_dim") for name in names):
            return False
        hidden = [index for index, name in enumerate(names) if HIDDEN.fullmatch(name)]
        heads = [index for index, name in enumerate(names) if HEADS.fullmatch(name)]
        return any(
            asked[wide] % (asked[one] * EVEN) and not (self.confirmed[:, wide] % (self.confirmed[:, one] * EVEN)).any()
            for wide, one in itertools.product(hidden, heads)
        )


def with_values(recipe: Recipe, widths: Widths, values: Sequence[int], layers: int) -> Recipe:
    """`recipe` for a network with these values of `widths.keys` and this number of blocks. Raises: ValueError if there is
    no such network."""
    walk, sizes = recipe.walk, recipe.sizes
    num_entries = len(walk.names)
    sides = [side for one in walk.parameters for side in one.shape]
    columns = np.ones((len(sizes.coefficients), num_entries + len(sides)), dtype=np.int64)
    columns[:, :num_entries], columns[:, num_entries:] = sizes.coefficients, sides
    scaled = widths.scaled(columns, values)
    rest = iter(scaled[0, num_entries:].tolist())
    parameters = tuple(one._replace(shape=tuple(next(rest) for _ in one.shape)) for one in walk.parameters)
    scaled_sizes = replace(sizes, coefficients=scaled[:, :num_entries])
    return replace(recipe.of_depth(layers), walk=replace(walk, parameters=parameters), sizes=scaled_sizes)


def numbers_of(walk: Walk, num_bytes: Ints) -> Ints:
    """The numbers that widths explain: the bytes of every tensor, then the sides of every weight."""
    sides = [side for one in walk.parameters for side in one.shape]
    return np.array([*num_bytes.tolist(), *sides], dtype=np.int64)


def _is_number_like(value: object, recorded: object) -> bool:
    """Whether a number without effect is like the recorded one: present, not 0, and not a count of 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value:
        return False
    return isinstance(recorded, float) or value > 1


def _powers_of_two(values: Ints) -> Ints:
    """The largest power of two that divides each value."""
    return values & -values
