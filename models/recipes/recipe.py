"""`Recipe`: what a network allocates in a step on one GPU, for any micro-batch and length within its range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from peakcast.core.errors import CollectorError
from peakcast.core.fields import FrozenMapping
from peakcast.models.recipes.depth import Repeats, Short, deepened, repeats, short_depth
from peakcast.models.recipes.sizes import Sizes, through
from peakcast.models.recipes.walk import Ints, Walk

Point = tuple[int, int]
"""Micro-batch size and sequence length."""
Record = Callable[..., Walk]
"""(layers (None: all), micro-batch size, sequence length, number of steps (default: 2), whose last is recorded) -> the
walk."""
LENGTHS = (256, 512, 768)
"""Lengths for which most networks run the same operations: no sliding window ends between them."""
UNEVEN = 331
"""A length that is a multiple of no kernel's tile."""
FAR = (5, 65536)
"""A micro-batch and a length that few jobs exceed: if the operations are the same there, they are the same in between."""
FEWEST = 128
"""If a network does not accept lengths like these: fractions of its longest, or of the asked one, if that is at least this
number of tokens."""
SHORTEST = 17
"""A length that few jobs fall below: if the operations are the same there, they are the same from there on."""
LARGEST_BATCH = 2**16
EVEN = 8
"""Lengths that are multiples of this run the same kernels."""


@dataclass(frozen=True)
class Recipe:
    """A network's step. `walk`: that of a short network; `repeats`: how layers are added to it (None: it has the full
    depth)."""

    walk: Walk
    repeats: Repeats | None
    layers: int
    """Number of layers of the network itself."""
    sizes: Sizes
    batches: tuple[int, int]
    """The smallest and the largest micro-batch that it covers."""
    lengths: tuple[int, int]
    """The shortest and the longest sequence that it covers."""
    even: bool = False
    """Whether it covers only lengths that are multiples of `EVEN`."""
    versions: FrozenMapping = field(default_factory=FrozenMapping)
    """Releases of the libraries with which it was recorded."""

    def covers(self, batch: int, length: int) -> bool:
        """Whether it covers a micro-batch of `batch` sequences of this length."""
        inside = self.batches[0] <= batch <= self.batches[1] and self.lengths[0] <= length <= self.lengths[1]
        return inside and not (self.even and length % EVEN)

    def range_in_words(self) -> str:
        """The micro-batches and lengths that it covers."""
        (fewest, most), (shortest, longest) = self.batches, self.lengths
        tokens = f"{shortest:,} to {longest:,} tokens" + (f" in multiples of {EVEN}" if self.even else "")
        return f"micro-batches of {fewest:,} to {most:,} sequences of {tokens}"

    @property
    def tied(self) -> bool:
        """Whether the lm_head uses the embedding's table, that is, has no weight of its own."""
        return not any(module == "head" and len(shape) == 2 for module, _, shape, _, _ in self.walk.parameters)

    @property
    def odd_ends(self) -> bool:
        """Whether there are matrices outside the blocks that are neither the embedding's nor the lm_head's (a prediction
        head's or a projector's, for example), or matrices between the blocks."""
        matrices = [(module, shape) for module, _, shape, _, _ in self.walk.parameters if len(shape) > 1]
        tables = {shape for module, shape in matrices if module == "embedding"}
        return any(
            module.startswith("between.") or (module == "head" and shape not in tables) for module, shape in matrices
        )


def recorded(
    record: Record,
    asked: Point,
    most: int | None = None,
    images: int = 0,
    nearer: Sequence[Point] = (),
    told: Sequence[object] = (),
) -> Recipe:
    """The recipe of a network that covers `asked`; no sequence is longer than `most`, and each has `images` images. If the
    farthest point confirms nothing, the first point of `nearer` that does is the end of the range. `told`: what the
    configuration says of each layer, so that layers that repeat are told the same.

    A walk of the whole network shows which layers repeat. The other walks are of a network with two of each, for a few
    small batches and lengths that run the same operations as the asked one. An uneven length and a far one confirm the
    sizes that follow from them; what they do not confirm narrows the range, down to the asked point alone if no polynomials
    fit.

    Raises: CollectorError if the network cannot be recorded at all.
    """
    batch, length = asked
    batches = (1,) if batch == 1 else (2, 3)
    first = (batches[0], length)
    whole = record(None, *first, 1)  # one step shows which layers are equal, and takes half the time of two
    room = -(-images * (whole.image_tokens + 1) // LENGTHS[0]) * LENGTHS[0]  # tokens of a sequence that images use
    small = LENGTHS[0] + room, LENGTHS[1] + room, LENGTHS[2] + room
    if most is not None and small[2] > most >= FEWEST and not images:
        small = _fractions(most)
    short, depth = short_depth(whole, told if len(told) * whole.stacks == whole.num_layers else ()), None
    if short is not None:
        with suppress(CollectorError):  # the network has no fewer layers
            depth = short.layers if _repeats(whole, record(short.layers, *first, 1), short) is not None else None
    walks = {first: record(depth, *first)}
    how = repeats(walks[first], short.prefixes, short.unit) if short is not None and depth is not None else None
    walk = walks[first]

    def alike(point: Point) -> bool:
        """Whether the same operations run at `point`, whose walk is then known."""
        if point not in walks and (most is None or point[1] <= most):
            with suppress(CollectorError):  # the library does not run it
                other = record(depth, *point)
                if other.same_program(walk):
                    walks[point] = other
        return point in walks

    if images and batch > 1 and not alike((batches[-1], length)):  # each sequence's images add operations
        batches, walk = (batch,), record(depth, *asked)
        walks = {asked: walk}
        how = repeats(walk, short.prefixes, short.unit) if short is not None and depth is not None else None
    for lengths in (small, *([_fractions(length)] if length >= FEWEST and not images else []), _near(length)):
        solving = [(one, other) for one in batches for other in lengths]
        if alike(asked) and all(alike(point) for point in solving):
            sizes = through({point: one.raw_bytes for point, one in walks.items()}, solving)
            if sizes is not None:
                span = min(*lengths, length), max(*lengths, length)
                recipe = Recipe(walk, how, whole.num_layers, sizes, (batches[0], max(batch, batches[-1])), span)
                recipe = _widened(recipe, walks, alike, most, nearer)
                if recipe.covers(*asked):  # not an uneven length that only even ones were confirmed beside
                    return recipe
    own = walks[asked] if asked in walks else record(None, *asked)
    how = how if asked in walks else None
    return _of_walk(own, asked, how, whole.num_layers)


def recorded_alone(record: Record, asked: Point) -> Recipe:
    """The recipe of a network that covers the `asked` point alone, from one walk of all its layers. For steps that run
    other operations at every other point. Raises: CollectorError if the network cannot be recorded."""
    walk = record(None, *asked)
    return _of_walk(walk, asked, None, walk.num_layers)


def _of_walk(walk: Walk, point: Point, how: Repeats | None, layers: int) -> Recipe:
    """The recipe of one walk, for its own batch and length only."""
    batch, length = point
    return Recipe(walk, how, layers, _sizes_of_walk(walk, point), (batch, batch), (length, length))


def _repeats(whole: Walk, walk: Walk, short: Short) -> Repeats | None:
    """How layers are added to a short walk; None if that does not give the whole network's walk, tensor by tensor."""
    how = repeats(walk, short.prefixes, short.unit) if walk.num_layers == short.layers else None
    if how is None:  # or the library makes a different network for this count, for example an encoder and a decoder
        return None
    deep = deepened(walk, how, whole.num_layers)
    one = np.vstack([deep.lives, walk.raw_bytes[deep.entries], walk.categories[deep.entries]])
    other = np.vstack([whole.lives, whole.raw_bytes, whole.categories])
    return how if one.shape == other.shape and np.array_equal(_sorted(one), _sorted(other)) else None


def _sizes_of_walk(walk: Walk, point: Point) -> Sizes:
    """The sizes of one walk, for its own batch and length only."""
    sizes = through({point: walk.raw_bytes}, [point])
    assert sizes is not None
    return sizes


def _widened(
    recipe: Recipe, walks: dict[Point, Walk], alike: Callable[[Point], bool], most: int | None, nearer: Sequence[Point]
) -> Recipe:
    """The recipe with as wide a range as an uneven length, a short one and a far point confirm."""
    batch, alone = recipe.batches[0], recipe.batches[0] == recipe.batches[1]
    shortest, longest = recipe.lengths[0], max(recipe.lengths[1], min(FAR[1], FAR[1] if most is None else most))
    uneven = batch, shortest + min(UNEVEN - LENGTHS[0], (recipe.lengths[1] - shortest) // 2 | 1)
    # as many tokens at any length: some code depends on them
    far, many = ((batch if alone else FAR[0] * max(1, FAR[1] // one), one) for one in (longest, recipe.lengths[1]))

    def told(point: Point) -> Sizes | None:
        """The sizes, if `point` and all that were walked before confirm them."""
        return recipe.sizes.confirmed({one: found.raw_bytes for one, found in walks.items()}) if alike(point) else None

    sizes = told(uneven)
    recipe = replace(recipe, sizes=sizes or recipe.sizes, even=sizes is None and bool(uneven[1] % EVEN))
    if shortest > SHORTEST and not recipe.even and (sizes := told((batch, SHORTEST))):
        recipe = replace(recipe, sizes=sizes, lengths=(SHORTEST, recipe.lengths[1]))
    others = ((batch if alone else more, length) for more, length in nearer if recipe.lengths[1] <= length < longest)
    for corner in (far, *others, many):
        if alike(corner) and not recipe.sizes.wrong({corner: walks[corner].raw_bytes}).any():
            most_sequences = LARGEST_BATCH if corner in (far, many) else max(recipe.batches[1], corner[0])
            batches = batch, batch if alone else most_sequences
            return replace(recipe, lengths=(recipe.lengths[0], corner[1]), batches=batches)
    return recipe


def _sorted(columns: Ints) -> Ints:
    """The columns in a fixed order."""
    return columns[:, np.lexsort(columns)]


def _fractions(length: int) -> tuple[int, int, int]:
    """A quarter, half and three quarters of `length`."""
    return length // 4 // EVEN * EVEN, length // 2 // EVEN * EVEN, length * 3 // 4 // EVEN * EVEN


def _near(length: int) -> tuple[int, int, int]:
    """Three lengths up to `length`, close to each other."""
    step = max(1, length // 16 // EVEN * EVEN)
    return length - 2 * step, length - step, length
