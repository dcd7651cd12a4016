"""`Timeline`: the tensors of a training step over its instants. All of peakcast is built on this type.

An *instant* is a moment of the step between two operations, counted from 0; each belongs to a phase. An entry lives at the
instants `born <= t < dies`. The peak is the largest sum of the bytes that live at one instant. The ledger, the trace and
the allocator's snapshot all produce this type, so any two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from peakcast.core.texts import Texts


class Category(IntEnum):
    """The purpose of a tensor. Every byte has exactly one category."""

    PARAMETERS = 0
    MAIN_PARAMETERS = 1
    GRADIENTS = 2
    OPTIMIZER_STATES = 3
    ACTIVATIONS = 4
    LOGITS = 5
    TEMPORARIES = 6
    OPTIMIZER_TEMPORARIES = 7
    COMMUNICATION_BUFFERS = 8
    WORKSPACES = 9
    INPUTS = 10
    OTHER = 11
    REFERENCE_PARAMETERS = 12
    """Parameters of the frozen network with which preference losses compare the trained one."""
    KV_CACHE = 13
    """Keys and values of earlier tokens, kept during generation."""


class Phase(IntEnum):
    """The phases of a step, in order. `INIT` is everything before the first step."""

    INIT = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    GRADIENT_CLIPPING = 4
    OPTIMIZER_STEP = 5


EMPTIED = "empty_cache"
"""The label of an instant at which the allocator gives its whole cache back (`torch.cuda.empty_cache`)."""
PRIVATE_STREAM = 65
"""Streams from this one on stand for private pools of memory, as CUDA graphs have them: they keep their cache. A program
has at most 64 streams of its own (c10/cuda/CUDAStream.cpp: 32 of each of two priorities)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor (or a group of equal ones): `num_bytes` from instant `born` until before instant `dies`."""

    name: str
    category: Category
    num_bytes: int
    born: int
    dies: int
    module: str = ""
    stream: int = 0
    reusable: int = 0
    """The first instant at which the allocator may reuse its block, if that is after `dies`."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest sum of a timeline (or of one phase of it): its instant and its bytes."""

    num_bytes: int
    instant: int
    phase: Phase


@dataclass(frozen=True)
class Timeline:
    """Entries in columns (numpy arrays of one length) over `len(phases)` instants.

    Shapes: `num_bytes`, `born`, `dies`, `categories`, `streams`, `reusable` are [num_entries]; `phases` is [num_instants];
    `labels[t]` says what happens at instant t ("" if unknown). Bytes are ints.

    `reusable`: the instant from which the allocator may reuse an entry's block (None: from `dies` for all). Until then the
    block no longer counts as allocated, but cannot be used for other requests: another stream still uses it.
    """

    names: Sequence[str]
    modules: Sequence[str]
    categories: npt.NDArray[np.int8]
    num_bytes: npt.NDArray[np.int64]
    born: npt.NDArray[np.int64]
    dies: npt.NDArray[np.int64]
    phases: npt.NDArray[np.int8]
    labels: Sequence[str] = ()
    streams: npt.NDArray[np.int8] | None = None
    reusable: npt.NDArray[np.int64] | None = None
    decoding_from: int | None = None
    """Of a generation: the first instant after the prompt has been read; None for other timelines."""

    @classmethod
    def from_entries(cls, entries: Iterable[Entry], phases: Sequence[Phase | int], labels: Sequence[str] = ()) -> Timeline:
        """A timeline of `entries` over instants with these phases."""
        rows = list(entries)
        return cls(
            names=[e.name for e in rows],
            modules=[e.module for e in rows],
            categories=np.array([e.category for e in rows], dtype=np.int8),
            num_bytes=np.array([e.num_bytes for e in rows], dtype=np.int64),
            born=np.array([e.born for e in rows], dtype=np.int64),
            dies=np.array([e.dies for e in rows], dtype=np.int64),
            phases=np.array(phases, dtype=np.int8),
            labels=labels,
            streams=np.array([e.stream for e in rows], dtype=np.int8),
            reusable=np.array([max(e.reusable, e.dies) for e in rows], dtype=np.int64),
        )

    @cached_property
    def totals(self) -> npt.NDArray[np.int64]:
        """Bytes alive at each instant, [num_instants]."""
        n = len(self.phases)
        change = np.zeros(n + 1, dtype=np.int64)
        np.add.at(change, np.minimum(self.born, n), self.num_bytes)
        np.subtract.at(change, np.minimum(self.dies, n), self.num_bytes)
        total: npt.NDArray[np.int64] = np.cumsum(change)[:n]
        return total

    def peak(self, phase: Phase | None = None) -> Peak:
        """The largest sum over all instants, or over those of `phase` (0 bytes if it has none)."""
        if phase is None:
            return self._peak
        inside = self.phases == phase
        return self._largest(np.where(inside, self.totals, -1)) if inside.any() else Peak(0, 0, phase)

    @cached_property
    def _peak(self) -> Peak:
        return self._largest(self.totals)

    def _largest(self, totals: npt.NDArray[np.int64]) -> Peak:
        instant = int(np.argmax(totals))
        return Peak(int(totals[instant]), instant, Phase(int(self.phases[instant])))

    def phase_peaks(self) -> dict[Phase, int]:
        """The peak in bytes of every phase that has instants."""
        largest = np.full(len(Phase), -1, dtype=np.int64)
        np.maximum.at(largest, self.phases.astype(np.intp), self.totals)
        return {phase: size for phase, size in zip(Phase, largest.tolist(), strict=True) if size >= 0}

    def alive_at(self, instant: int) -> npt.NDArray[np.bool_]:
        """Mask over the entries alive at `instant`, [num_entries]."""
        return (self.born <= instant) & (instant < self.dies)

    def composition(self, instant: int) -> dict[Category, int]:
        """Bytes per category at `instant`, largest first; they add up to `totals[instant]`."""
        alive = self.alive_at(instant)
        sums = np.zeros(len(Category), dtype=np.int64)
        np.add.at(sums, self.categories[alive], self.num_bytes[alive])
        parts = {category: int(sums[category]) for category in Category if sums[category]}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    def largest_at(self, instant: int, count: int = 5) -> list[tuple[str, Category, int, int]]:
        """The `count` biggest (name, category, bytes, number of tensors) at `instant`; tensors with equal names are added
        up."""
        alive = np.flatnonzero(self.alive_at(instant))
        alike = Texts.of(self.names).numbers[alive] * len(Category) + self.categories[alive]
        _, firsts, group = np.unique(alike, return_index=True, return_inverse=True)
        totals = np.zeros(len(firsts), dtype=np.int64)
        np.add.at(totals, group, self.num_bytes[alive])
        counts = np.bincount(group, minlength=len(firsts))
        largest = np.lexsort((firsts, -totals))[:count].tolist()
        entries = alive[firsts]
        return [
            (self.names[entries[i]], Category(self.categories[entries[i]]), int(totals[i]), int(counts[i])) for i in largest
        ]
