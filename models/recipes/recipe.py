"""`Recipe`: what a network allocates in a step on one GPU, for any micro-batch and length within its range."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from peakcast.core.errors import CollectorError
from peakcast.core.fields import FrozenMapping
from peakcast.models.recipes.chunked import KEPT, Chunking, ChunkRule, lengthened, loops_of
from peakcast.models.recipes.depth import Deep, Repeats, deepened
from peakcast.models.recipes.sizes import Sizes, through
from peakcast.models.recipes.walk import Ints, Walk
from peakcast.models.recipes.walked import Record, Shown, Walked, WalkSizes

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
Lengths = tuple[int, ...]
CHUNKED: Lengths = (512, 608, 640, 768)
"""As LENGTHS, of a loss in chunks. The second ends within a chunk: else their number would just follow the length."""
FAR_IN_CHUNKS = 8192
"""The same of a loss in chunks, whose walks take longer the more chunks there are."""
SHOWING = 1024
"""A length with so many chunks that nothing else runs as many times in a row."""
CORNERS = ((0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 1))
"""Which of three lengths and of three targets' lengths are walked together: as few as there are terms of two lengths."""
LARGEST_BATCH = 2**16
EVEN = 8
"""Lengths that are multiples of this run the same kernels."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """A network's step; a recipe equals only itself. `walk`: that of a short network; `repeats`: how layers are added to it
    (None: it has the full depth); `copies`: how many units of each run are added."""

    walk: Walk
    repeats: Repeats | None
    copies: tuple[int, ...]
    sizes: Sizes
    batches: tuple[int, int]
    """The smallest and the largest micro-batch that it covers."""
    lengths: tuple[int, int]
    """The shortest and the longest sequence that it covers."""
    targets: tuple[int, int] | None = None
    """The same of an encoder-decoder's targets; None if they are as long as what it reads."""
    even: bool = False
    """Whether it covers only lengths that are multiples of `EVEN`."""
    versions: FrozenMapping = field(default_factory=FrozenMapping)
    """Releases of the libraries with which it was recorded."""
    chunking: Chunking | None = None
    """The chunks of its loss, if each length has another number of them; `sizes` depend on this number then."""

    def covers(self, batch: int, length: int, targets: int | None = None) -> bool:
        """Whether it covers a micro-batch of `batch` sequences of this length, with targets of another if given."""
        own = length if targets is None else targets
        if self.targets is None and own != length:
            return False
        spans = ((batch, self.batches), (length, self.lengths), (own, self.targets or self.lengths))
        inside = all(low <= one <= high for one, (low, high) in spans)
        inside = inside and (self.chunking is None or self.chunking.covers(batch, length))
        return inside and not (self.even and (length % EVEN or own % EVEN))

    def at(self, batch: int, length: int, targets: int | None = None) -> Recipe:
        """The recipe for this point, with as many chunks as it has."""
        if self.chunking is None:
            return self
        number = self.chunking.rule.number(batch, length)
        made = lengthened(self.walk, self.chunking.loops, number)
        if made is None:
            raise ValueError("its chunks are not alike")
        walk, entries = made
        how = replace(self.repeats, moves=self.repeats.moves[entries]) if self.repeats else None
        return replace(self, walk=walk, repeats=how, sizes=self.sizes.with_last(number).of(entries), chunking=None)

    def bytes_at(self, batch: int, length: int, targets: int | None = None) -> Ints:
        """Bytes of each tensor of the walk, not rounded. [num_entries]"""
        own = () if self.targets is None else (length if targets is None else targets,)
        return self.sizes.at(batch, length, *own)

    @property
    def layers(self) -> int:
        """Number of layers of the network itself."""
        runs = self.repeats.runs if self.repeats else ()
        return self.walk.num_layers + sum(run.unit * more for run, more in zip(runs, self.copies, strict=True))

    def deep(self) -> Deep:
        """The network itself, in terms of the walk."""
        return self._deep

    @cached_property
    def _deep(self) -> Deep:
        return deepened(self.walk, self.repeats, self.copies)

    def of_depths(self, depths: tuple[int, int]) -> Recipe:
        """The recipe of an encoder-decoder whose stacks have so many layers. Raises: ValueError if there is no such
        network."""
        runs, recorded_layers = self.repeats.runs if self.repeats else (), self.walk.num_layers // 2
        more = [depth - recorded_layers for depth in depths]
        two = self.walk.stacks == len(runs) == 2
        if not two or any(one < 0 or one % run.unit for one, run in zip(more, runs, strict=True)):
            raise ValueError(f"a walk of two stacks of {recorded_layers} layers has none of {depths}")
        return replace(self, copies=tuple(one // run.unit for one, run in zip(more, runs, strict=True)))

    def of_depth(self, layers: int) -> Recipe:
        """The recipe of a network with so many layers, whose runs all have equally many more units. Raises: ValueError if
        there is no such network."""
        runs, more = self.repeats.runs if self.repeats else (), layers - self.walk.num_layers
        unit = sum(run.unit for run in runs)
        if more < 0 or (more and (not unit or more % unit)):
            raise ValueError(f"a walk of {self.walk.num_layers} layers has no {layers}")
        return replace(self, copies=(more // unit,) * len(runs) if more else (0,) * len(runs))

    def range_in_words(self) -> str:
        """The micro-batches and lengths that it covers."""
        (fewest, most), (shortest, longest) = self.batches, self.lengths
        tokens = f"{shortest:,} to {longest:,} tokens" + (f" in multiples of {EVEN}" if self.even else "")
        if self.targets is not None:
            tokens += f", and as many targets of {self.targets[0]:,} to {self.targets[1]:,}"
        sequences = f"{fewest:,} to {most:,} sequences" if most > fewest else f"{fewest:,} sequence{'s' * (fewest > 1)}"
        return f"micro-batches of {sequences} of {tokens}"

    @property
    def tied(self) -> bool:
        """Whether the lm_head uses the embedding's table, that is, has no weight of its own."""
        return not any(one.module == "head" and len(one.shape) == 2 for one in self.walk.parameters)

    @property
    def odd_ends(self) -> bool:
        """Whether there are matrices outside the blocks that are neither the embedding's nor the lm_head's (a prediction
        head's or a projector's, for example), or matrices between the blocks."""
        matrices = [(one.module, one.shape) for one in self.walk.parameters if len(one.shape) > 1]
        tables = {shape for module, shape in matrices if module == "embedding"}
        return any(
            module.startswith("between.") or (module == "head" and shape not in tables) for module, shape in matrices
        )


def recorded(
    record: Record,
    asked: WalkSizes,
    most: int | None = None,
    images: int = 0,
    nearer: Sequence[WalkSizes] = (),
    told: Sequence[object] = (),
    chunking: Chunking | None = None,
) -> Recipe:
    """The recipe of a network that covers `asked`; no sequence is longer than `most`, and each has `images` images. If the
    farthest point confirms nothing, the first point of `nearer` that does is the end of the range. `told`: what the
    configuration says about each layer, which is equal for layers that repeat. `chunking`: the chunks of the walks.

    A walk of the whole network shows which layers repeat. The other walks are of a network with two of each, for a few
    small batches and lengths that run the same operations as the asked one. An uneven length and a far one confirm the
    sizes that follow from them; what they do not confirm narrows the range, down to the asked point alone if no polynomials
    fit.
    Raises: CollectorError if the network cannot be recorded at all.
    """
    batches: tuple[int, ...] = (1,) if asked[0] == 1 else (2, 3)
    first = (batches[0], *asked[1:])
    whole = Shown().walk(record, first, 1)  # one step shows which layers are equal, and takes half the time of two
    if whole.has_targets and len(asked) == 2:
        asked, first = (*asked, asked[1]), (*first, first[1])
    of_images = images * (whole.image_tokens + 1)  # tokens of a sequence that images use
    told = told if len(told) * whole.stacks == whole.num_layers else ()
    walked = Walked.of(record, whole, told, first, most, chunking)
    if images and asked[0] > 1 and not walked.alike((batches[-1], *asked[1:])):  # each sequence's images add operations
        batches = asked[:1]
        walked = walked if asked == first else walked.only_at(asked)
    for lengths in [[CHUNKED]] if chunking else _lengths(asked, most, of_images):
        recipe = _solved(walked, asked, batches, lengths)
        if recipe is not None:
            short = SHORTEST + (chunking.rule.size * (KEPT - 1) if chunking else of_images)
            recipe = _widened(recipe, walked, most, nearer, short)
            if recipe.covers(*asked):  # not an uneven length that only even ones were confirmed beside
                return recipe
    if not walked.alike(asked) and chunking is None:
        return recorded_alone(record, asked)
    return _of_one_point(walked, asked)


def _of_one_point(walked: Walked, asked: WalkSizes) -> Recipe:
    """The recipe that covers the `asked` point alone, from the walks of a shallower network. Raises: CollectorError."""
    if not walked.alike(asked):
        raise CollectorError("its chunks are not alike.")
    alone = walked.sizes_through([asked])
    assert alone is not None
    return _of_walks(walked, alone, [(number, number) for number in asked])


def _solved(walked: Walked, asked: WalkSizes, batches: Sequence[int], lengths: Sequence[Lengths]) -> Recipe | None:
    """The recipe whose sizes are polynomials through small points, of these `batches` and `lengths`, and the `asked` one;
    None if steps there run other operations than the asked one, or no polynomials fit."""
    points = _points(batches, lengths)
    sizes = walked.sizes_through(points) if walked.alike(asked) and walked.all_alike(points) else None
    if sizes is None:
        return None
    spans = [(min(*some, own), max(*some, own)) for some, own in zip(lengths, asked[1:], strict=True)]
    return _of_walks(walked, sizes, [(batches[0], max(asked[0], batches[-1])), *spans])


def recorded_alone(record: Record, asked: WalkSizes) -> Recipe:
    """The recipe of a network that covers the `asked` point alone, from one walk of all its layers. For steps that run
    other operations at every other point. Raises: CollectorError if the network cannot be recorded."""
    walk = Shown().walk(record, asked)
    sizes = through({asked: walk.raw_bytes}, [asked])
    assert sizes is not None
    batch, length, *targets = ((number, number) for number in asked)
    return Recipe(walk, None, (), sizes, batch, length, targets[0] if targets else None)


def recorded_in_chunks(record: Record, asked: WalkSizes, most: int | None, rule: ChunkRule) -> Recipe:
    """As `recorded`, of a network whose loss goes in chunks by `rule`; of the `asked` point alone where it has too few of
    them, or they do not repeat."""
    batch, length = min(asked[0], 2), SHOWING if most is None else min(SHOWING, most)
    with suppress(CollectorError):
        number = rule.number(batch, length)
        chunking = Chunking(rule, loops_of(Shown().walk(record, (batch, length), 1), number))
        if chunking.loops and chunking.covers(*asked):
            return recorded(chunking.shortening(record), asked, most, chunking=chunking)
    return recorded_alone(record, asked)


def _of_walks(walked: Walked, sizes: Sizes, spans: Sequence[tuple[int, int]]) -> Recipe:
    """The recipe for ranges of micro-batches, lengths and, if they have their own, targets."""
    batches, lengths, *targets = spans
    recipe = Recipe(walked.walk, walked.how, walked.shown.copies, sizes, batches, lengths, targets[0] if targets else None)
    return replace(recipe, chunking=walked.chunking)


def _widened(recipe: Recipe, walked: Walked, most: int | None, nearer: Sequence[WalkSizes], short: int) -> Recipe:
    """The recipe with as wide a range as an uneven length, the length `short` and a far point confirm. Targets have a range
    as wide."""
    batch, alone = recipe.batches[0], recipe.batches[0] == recipe.batches[1]
    spans = [one for one in (recipe.lengths, recipe.targets) if one is not None]
    shortest, ends = [low for low, _ in spans], tuple(high for _, high in spans)
    reach = FAR[1] if walked.chunking is None else FAR_IN_CHUNKS
    longest = max(*ends, min(reach, reach if most is None else most))
    uneven = [low + min(UNEVEN - LENGTHS[0], (high - low) // 2 | 1) for low, high in spans]
    # as many tokens at any length: some code depends on them
    both = (longest,) * len(spans)
    far, many = ((batch if alone else FAR[0] * max(1, reach // one[0]), *one) for one in (both, ends))

    def confirmed_at(point: WalkSizes) -> Sizes | None:
        """The sizes, if `point` and all that were walked before confirm them."""
        return recipe.sizes.confirmed(walked.sizes()) if walked.alike(point) else None

    sizes = confirmed_at((batch, *uneven))
    recipe = replace(recipe, sizes=sizes or recipe.sizes, even=sizes is None and any(one % EVEN for one in uneven))
    if min(shortest) > short and not recipe.even and (sizes := confirmed_at((batch, *(short for _ in spans)))):
        recipe = _ranging(replace(recipe, sizes=sizes), [(short, high) for high in ends])
    others = ((batch if alone else more, length) for more, length in nearer if recipe.lengths[1] <= length < longest)
    for corner in (far, *others, many):
        if walked.alike(corner) and walked.confirms(recipe.sizes, corner):
            most_sequences = LARGEST_BATCH if corner in (far, many) else max(recipe.batches[1], corner[0])
            lows = [low for low, _ in (recipe.lengths, recipe.targets or recipe.lengths)]
            recipe = replace(recipe, batches=(batch, batch if alone else most_sequences))
            return _ranging(recipe, list(zip(lows, corner[1:], strict=False)))
    return recipe


def _ranging(recipe: Recipe, spans: Sequence[tuple[int, int]]) -> Recipe:
    """`recipe` for other ranges of lengths, those of targets last if they have one."""
    return replace(recipe, lengths=spans[0], targets=spans[1] if recipe.targets is not None else None)


def _lengths(asked: WalkSizes, most: int | None, of_images: int) -> list[list[Lengths]]:
    """Lengths through which polynomials may go, in the order in which they are tried: for what the network reads, and for
    targets if `asked` has those. `of_images`: tokens of images in each sequence."""
    room = -(-of_images // LENGTHS[0]) * LENGTHS[0]
    small: Lengths = (LENGTHS[0] + room, LENGTHS[1] + room, LENGTHS[2] + room)
    if most is not None and small[2] > most >= FEWEST and not of_images:
        small = _fractions(most)
    own = asked[1:]
    found = [[small for _ in own]]
    if min(own) >= FEWEST and not of_images:
        found.append([_fractions(length) for length in own])
    return [*found, [near(length) for length in own]]


def _points(batches: Sequence[int], lengths: Sequence[Lengths]) -> list[WalkSizes]:
    """The points through which polynomials go."""
    own, *targets = lengths
    if not targets:
        return [(batch, length) for batch in batches for length in own]
    return [(batch, own[i], targets[0][j]) for batch in batches for i, j in CORNERS]


def _fractions(length: int) -> Lengths:
    """A quarter, half and three quarters of `length`."""
    return length // 4 // EVEN * EVEN, length // 2 // EVEN * EVEN, length * 3 // 4 // EVEN * EVEN


def near(length: int) -> Lengths:
    """Three lengths up to `length`, close to each other and equally far from multiples of EVEN if they are long enough,
    and a power of two apart: where kernels round lengths up, all are rounded by as much."""
    step = max(EVEN if length > 2 * EVEN else 1, 2 ** max(0, (length // 16).bit_length() - 1))
    return length - 2 * step, length - step, length
