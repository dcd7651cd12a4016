"""Finds by walks which numbers of a configuration may vary in a recipe, and how sizes follow from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from peakcast.core.errors import CollectorError
from peakcast.dialects.common.network_values import NETWORK_PREFIX
from peakcast.jobs.spec import TrainingJob
from peakcast.models.recipes.conditions import Conditions, conditions, implied
from peakcast.models.recipes.kinds import HEADS, NetworkKind, numbers_of, with_values
from peakcast.models.recipes.recipe import EVEN, Recipe
from peakcast.models.recipes.walk import Ints, Walk
from peakcast.models.recipes.walked import TARGET_LENGTH, Record, WalkSizes
from peakcast.models.recipes.widths import Widths, WidthSample, learned
from peakcast.networks.layer_count import with_layers

PINNED = re.compile(r"\w*(window|chunk|layer|block|interval|period|offset|step)\w*")
"""Names of numbers that decide from which length, or in which layer, other operations run. A few lengths and layers might
not show that."""
COUNTED = re.compile(r"(num|n)_\w+|\w*(_heads|_experts|_k|topk)")
"""Names of numbers that count heads, experts and the like, in contrast to widths."""
POSITIONS = re.compile(r"(max_)?(n_)?position\w*|\w*_positions|n_ctx")
"""Names of the number of a network's positions: fewer would not accept the sequences that are walked."""
VOCABULARIES = 4
"""By how much more than other numbers vocabularies are raised: XLM-RoBERTa's has eight times as many words as BERT's."""
RANK = "finetuning.rank"
"""The only number that is not part of the network's configuration."""
SMALLEST = 2
"""Smaller numbers, such as one group of heads, are special cases."""
ROUNDS = 6
"""Most rounds in which numbers whose effect is not a sum of products are pinned and the rest is walked again."""

Variation = Callable[[str, int, bool], int]


def network_kind(
    record: Record, recipe: Recipe, job: TrainingJob, defaults: Conditions, read: frozenset[str] = frozenset()
) -> NetworkKind | None:
    """All networks that `recipe`, which is one of `job`, represents; None if no other network confirms it. `record`: takes
    the arguments of `walked.Record` and then values that differ from the job's. `defaults`, `read`: as of `NetworkKind`."""
    layers = None if recipe.repeats is None else recipe.walk.num_layers
    stacks = recipe.walk.stacks
    plain = recipe.layers == stacks * job.architecture.num_hidden_layers  # else a tower's blocks are counted as well
    how = recipe.repeats if plain else None
    shown = job.architecture if how is None or layers is None else with_layers(job.architecture, layers // stacks)
    base = conditions(job.replace(architecture=shown), defaults, read)
    explored = _Explored(record, recipe, layers, base, implied(job, defaults))
    explored.look()
    found = explored.widths()
    if found is None:
        return None
    return NetworkKind(
        conditions=base,
        defaults=defaults,
        layers=shown.num_hidden_layers,
        prefix=how.runs[0].prefix if how else 0,
        unit=how.runs[0].unit if how else 0,
        idle=tuple(sorted(explored.idle)),
        same_as=explored.same_as,
        widths=found[0],
        confirmed=found[1],
        read=read,
    )


@dataclass
class _Explored:
    """Walks of networks with changed values, and what they show."""

    record: Record
    recipe: Recipe
    layers: int | None
    base: Conditions
    implied: Conditions
    """What the configuration leaves to convention, given explicitly so that it stays when other numbers change."""
    idle: set[str] = field(default_factory=set)
    same_as: dict[str, str] = field(default_factory=dict)
    singles: dict[str, tuple[Fraction, Ints]] = field(default_factory=dict)
    """By name: the factor by which one number (and those that must equal it) was multiplied, and the sizes then."""

    def __post_init__(self) -> None:
        shortest, longest = self.recipe.lengths
        length = min(max(shortest, 512), longest)
        few, many = self.recipe.batches
        targets = self.recipe.targets is not None
        shorter = (shortest + 3 * length) // 4 // EVEN * EVEN if length > shortest else length
        self.near: WalkSizes = (few, *(length,) * (1 + targets))
        self.other: WalkSizes = (min(few + 1, many), shorter, *(length,) * targets)
        self.far: WalkSizes = (few, *(longest,) * (1 + targets))
        self._before = numbers_of(self.recipe.walk, self.recipe.sizes.at(*self.near))

    # -- one number at a time ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Find which numbers may vary."""
        numbers = {name: value for name, value in self.base.items() if _may_vary(name, value)}
        whole = {name: value for name, value in numbers.items() if isinstance(value, int)}
        alone = {name for name in whole if self._changes([name])}
        by_value: dict[int, list[str]] = {}
        for name in whole.keys() - alone:
            by_value.setdefault(whole[name], []).append(name)
        for names in map(sorted, by_value.values()):
            if len(names) > 1 and self._changes(names):
                self.same_as |= dict.fromkeys(names[1:], names[0])
        idle = {name for name, (_, found) in self.singles.items() if np.array_equal(found, self._before)}
        together = idle | {name for name, value in numbers.items() if isinstance(value, float)}
        if together and not self._is_idle(together):
            together = {name for name in together if self._is_idle({name})}
        self.idle = together | {name for name, leader in self.same_as.items() if leader in together}
        self.same_as = {name: leader for name, leader in self.same_as.items() if name not in self.idle}
        for name in idle:
            del self.singles[name]

    def _changes(self, names: list[str]) -> bool:
        """Whether the numbers `names`, which have one value, may have another. The sizes then are kept under the first
        name."""
        for factor in (Fraction(2), Fraction(1, 2)):
            value = factor * self.base[names[0]]
            if value.denominator == 1 and value >= SMALLEST:
                walk = self._walk(dict.fromkeys(names, int(value)), self.near)
                if walk is not None:
                    self.singles[names[0]] = factor, numbers_of(walk, walk.raw_bytes)
                    return True
        return False

    def _is_idle(self, names: Iterable[str]) -> bool:
        """Whether other values of all `names` change nothing, even for long sequences."""
        values = {name: self.base[name] for name in names}
        others = {name: value / 2 if isinstance(value, float) else 2 * value for name, value in values.items()}
        walk = self._walk(others, self.far)
        return walk is not None and np.array_equal(walk.raw_bytes, self.recipe.sizes.at(*self.far))

    # -- many at a time ------------------------------------------------------------------------------------------------

    def widths(self) -> tuple[Widths, Ints] | None:
        """How sizes follow from values, and the values that were walked; None if no network with many changed numbers
        confirms it."""
        for _ in range(ROUNDS):
            self._pin_unexplained()
            if not self.singles:
                return None
            first = learned(self._keys(), self._values(), self._before, self._one_changed())[0]
            corners = [self._corner(first, attempts, self.near) for attempts in (LARGE, SMALL)]
            several_changed = [WidthSample(_factors(one[0], self._values()), one[1]) for one in corners if one]
            samples = [*self._one_changed(), *several_changed]
            widths, unexplained = learned(self._keys(), self._values(), self._before, samples)
            last = self._corner(widths, UNEVEN, self.other)
            wrong = {*unexplained.tolist(), *(self._wrong(widths, *last) if last else ())}
            walked = [values for values, _ in filter(None, [*corners, last])]
            if not walked:
                return None
            if not wrong:
                confirmed = [self._values(), *map(self._values_of_one, self._keys()), *walked]
                return widths, np.array(confirmed, dtype=np.int64)
            told_wrongly, all_told = self._dependence(sorted(wrong)), self._dependence(list(range(len(self._before))))
            self._pin(min(told_wrongly, key=lambda name: (-told_wrongly[name], all_told[name], name)))
        return None

    def _keys(self) -> list[str]:
        return sorted(self.singles)

    def _values(self) -> list[int]:
        return [int(self.base[key]) for key in self._keys()]

    def _values_of_one(self, name: str) -> list[int]:
        """The values in the walk in which only `name` was changed."""
        changed = {name: int(self.singles[name][0] * self.base[name])}
        return [changed.get(key, value) for key, value in zip(self._keys(), self._values(), strict=True)]

    def _one_changed(self, leaving: str = "") -> list[WidthSample]:
        """The walks in which one number was changed, without that of `leaving`."""
        values = self._values()
        return [
            WidthSample(_factors(self._values_of_one(name), values), found)
            for name, (_, found) in self.singles.items()
            if name != leaving
        ]

    def _pin_unexplained(self) -> None:
        """Fix numbers at their values until sums of products explain all sizes, those first that leave the fewest sizes
        unexplained."""
        while self.singles and len(left := learned(self._keys(), self._values(), self._before, self._one_changed())[1]):
            open_without = {}
            for name in self._dependence(left.tolist()):
                samples = [WidthSample(one.factors, one.numbers[left]) for one in self._one_changed(leaving=name)]
                open_without[name] = len(learned(self._keys(), self._values(), self._before[left], samples)[1])
            self._pin(min(open_without, key=lambda name: (open_without[name], name)))

    def _dependence(self, which: list[int]) -> dict[str, int]:
        """How many of the sizes `which` each number changes."""
        found = {name: int((one[which] != self._before[which]).sum()) for name, (_, one) in self.singles.items()}
        return {name: count for name, count in found.items() if count} or found

    def _pin(self, name: str) -> None:
        """Fix a number at its value."""
        del self.singles[name]
        self.same_as = {member: leader for member, leader in self.same_as.items() if leader != name}

    def _corner(self, widths: Widths, attempts: Iterable[Variation], point: WalkSizes) -> tuple[list[int], Ints] | None:
        """The first change of all numbers with which the same operations run: (values, sizes); None if there is none."""
        keys, before = self._keys(), self._values()
        for change in attempts:
            rises = [self.singles[key][0] > 1 for key in keys]
            values = [max(SMALLEST, change(key, value, rise)) for key, value, rise in zip(keys, before, rises, strict=True)]
            if values != before and self._recipe_with(widths, values) is not None:
                walk = self._walk(dict(zip(keys, values, strict=True)), point)
                if walk is not None:
                    return values, numbers_of(walk, walk.raw_bytes)
        return None

    def _wrong(self, widths: Widths, values: list[int], found: Ints) -> list[int]:
        """Indices of the numbers that `widths` gets wrong for a network with `values`, at another batch and length."""
        recipe = self._recipe_with(widths, values)
        assert recipe is not None
        return np.flatnonzero(numbers_of(recipe.walk, recipe.sizes.at(*self.other)) != found).tolist()

    def _recipe_with(self, widths: Widths, values: list[int]) -> Recipe | None:
        """The recipe of a network with `values`; None if there is no such network, as with 21 heads and a width of
        1,600."""
        try:
            return with_values(self.recipe, widths, values, self.recipe.walk.num_layers)
        except ValueError:
            return None

    def _walk(self, changes: Mapping[str, int | float], point: WalkSizes) -> Walk | None:
        """A walk with changed values; None if other operations run, or if the library does not accept them. It is of one
        step where that shows what a later one does, which takes half the time."""
        changes = {**changes, **{name: changes[leader] for name, leader in self.same_as.items() if leader in changes}}
        with suppress(CollectorError):
            walk = self._recorded(changes, point, 2 if self._first is None else 1)
            like = self.recipe.walk if self._first is None else self._first[0]
            if walk.same_program(like) and _structure(walk) == _structure(like):
                if self._first is None:
                    return walk
                return replace(self.recipe.walk, raw_bytes=walk.raw_bytes[self._first[1]], parameters=walk.parameters)
        return None

    @cached_property
    def _first(self) -> tuple[Walk, Ints] | None:
        """A first step of the unchanged network, and which of its tensors are those of the recipe's walk; None if other
        tensors live in a later step."""
        with suppress(CollectorError):
            one = self._recorded({}, self.near, 1)
            again = one.same_tensors_in(replace(self.recipe.walk, raw_bytes=self.recipe.sizes.at(*self.near)))
            return None if again is None else (one, again)
        return None

    def _recorded(self, changes: Mapping[str, int | float], point: WalkSizes, steps: int) -> Walk:
        batch, length, *targets = point
        of_targets = {TARGET_LENGTH: targets[0]} if targets else {}
        return self.record(self.layers, batch, length, steps, {**of_targets, **self.implied, **changes})


def _may_vary(name: str, value: object) -> bool:
    """Whether a condition is a number that might vary."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or PINNED.fullmatch(name.rpartition(".")[2]):
        return False
    if not (name.startswith(NETWORK_PREFIX) or name == RANK):
        return False
    return value >= SMALLEST if isinstance(value, int) else value != 0.0


def _structure(walk: Walk) -> list[tuple[object, ...]]:
    """A walk's parameters without their sizes."""
    return [(one.module, one.name, len(one.shape), one.element_bytes, one.trains) for one in walk.parameters]


def _factors(values: Iterable[int], base: Iterable[int]) -> tuple[Fraction, ...]:
    """By what each value differs from the base."""
    return tuple(Fraction(one, other) for one, other in zip(values, base, strict=True))


# -- changes of all numbers: a name, its value, and whether a larger one runs the same operations -> another value ------


def _times(factor: int | Fraction) -> Variation:
    """A change by a factor, for numbers that stay whole."""

    def changed(name: str, value: int, rises: bool) -> int:
        if value * factor % 1 or (factor > 1 and not rises) or (factor < 1 and _counts_positions(name)):
            return value
        return int(value * factor * (VOCABULARIES if factor > 1 and "vocab" in name else 1))

    return changed


def _few(name: str, value: int, rises: bool) -> int:
    """The change to few groups and experts (1 could be a special case), and to a quarter of everything else."""
    last = name.rpartition(".")[2]
    few = COUNTED.fullmatch(last) and not HEADS.fullmatch(last)
    return SMALLEST if few else _times(Fraction(1, 4))(name, value, rises)


def _odd(name: str, value: int, rises: bool) -> int:
    """The change of `_uneven`, with odd numbers of heads and experts."""
    other = _uneven(name, value, rises)
    return other | 1 if COUNTED.fullmatch(name.rpartition(".")[2]) else other


def _uneven(name: str, value: int, rises: bool) -> int:
    """The change to numbers as uneven as in published networks: an odd vocabulary, 101 classes, 20 heads of 80, 514
    positions."""
    if "vocab" in name or name.endswith("num_labels"):
        return value * 5 // 8 | 1
    if _counts_positions(name):
        return value | 1
    return value * 5 // 8 if value % 8 == 0 else value


def _counts_positions(name: str) -> bool:
    """Whether a condition is the number of a network's positions."""
    return POSITIONS.fullmatch(name.rpartition(".")[2]) is not None


LARGE = _times(4), _times(2)
SMALL = _few, _times(Fraction(1, 4)), _times(Fraction(1, 2))
UNEVEN = _odd, _uneven, _times(Fraction(3, 4))
