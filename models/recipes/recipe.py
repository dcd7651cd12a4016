"""`Recipe`: what a network allocates in a step on one GPU, for any batch and length in its range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from peakcast.fields import FrozenMapping
from peakcast.models.recipes.depth import Repeats, deepened, repeats, short_depth
from peakcast.models.recipes.sizes import Sizes, through
from peakcast.models.recipes.walk import Ints, Walk

Point = tuple[int, int]
"""Micro-batch size and sequence length."""
Record = Callable[[list[tuple[int | None, int, int]]], list[Walk]]
"""(layers, or None for all, micro-batch size, sequence length) of each walk to record -> the walks."""
LENGTHS = (256, 512, 768)
"""Lengths that most networks treat alike: no window of theirs ends in between."""
UNEVEN = 331
"""A length that no kernel's tile divides."""
FAR = (5, 65536)
"""A micro-batch and a length that few exceed: where the operations are the same there, they are in between."""
LARGEST_BATCH = 2**16
EVEN = 8
"""Lengths that are a multiple of this run the same kernels."""


@dataclass(frozen=True)
class Recipe:
    """A network's step. `walk` is a short network's; `repeats` says how it is deepened (None: it is of the full depth)."""

    walk: Walk
    repeats: Repeats | None
    layers: int
    """Of the network that was asked for."""
    sizes: Sizes
    batches: tuple[int, int]
    """The smallest and the largest micro-batch for which it holds."""
    lengths: tuple[int, int]
    """The shortest and the longest sequence."""
    even: bool = False
    """Whether it holds for lengths that are multiples of `EVEN` only."""
    versions: FrozenMapping = field(default_factory=FrozenMapping)
    """Releases of the libraries that it was recorded with."""

    def covers(self, batch: int, length: int) -> bool:
        """Whether it holds for a micro-batch of so many sequences of this length."""
        inside = self.batches[0] <= batch <= self.batches[1] and self.lengths[0] <= length <= self.lengths[1]
        return inside and not (self.even and length % EVEN)

    @property
    def tied(self) -> bool:
        """Whether the lm_head uses the embedding's table: it has no weight of its own."""
        return not any(module == "head" and len(shape) == 2 for module, _, shape, _, _ in self.walk.parameters)


def recorded(record: Record, asked: Point) -> Recipe:
    """The recipe of a network that covers `asked`.

    One walk of the whole network tells which layers repeat; the others are of a network with two of each, in a few small
    batches and lengths, and the asked point, an uneven length and a far one confirm what follows from them. What they do not
    confirm narrows the range, to the asked point alone where no polynomials go through the walks.
    """
    batch, length = asked
    smallest = 1 if batch == 1 else 2
    for lengths in (LENGTHS, _near(length)):
        solving = [(one, other) for one in dict.fromkeys((smallest, 3 * smallest // 2)) for other in lengths]
        (whole,) = record([(None, *solving[0])])
        short = short_depth(whole)
        depth = short[0] if short else None
        walks = dict(zip([*solving, asked], record([(depth, *point) for point in [*solving, asked]]), strict=True))
        walk = walks[solving[0]]
        how = repeats(walk, *short[1:]) if short else None
        if short and (how is None or not _is(whole, walk, how)):
            depth, how, walk = None, None, whole
            walks = dict(zip(walks, record([(None, *point) for point in walks]), strict=True))
        if all(walk.same_program(other) for other in walks.values()):
            sizes = through({point: one.raw_bytes for point, one in walks.items()}, solving)
            if sizes is not None:
                recipe = Recipe(walk, how, whole.num_layers, sizes, (smallest, max(batch, 3 * smallest // 2)), _span([*lengths, length]))
                return _widened(recipe, record, depth)
    alike = walks[asked].same_program(walk)
    if not alike and depth is not None:  # what was found to repeat may not do so there
        (own,) = record([(None, *asked)])
        return Recipe(own, None, own.num_layers, _alone(own, asked), (batch, batch), (length, length))
    return Recipe(walks[asked], how, whole.num_layers, _alone(walks[asked], asked), (batch, batch), (length, length))


def _alone(walk: Walk, point: Point) -> Sizes:
    """The sizes of one walk, for its own batch and length."""
    sizes = through({point: walk.raw_bytes}, [point])
    assert sizes is not None
    return sizes


def _widened(recipe: Recipe, record: Record, depth: int | None) -> Recipe:
    """The recipe with as wide a range as an uneven length and a far point confirm."""
    batch, most = recipe.batches
    batch, far = (batch, (1, FAR[1])) if batch == 1 else (batch, FAR)
    uneven, distant = record([(depth, batch, recipe.lengths[0] + UNEVEN - LENGTHS[0]), (depth, *far)])
    points = {(batch, recipe.lengths[0] + UNEVEN - LENGTHS[0]): uneven, far: distant}
    known = {point: one.raw_bytes for point, one in points.items() if one.same_program(recipe.walk)}
    sizes = recipe.sizes.confirmed(known)
    if sizes is None or len(known) < len(points):
        recipe = replace(recipe, even=not any(point[1] % EVEN for point in known))
    if sizes is None:
        return recipe
    wide = far in known
    lengths = recipe.lengths[0], max(recipe.lengths[1], far[1] if wide else 0)
    batches = recipe.batches[0], 1 if batch == 1 else LARGEST_BATCH if wide else most
    return replace(recipe, sizes=sizes, lengths=lengths, batches=batches)


def _is(whole: Walk, walk: Walk, how: Repeats) -> bool:
    """Whether a short walk, deepened, is the whole network's, tensor by tensor."""
    deep = deepened(walk, how, whole.num_layers)
    one = np.vstack([deep.lives, walk.raw_bytes[deep.entries], walk.categories[deep.entries]])
    other = np.vstack([whole.lives, whole.raw_bytes, whole.categories])
    return one.shape == other.shape and np.array_equal(_sorted(one), _sorted(other))


def _sorted(columns: Ints) -> Ints:
    return columns[:, np.lexsort(columns)]


def _near(length: int) -> tuple[int, int, int]:
    """Lengths just below one, itself among them."""
    step = max(1, length // 16 // EVEN * EVEN)
    return length - 2 * step, length - step, length


def _span(lengths: Sequence[int]) -> tuple[int, int]:
    return min(lengths), max(lengths)
