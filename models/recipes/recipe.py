"""`Recipe`: what a network allocates in a step on one GPU, for any micro-batch and length within its range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from peakcast.core.errors import CollectorError
from peakcast.core.fields import FrozenMapping
from peakcast.models.recipes.depth import Deep, Repeats, Run, deepened, repeats, short_depth, thinned
from peakcast.models.recipes.sizes import Sizes, through
from peakcast.models.recipes.walk import Ints, Walk

Point = tuple[int, int]
"""Micro-batch size and sequence length."""
Record = Callable[..., Walk]
"""(layers (None: all), micro-batch size, sequence length, number of steps (default: 2), whose last is recorded; then, where
some are skipped, changed values and the numbers of skipped layers) -> the walk."""
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
    depth); `copies`: how many units of each run are added."""

    walk: Walk
    repeats: Repeats | None
    copies: tuple[int, ...]
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

    @property
    def layers(self) -> int:
        """Number of layers of the network itself."""
        runs = self.repeats.runs if self.repeats else ()
        return self.walk.num_layers + sum(run.unit * more for run, more in zip(runs, self.copies, strict=True))

    def deep(self) -> Deep:
        """The network itself, in terms of the walk."""
        return deepened(self.walk, self.repeats, self.copies)

    def of_depth(self, layers: int) -> Recipe:
        """The recipe of a network with so many layers, whose runs all have equally many more units. Raises: ValueError if
        there is no such network."""
        runs, more = self.repeats.runs if self.repeats else (), layers - self.walk.num_layers
        unit = sum(run.unit for run in runs)
        if more < 0 or (more and (not unit or more % unit)):
            raise ValueError(f"a walk of {self.walk.num_layers} layers has no {layers}")
        return replace(self, copies=(more // unit,) * len(runs) if more else (0,) * len(runs))

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
    of_images = images * (whole.image_tokens + 1)  # tokens of a sequence that images use
    small = _lengths_beside(of_images)
    if most is not None and small[2] > most >= FEWEST and not images:
        small = _fractions(most)
    shown, one = _shown(record, first, whole, told if len(told) * whole.stacks == whole.num_layers else ())
    walk = shown.walk(record, first)
    how = repeats(walk, shown.runs)
    if how is None:  # a later step does something else in layers that are alike in a first one
        shown, one, walk, how = _Shown(), whole, record(None, *first), repeats(walk, ())
    again, walks = one.in_next_step(walk), {first: walk}

    def alike(point: Point) -> bool:
        """Whether the same operations run at `point`, whose walk is then known."""
        if point not in walks and (most is None or point[1] <= most):
            with suppress(CollectorError):  # the library does not run it
                other = shown.walk(record, point, 2 if again is None else 1)
                if again is not None and other.same_program(one):
                    walks[point] = replace(walk, raw_bytes=other.raw_bytes[again])
                elif other.same_program(walk):
                    walks[point] = other
        return point in walks

    if images and batch > 1 and not alike((batches[-1], length)):  # each sequence's images add operations
        batches = (batch,)
        if asked != first:
            one, walk = shown.walk(record, asked, 1), shown.walk(record, asked)
            again, how = one.in_next_step(walk), repeats(walk, shown.runs)
        walks = {asked: walk}
    for lengths in (small, *([_fractions(length)] if length >= FEWEST and not images else []), _near(length)):
        solving = [(one, other) for one in batches for other in lengths]
        if alike(asked) and all(alike(point) for point in solving):
            sizes = through({point: one.raw_bytes for point, one in walks.items()}, solving)
            if sizes is not None:
                span = min(*lengths, length), max(*lengths, length)
                recipe = Recipe(walk, how, shown.copies, sizes, (batches[0], max(batch, batches[-1])), span)
                return _widened(recipe, walks, alike, most, nearer, SHORTEST + of_images)
    if asked in walks:
        return _of_walk(walks[asked], asked, how, shown.copies)
    return _of_walk(record(None, *asked), asked)


def recorded_alone(record: Record, asked: Point) -> Recipe:
    """The recipe of a network that covers the `asked` point alone, from one walk of all its layers. For steps that run
    other operations at every other point. Raises: CollectorError if the network cannot be recorded."""
    walk = record(None, *asked)
    return _of_walk(walk, asked)


def _of_walk(walk: Walk, point: Point, how: Repeats | None = None, copies: tuple[int, ...] = ()) -> Recipe:
    """The recipe of one walk, for its own batch and length only."""
    batch, length = point
    return Recipe(walk, how, copies, _sizes_of_walk(walk, point), (batch, batch), (length, length))


@dataclass(frozen=True)
class _Shown:
    """The layers of a network that are walked: the first `layers` (None: all) without those of the numbers `skipped`. The
    network has `copies` more units of each of `runs`."""

    layers: int | None = None
    skipped: tuple[int, ...] = ()
    runs: tuple[Run, ...] = ()
    copies: tuple[int, ...] = ()

    def walk(self, record: Record, point: Point, steps: int = 2) -> Walk:
        """The walk of these layers. Raises: CollectorError."""
        return record(self.layers, *point, steps, *([{}, self.skipped] if self.skipped else []))


def _shown(record: Record, point: Point, whole: Walk, told: Sequence[object]) -> tuple[_Shown, Walk]:
    """The fewest layers that show all that the network of the walk `whole` does, and their walk of one step."""
    found: list[_Shown] = []
    short = short_depth(whole, told)
    if short is not None:
        units = sum(run.unit for run in short.runs)
        more = (whole.num_layers - short.layers) // units
        found.append(_Shown(short.layers, (), short.runs, (more,) * len(short.runs)))
    if whole.kinds:
        thin = thinned(whole)
        left = whole.num_layers - len(thin.skipped)
        at = 0 if short is None or left < short.layers else 1  # networks that are short are built faster
        found[at:at] = [_Shown(None, thin.skipped, thin.runs, thin.copies)] if thin.skipped else []
    for shown in found:
        with suppress(CollectorError):  # the network has no fewer layers, or its code needs those that are skipped
            one = shown.walk(record, point, 1)
            if _stands_for(one, shown, whole):
                return shown, one
    return _Shown(), whole


def _stands_for(walk: Walk, shown: _Shown, whole: Walk) -> bool:
    """Whether the walk of some layers with copies of them is the whole network's, tensor by tensor."""
    units = sum(run.unit * more for run, more in zip(shown.runs, shown.copies, strict=True))
    how = repeats(walk, shown.runs) if walk.num_layers + units == whole.num_layers else None
    if how is None:  # or the library makes a different network for this count, for example an encoder and a decoder
        return False
    deep = deepened(walk, how, shown.copies)
    one = np.vstack([deep.lives, walk.raw_bytes[deep.entries], walk.categories[deep.entries]])
    other = np.vstack([whole.lives, whole.raw_bytes, whole.categories])
    return one.shape == other.shape and np.array_equal(_sorted(one), _sorted(other))


def _sizes_of_walk(walk: Walk, point: Point) -> Sizes:
    """The sizes of one walk, for its own batch and length only."""
    sizes = through({point: walk.raw_bytes}, [point])
    assert sizes is not None
    return sizes


def _widened(
    recipe: Recipe,
    walks: dict[Point, Walk],
    alike: Callable[[Point], bool],
    most: int | None,
    nearer: Sequence[Point],
    short: int,
) -> Recipe:
    """The recipe with as wide a range as an uneven length, the length `short` and a far point confirm."""
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
    if shortest > short and not recipe.even and (sizes := told((batch, short))):
        recipe = replace(recipe, sizes=sizes, lengths=(short, recipe.lengths[1]))
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


def _lengths_beside(tokens: int) -> tuple[int, int, int]:
    """LENGTHS, with room for so many tokens of images."""
    room = -(-tokens // LENGTHS[0]) * LENGTHS[0]
    return LENGTHS[0] + room, LENGTHS[1] + room, LENGTHS[2] + room


def _fractions(length: int) -> tuple[int, int, int]:
    """A quarter, half and three quarters of `length`."""
    return length // 4 // EVEN * EVEN, length // 2 // EVEN * EVEN, length * 3 // 4 // EVEN * EVEN


def _near(length: int) -> tuple[int, int, int]:
    """Three lengths up to `length`, close to each other."""
    step = max(1, length // 16 // EVEN * EVEN)
    return length - 2 * step, length - step, length
