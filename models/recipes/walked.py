"""Walks of a network at several points, of as few of its layers as show all that it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from peakcast.core.errors import CollectorError
from peakcast.models.recipes.chunked import Chunking
from peakcast.models.recipes.depth import Repeats, Run, deepened, repeats, short_depth, thinned
from peakcast.models.recipes.sizes import Sizes, through, through_chunks
from peakcast.models.recipes.walk import Ints, Walk

WalkSizes = tuple[int, ...]
"""Micro-batch size and sequence length; for an encoder-decoder also the length of its targets, where that is of its own."""
Record = Callable[..., Walk]
"""(layers (None: all), micro-batch size, sequence length, number of steps (default: 2), whose last is recorded; then, where
they are needed, changed values and the numbers of skipped layers) -> the walk."""
TARGET_LENGTH = "decoder_sequence_length"


@dataclass(frozen=True)
class Shown:
    """The layers of a network that are walked: the first `layers` (None: all) without those of the numbers `skipped`. The
    network has `copies` more units of each of `runs`."""

    layers: int | None = None
    skipped: tuple[int, ...] = ()
    runs: tuple[Run, ...] = ()
    copies: tuple[int, ...] = ()

    def walk(self, record: Record, point: WalkSizes, steps: int = 2) -> Walk:
        """The walk of these layers. Raises: CollectorError."""
        batch, length, *targets = point
        more: list[object] = [{TARGET_LENGTH: targets[0]} if targets else {}, self.skipped]
        return record(self.layers, batch, length, steps, *(more if targets or self.skipped else ()))

    def stands_for(self, walk: Walk, whole: Walk) -> bool:
        """Whether `walk`, of these layers, with copies of them is the `whole` network's, tensor by tensor."""
        units = sum(run.unit * more for run, more in zip(self.runs, self.copies, strict=True))
        how = repeats(walk, self.runs) if walk.num_layers + units == whole.num_layers else None
        if how is None:  # or the library makes a different network for this count, for example an encoder and a decoder
            return False
        deep = deepened(walk, how, self.copies)
        one = np.vstack([deep.lives, walk.raw_bytes[deep.entries], walk.categories[deep.entries]])
        other = np.vstack([whole.lives, whole.raw_bytes, whole.categories])
        return one.shape == other.shape and np.array_equal(_sorted(one), _sorted(other))


def _sorted(columns: Ints) -> Ints:
    """The columns in a fixed order."""
    return columns[:, np.lexsort(columns)]


class Walked:
    """The walks of a network so far, by point. The operations of all are those of `walk`."""

    def __init__(
        self, record: Record, shown: Shown, one: Walk, point: WalkSizes, most: int | None, chunking: Chunking | None = None
    ) -> None:
        """`one`: the walk of a first step at `point`; `most`: no sequence is longer; `chunking`: the walks' chunks."""
        self._record, self.shown, self._most, self.chunking = record, shown, most, chunking
        self.walk = shown.walk(record, point)
        self.how: Repeats | None = repeats(self.walk, shown.runs)
        if self.how is None and shown.runs:  # a later step does something else in layers that are alike in a first one
            raise CollectorError("its layers are not alike in a later step.")
        self._one, self._again = one, one.same_tensors_in(self.walk)
        self._walks = {point: self.walk}

    @classmethod
    def of(
        cls,
        record: Record,
        whole: Walk,
        told: Sequence[object],
        point: WalkSizes,
        most: int | None,
        chunking: Chunking | None = None,
    ) -> Walked:
        """The walk at `point`, of as few layers as show all that the network of the walk `whole` does."""
        for shown in _fewer_layers(whole, told):
            with suppress(CollectorError):  # the network has no fewer layers, or its code needs those that are skipped
                one = shown.walk(record, point, 1)
                if shown.stands_for(one, whole):
                    return cls(record, shown, one, point, most, chunking)
        return cls(record, Shown(), whole, point, most, chunking)

    def only_at(self, point: WalkSizes) -> Walked:
        """The same layers at `point` alone. Raises: CollectorError."""
        return Walked(self._record, self.shown, self.shown.walk(self._record, point, 1), point, self._most, self.chunking)

    def alike(self, point: WalkSizes) -> bool:
        """Whether the same operations run at `point`, whose walk is then known."""
        if point not in self._walks and (self._most is None or max(point[1:]) <= self._most):
            with suppress(CollectorError):  # the library does not run it
                other = self.shown.walk(self._record, point, 2 if self._again is None else 1)
                if self._again is not None and other.same_program(self._one):
                    self._walks[point] = replace(self.walk, raw_bytes=other.raw_bytes[self._again])
                elif other.same_program(self.walk):
                    self._walks[point] = other
        return point in self._walks

    def all_alike(self, points: Iterable[WalkSizes]) -> bool:
        """Whether the same operations run at all `points`."""
        return all(self.alike(point) for point in points)

    def __getitem__(self, point: WalkSizes) -> Walk:
        return self._walks[point]

    def sizes(self) -> dict[WalkSizes, Ints]:
        """The bytes of each tensor, by point, as sizes depend on it."""
        return {self._told(point): walk.raw_bytes for point, walk in self._walks.items()}

    def sizes_through(self, points: Sequence[WalkSizes]) -> Sizes | None:
        """The sizes that follow from these points, if all others confirm them."""
        solving = [self._told(point) for point in points]
        samples = self.sizes() if len(points) > 1 else {solving[0]: self[points[0]].raw_bytes}
        return (through if self.chunking is None or len(points) == 1 else through_chunks)(samples, solving)

    def confirms(self, sizes: Sizes, point: WalkSizes) -> bool:
        """Whether the walk of `point` has these sizes."""
        return not sizes.wrong({self._told(point): self[point].raw_bytes}).any()

    def _told(self, point: WalkSizes) -> WalkSizes:
        """The numbers on which sizes depend at a point: the number of chunks too, if there are some."""
        return point if self.chunking is None else (*point, self.chunking.rule.number(*point))


def _fewer_layers(whole: Walk, told: Sequence[object]) -> list[Shown]:
    """Which layers may stand for the network of the walk `whole`, the fewest first."""
    found = []
    if whole.kinds:
        thin = thinned(whole)
        found += [Shown(None, thin.skipped, thin.runs, thin.copies)] if thin.skipped else []
    short = short_depth(whole, told)
    if short is not None:
        more = (whole.num_layers - short.layers) // sum(run.unit for run in short.runs)
        longer = bool(found) and short.layers > whole.num_layers - len(found[0].skipped)
        # a short network is built faster than a deep one that skips as many layers
        found.insert(int(longer), Shown(short.layers, (), short.runs, (more,) * len(short.runs)))
    return found
