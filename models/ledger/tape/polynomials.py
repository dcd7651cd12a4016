"""The bytes of every tensor of a step as a polynomial in micro-batch and sequence length, and the peaks that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from peakcast.models.allocator.rounding import MIN_BLOCK_BYTES
from peakcast.timelines.timeline import Timeline

Ints = npt.NDArray[np.int64]
PARTS_OF_A_BYTE = 64
"""Coefficients are in fractions of a byte: a dropout mask has an eighth of a byte per element, and a layout divides it."""
UNIT = MIN_BLOCK_BYTES * PARTS_OF_A_BYTE
BOUND = 1.02
"""Factor by which a tensor that is not a polynomial may exceed its largest bytes per token at the corners."""
POINTS_AT_ONCE = 128
SHRINKS = 0.9
"""Instants are discarded in rounds, until one keeps more than this share of them."""
EXPONENTS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))
"""Exponents of micro-batch and sequence length, term by term."""


@dataclass(frozen=True, slots=True)
class Polynomials:
    """The bytes of every tensor as a polynomial. `coefficients` [num_terms, num_entries]: in parts of a byte. Lifetimes
    are those of `lives`. Tensors marked `odd` are not polynomials; they have at most `odd_rate` parts per
    token."""

    lives: Timeline
    exponents: tuple[tuple[int, int], ...]
    coefficients: Ints
    odd: npt.NDArray[np.bool_]
    odd_rate: npt.NDArray[np.float64]
    added: Ints
    """Bytes that each layout has beyond the first layout at each instant, [num_layouts, num_instants]."""

    @classmethod
    def through(cls, timelines: Sequence[Timeline], samples: Sequence[tuple[int, int]]) -> Polynomials | None:
        """The polynomials through the samples; None if lifetimes differ between them."""
        if not all(_same_lives(timelines[0], other) for other in timelines[1:]):
            return None
        exponents = EXPONENTS if len(samples) == len(EXPONENTS) else EXPONENTS[:2]
        powers = _powers(np.array(samples, dtype=np.int64).T, exponents)
        scale = powers.max(axis=1).astype(float)
        sizes = np.stack([timeline.num_bytes for timeline in timelines]) * PARTS_OF_A_BYTE
        solved = np.linalg.solve(powers.T / scale, sizes.astype(float)) / scale[:, None]
        coefficients = np.rint(solved).astype(np.int64)
        odd = (powers.T @ coefficients != sizes).any(axis=0)
        coefficients[:, odd] = 0
        nothing = np.zeros((1, len(timelines[0].phases)), dtype=np.int64)
        return cls(timelines[0], exponents, coefficients, odd, np.zeros(len(odd)), nothing)

    def with_layouts(self, timelines: Sequence[Timeline]) -> Polynomials | None:
        """With the bytes that each layout's timeline has beyond the first one's; None if their instants differ."""
        if any(len(timeline.phases) != len(self.lives.phases) for timeline in timelines):
            return None
        totals = np.stack([timeline.totals for timeline in timelines])
        return replace(self, added=totals - totals[0])

    def adds(self, layout: int, point: tuple[int, int], timeline: Timeline) -> bool:
        """Whether the bytes that `layout` has beyond the first one are the same at the sample `point`."""
        sizes = _powers(np.array(point)[:, None], self.exponents)[:, 0] @ self.coefficients
        if self.odd.any() or len(timeline.phases) != len(self.lives.phases):
            sizes = np.where(self.odd, 0, sizes)
            odd_lives = self._sums(self.odd.astype(np.int64)[None])[0] > 0
        else:
            odd_lives = np.zeros(len(self.lives.phases), dtype=bool)
        expected = self._sums(sizes[None])[0] // PARTS_OF_A_BYTE + self.added[layout]
        return bool(((expected == timeline.totals) | odd_lives).all())

    def checked(self, corners: Mapping[tuple[int, int], Timeline]) -> Polynomials | None:
        """With the tensors marked as odd whose polynomial is wrong at `corners`; None if lifetimes differ."""
        if not all(_same_lives(self.lives, timeline) for timeline in corners.values()):
            return None
        odd, rate = self.odd.copy(), np.zeros(len(self.odd))
        for (batch, sequence), timeline in corners.items():
            powers = _powers(np.array([[batch], [sequence]]), self.exponents)[:, 0]
            odd |= _rounded(powers @ self.coefficients) != timeline.num_bytes * PARTS_OF_A_BYTE
            rate = np.maximum(rate, timeline.num_bytes * PARTS_OF_A_BYTE / (batch * sequence))
        return replace(self, odd=odd, odd_rate=rate * BOUND)

    def peaks(self, points: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Peak bytes [num_layouts, num_points] at `points` [2, num_points], and whether each is certain."""
        coefficients = np.where(self.odd, 0, self.coefficients)
        irregular = np.flatnonzero((coefficients % UNIT).any(axis=0))
        classes, which = np.unique(coefficients[:, irregular], axis=1, return_inverse=True)
        counted = np.zeros((classes.shape[1], len(self.odd)), dtype=np.int64)
        counted[which, irregular] = 1
        # [num_rows, num_instants]: summed coefficients of the tensors alive at an instant, then their number in each class
        rows = self._sums(np.concatenate([coefficients, counted]))
        powers = _powers(points, self.exponents)
        unrounded = classes.T @ powers
        weights = np.concatenate([powers, _rounded(unrounded) - unrounded])
        more = self._sums(np.where(self.odd, np.ceil(self.odd_rate), 0).astype(np.int64)[None])[0]
        tokens = points[0] * points[1]
        shape = len(self.added), points.shape[1]
        peaks, bounds = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for instants in _instants_with_equal_differences(self.added):
            added = self.added[:, instants[:1]] * PARTS_OF_A_BYTE
            peaks = np.maximum(peaks, _largest(rows[:, instants], weights) + added)
            touched = instants[more[instants] > 0]
            if len(touched):
                bound = _largest(np.vstack([rows[:, touched], more[touched]]), np.vstack([weights, tokens]))
                bounds = np.maximum(bounds, bound + added)
        return peaks // PARTS_OF_A_BYTE, bounds <= peaks

    def _sums(self, values: Ints) -> Ints:
        """For each row of `values` [num_rows, num_entries], its sum over the tensors alive at each instant. [num_rows,
        num_instants]"""
        n = len(self.lives.phases)
        born, dies = np.minimum(self.lives.born, n), np.minimum(self.lives.dies, n)
        sums = np.zeros((len(values), n), dtype=np.int64)
        for row, of_entries in enumerate(values):
            used = np.flatnonzero(of_entries)
            changes = np.bincount(born[used], of_entries[used], n + 1) - np.bincount(dies[used], of_entries[used], n + 1)
            sums[row] = np.cumsum(changes.astype(np.int64))[:n]
        return sums


def _powers(points: Ints, exponents: Sequence[tuple[int, int]]) -> Ints:
    """The powers of micro-batch and sequence length, [num_terms, num_points]."""
    return np.stack([points[0] ** i * points[1] ** j for i, j in exponents])


def _same_lives(one: Timeline, other: Timeline) -> bool:
    """Whether two timelines have the same tensors with the same lifetimes, apart from sizes."""
    return (
        len(one.phases) == len(other.phases)
        and np.array_equal(one.born, other.born)
        and np.array_equal(one.dies, other.dies)
        and np.array_equal(one.categories, other.categories)
    )


def _rounded(sizes: Ints) -> Ints:
    """Sizes rounded as the allocator does."""
    return -(-sizes // UNIT) * UNIT


def _largest(rows: Ints, weights: Ints) -> Ints:
    """The largest of `rows`.T @ `weights` over the columns of `rows` (instants), [num_points].

    Points are sorted by tokens, and weights are not negative. For some neighbouring points at a time, only those instants
    are multiplied out whose upper bound reaches the best lower bound: a few of thousands.
    """
    rows = _undominated(rows)
    largest = np.empty(weights.shape[1], dtype=np.int64)
    positive = np.maximum(rows, 0)
    negative = rows - positive
    for start in range(0, len(largest), POINTS_AT_ONCE):
        some = weights[:, start : start + POINTS_AT_ONCE]
        least, most = some.min(axis=1), some.max(axis=1)
        kept = most @ positive + least @ negative >= (least @ positive + most @ negative).max()
        largest[start : start + POINTS_AT_ONCE] = (rows[:, kept].T @ some).max(axis=0)
    return largest


def _undominated(rows: Ints) -> Ints:
    """`rows` without the columns that nowhere exceed a neighbour: no weights make them the largest."""
    while True:
        rising, falling = rows[:, :-1] <= rows[:, 1:], rows[:, 1:] <= rows[:, :-1]
        below_next = rising.all(axis=0)
        kept = np.ones(rows.shape[1], dtype=bool)
        kept[:-1] &= ~below_next
        kept[1:] &= ~falling.all(axis=0) | below_next  # of equal columns the last stays
        if kept.mean() > SHRINKS:
            return rows
        rows = rows[:, kept]


def _instants_with_equal_differences(added: Ints) -> list[Ints]:
    """Groups of consecutive instants at which the layouts differ by the same bytes."""
    changes = np.flatnonzero((added[:, 1:] != added[:, :-1]).any(axis=0)) + 1
    return np.split(np.arange(added.shape[1]), changes)
