"""`Walk`: one recorded step as `peakcast.collectors.tracing.walks` writes it, as columns, without instants at which nothing
is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
PLACE, BORN_STRETCH, BORN_AT, DIES_STRETCH, DIES_AT, HANDED_ON_STRETCH, HANDED_ON_AT = range(7)
"""The rows of `Walk.lives`. Stretches: `collectors/tracing/stretches.py`; places: `peakcast/timelines/places.py`."""


class WalkedParameter(NamedTuple):
    """A weight of a recorded network, with the module of which it is and its name there."""

    module: str
    name: str
    shape: tuple[int, ...]
    element_bytes: int
    trains: bool


@dataclass(frozen=True, slots=True)
class Visit:
    """A module is entered or left, before the operation `instant` of a stretch. `runs`: "forward", "again" (a
    recomputation) or "backward". `weights`: the weights that it reads, as (module, name); module "" means the block at its
    place or after it."""

    runs: str
    enters: bool
    module: str
    instant: int
    weights: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, written: Sequence[Any], kept: Ints) -> Visit:
        """The visit that a worker wrote, of whose instants only those `kept` count."""
        runs, enters, module, instant, weights = written
        return cls(runs, bool(enters), module, int(np.searchsorted(kept, instant)), tuple(map(tuple, weights)))


@dataclass(frozen=True, slots=True)
class GatheredGroup:
    """Modules outside of the blocks that FSDP gathers together (`collectors/tracing/fsdp_wrapping.py`). `role`: "class",
    "table", "tail" or "elsewhere"; `begins`: the block in which the first of them runs; `weights`: as (module, name)."""

    role: str
    begins: str
    weights: tuple[tuple[str, str], ...]


def pairs_of(written: Iterable[Sequence[object]]) -> tuple[tuple[str, str], ...]:
    """Pairs of texts, as JSON has them."""
    return tuple((str(one), str(other)) for one, other in written)


def groups_from_json(written: Iterable[Sequence[Any]]) -> tuple[GatheredGroup, ...]:
    """Groups, as JSON has them."""
    return tuple(GatheredGroup(str(role), str(begins), pairs_of(weights)) for role, begins, weights in written)


@dataclass(frozen=True)
class Walk:
    """One step of a network on one GPU, of one micro-batch. Entries are in the order in which they were allocated."""

    num_places: int
    labels: tuple[tuple[str, ...], ...]
    """For each stretch, the operations that allocate something."""
    phases: tuple[bytes, ...]
    names: tuple[str, ...]
    categories: Ints
    raw_bytes: Ints
    """Bytes as requested, not rounded."""
    lives: Ints
    """[7, num_entries]: PLACE; BORN_STRETCH (-1: before this step); BORN_AT (if before this step: 0 before the first step,
    1 since); DIES_STRETCH (-1: not in this step); DIES_AT; for a gradient, when autograd gives it to its parameter:
    HANDED_ON_STRETCH (-1 for other tensors) and HANDED_ON_AT. Instants count from the stretch's first."""
    gradients: npt.NDArray[np.bool_]
    parameters: tuple[WalkedParameter, ...]
    wrapped: bool = True
    """Whether FSDP makes a unit of each block."""
    visits: tuple[tuple[Visit, ...], ...] = ()
    """For each stretch, the modules that are entered and left, in order."""
    groups: tuple[GatheredGroup, ...] = ()
    """Empty if it was not recorded what FSDP gathers together."""
    stacks: int = 1
    """2 for an encoder-decoder, whose two stacks are equally deep."""
    image_tokens: int = 0
    """Number of tokens that represent each image of the batch."""
    replaced: tuple[tuple[str, str], ...] = ()
    """Functions that ran as the library's own code, and the packages whose kernels it calls where they are installed."""
    returned: tuple[int, ...] = ()
    """Entries that the network returns, logits first; empty if that was not recorded."""
    has_targets: bool = False
    """Whether it is of an encoder-decoder, whose targets may be of another length."""
    kinds: tuple[int, ...] = ()
    """For each block, the number of its kind by classes and attributes; empty if its blocks cannot be skipped."""

    @property
    def num_layers(self) -> int:
        """Number of blocks of the network, of all stacks together."""
        return self.num_places // 2

    def same_program(self, other: Walk) -> bool:
        """Whether both ran the same operations, with results of the same lifetimes; only sizes may differ."""
        return (
            self.labels == other.labels
            and self.phases == other.phases
            and self.names == other.names
            and np.array_equal(self.categories, other.categories)
            and np.array_equal(self.lives, other.lives)
        )

    def same_tensors_in(self, later: Walk) -> Ints | None:
        """This is the walk of a training's first step, `later` that of another one. For each entry of `later`: the entry of
        this walk that is the same tensor, where what the later step finds in memory is what a step leaves there. None if
        the two steps run other operations."""
        left = np.flatnonzero((self.lives[DIES_STRETCH] < 0) & (self.lives[BORN_STRETCH] >= 0)).tolist()
        found = (later.lives[BORN_STRETCH] < 0) & (later.lives[BORN_AT] > 0)
        same = np.zeros(len(later.names), dtype=np.int64)
        if self.labels != later.labels or self.phases != later.phases or (~found).sum() != len(self.names):
            return None
        same[~found] = np.arange(len(self.names))
        for entry in np.flatnonzero(found).tolist():
            size, name = later.raw_bytes[entry], later.names[entry]
            twin = next((one for one in left if self.names[one] == name and self.raw_bytes[one] == size), None)
            if twin is None:
                return None
            left.remove(twin)
            same[entry] = twin
        alike = np.array_equal(self.raw_bytes[same], later.raw_bytes) and np.array_equal(
            self.lives[:, same[~found]], later.lives[:, ~found]
        )
        return same if alike else None

    @classmethod
    def read(cls, mapping: Mapping[str, Any]) -> Walk:
        """The walk that a worker wrote."""
        names, *columns = zip(*mapping["entries"], strict=True)
        categories, raw, *rows, gradients = np.array(columns, dtype=np.int64)
        lives = np.stack(rows)
        born_stretch, born = lives[BORN_STRETCH], lives[BORN_AT].copy()
        labels, phases, visits = [], [], []
        for index, (every_label, every_phase) in enumerate(mapping["stretches"]):
            kept = np.unique(born[born_stretch == index])
            labels.append(tuple(every_label[instant] for instant in kept))
            phases.append(bytes(every_phase[instant] for instant in kept))
            # a tensor dies, or goes to its parameter, when the next operation that allocates begins
            for stretch, row in ((BORN_STRETCH, BORN_AT), (DIES_STRETCH, DIES_AT), (HANDED_ON_STRETCH, HANDED_ON_AT)):
                of = lives[stretch] == index
                lives[row, of] = np.searchsorted(kept, lives[row, of])
            visits.append(tuple(Visit.read(written, kept) for written in mapping["visits"][index]))
        parameters = (WalkedParameter(of, name, tuple(shape), *rest) for of, name, shape, *rest in mapping["parameters"])
        return cls(
            mapping["num_places"],
            tuple(labels),
            tuple(phases),
            tuple(names),
            categories,
            raw,
            lives,
            gradients.astype(bool),
            tuple(parameters),
            bool(mapping.get("wrapped", True)),
            tuple(visits),
            groups_from_json(mapping.get("groups", ())),
            int(mapping.get("stacks", 1)),
            int(mapping.get("image_tokens", 0)),
            pairs_of(mapping.get("replaced", ())),
            tuple(mapping.get("returned", ())),
            bool(mapping.get("has_targets", False)),
            tuple(mapping.get("kinds", ())),
        )
