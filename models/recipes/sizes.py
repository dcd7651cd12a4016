"""Sizes: the bytes of every tensor as a polynomial in micro-batch and sequence length, determined by a few walks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from peakcast.models.ledger.tape.polynomials import EXPONENTS, PARTS_OF_A_BYTE
from peakcast.models.recipes.walk import Ints

LARGEST = 2.0**62
"""Least bytes that are too many for 64 bits, with a margin for rounding."""
Exponents = tuple[tuple[int, ...], ...]
LENGTH_EXPONENTS = ((0, 0), (0, 1), (0, 2))
"""Exponents of micro-batch and sequence length if the micro-batch is always one."""
TARGET_EXPONENTS = ((0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 0, 1), (0, 0, 2), (0, 1, 1))
"""The same where targets have a length of their own."""
BATCH_AND_TARGETS = tuple((batch, *lengths) for batch in (0, 1) for _, *lengths in TARGET_EXPONENTS)
CHUNK_EXPONENTS = ((0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 0, 1))
"""The same where the third number is that of the chunks of the loss."""
BATCH_AND_CHUNKS = tuple((batch, *rest) for batch in (0, 1) for _, *rest in CHUNK_EXPONENTS)
BY_POINTS: dict[tuple[int, int], Exponents] = {
    **{(2, len(one)): one for one in (((0, 0),), LENGTH_EXPONENTS, EXPONENTS)},
    **{(3, len(one)): one for one in (((0, 0, 0),), TARGET_EXPONENTS, BATCH_AND_TARGETS)},
    **{(3, len(one)): one for one in (CHUNK_EXPONENTS, BATCH_AND_CHUNKS)},
}
"""(numbers of a point, number of points through which polynomials go) -> their exponents."""
MULTIPLES = (1, 8, 16, 32, 64, 128, 256)
"""Multiples to which kernels round up the length of a sequence."""


@dataclass(frozen=True)
class Sizes:
    """The bytes of each tensor. `coefficients` [num_terms, num_entries] are in `PARTS_OF_A_BYTE`; `multiples`
    [num_entries]: the multiple to which the length is first rounded up."""

    exponents: Exponents
    coefficients: Ints
    multiples: Ints

    def at(self, *point: int) -> Ints:
        """Bytes of each tensor, not rounded, for a micro-batch and one or two lengths. [num_entries]"""
        batch, *lengths = point
        found = np.zeros(len(self.multiples), dtype=np.int64)
        for multiple in np.unique(self.multiples).tolist():
            which = self.multiples == multiple
            powers = _powers((batch, *(-(-length // multiple) * multiple for length in lengths)), self.exponents)
            if (powers.astype(float) @ abs(self.coefficients[:, which]).astype(float)).max(initial=0.0) > LARGEST:
                tokens = " and ".join(map(str, lengths))
                raise OverflowError(f"a tensor of {batch} sequences of {tokens} tokens has more bytes than 64 bits count")
            found[which] = powers @ self.coefficients[:, which] // PARTS_OF_A_BYTE
        return found

    def confirmed(self, samples: Mapping[tuple[int, ...], Ints]) -> Sizes | None:
        """With the multiples to which lengths are rounded up, as `samples` show; None if a tensor still has another size in
        one of them."""
        found = self.rounded_up(samples)
        return None if found.wrong(samples).any() else found

    def rounded_up(self, samples: Mapping[tuple[int, ...], Ints]) -> Sizes:
        """With the multiples that explain most of `samples`."""
        found = self
        for multiple in MULTIPLES:
            wrong = found.wrong(samples)
            if not wrong.any():
                break
            found = replace(found, multiples=np.where(wrong, multiple, found.multiples))
        return found

    def wrong(self, samples: Mapping[tuple[int, ...], Ints]) -> npt.NDArray[np.bool_]:
        """Which tensors have another size in one of `samples`. [num_entries]"""
        wrong = np.zeros(len(self.multiples), dtype=bool)
        for point, num_bytes in samples.items():
            wrong |= self.at(*point) != num_bytes
        return wrong


    def with_last(self, last: int) -> Sizes:
        """With this value for the last number of a point, which is left out of points then."""
        exponents = tuple(dict.fromkeys(powers[:-1] for powers in self.exponents))
        coefficients = np.zeros((len(exponents), len(self.multiples)), dtype=np.int64)
        for powers, row in zip(self.exponents, self.coefficients, strict=True):
            coefficients[exponents.index(powers[:-1])] += row * last ** powers[-1]
        return Sizes(exponents, coefficients, self.multiples)

    def of(self, entries: Ints) -> Sizes:
        """Those of other entries, each of which is one of these."""
        return Sizes(self.exponents, self.coefficients[:, entries], self.multiples[entries])


def through(samples: Mapping[tuple[int, ...], Ints], solving: Sequence[tuple[int, ...]]) -> Sizes | None:
    """The polynomials through the points `solving`. `samples`: point -> bytes of each tensor; None if another sample has
    other sizes."""
    return _solved(samples, solving, BY_POINTS[len(solving[0]), len(solving)]).confirmed(samples)


def through_chunks(samples: Mapping[tuple[int, ...], Ints], solving: Sequence[tuple[int, ...]]) -> Sizes | None:
    """As `through`, of points whose last number is that of the chunks, on which only few tensors depend: lengths that
    kernels may round up are told by the points whose lengths are multiples of all."""
    exponents = BY_POINTS[len(solving[0]), len(solving)]
    plain = tuple(powers for powers in exponents if not powers[-1])
    even = _solved(samples, [point for point in solving if point[1] % MULTIPLES[-2] == 0], plain).rounded_up(samples)
    wrong, all_terms = even.wrong(samples), _solved(samples, solving, exponents)
    coefficients = np.zeros_like(all_terms.coefficients)
    coefficients[[exponents.index(powers) for powers in plain]] = even.coefficients
    coefficients[:, wrong] = all_terms.coefficients[:, wrong]
    return Sizes(exponents, coefficients, np.where(wrong, 1, even.multiples)).confirmed(samples)


def _solved(samples: Mapping[tuple[int, ...], Ints], solving: Sequence[tuple[int, ...]], exponents: Exponents) -> Sizes:
    """The polynomials of these exponents through as many points."""
    powers = np.stack([_powers(point, exponents) for point in solving])
    bytes_of = np.stack([samples[point] for point in solving])
    scale = powers.max(axis=0).astype(float)
    solved = np.linalg.solve(powers / scale, bytes_of.astype(float) * PARTS_OF_A_BYTE) / scale[:, None]
    return Sizes(exponents, np.rint(solved).astype(np.int64), np.ones(bytes_of.shape[1], dtype=np.int64))


def _powers(point: Sequence[int], exponents: Exponents) -> Ints:
    """The powers of a point's numbers, term by term."""
    return np.array([math.prod(map(pow, point, powers)) for powers in exponents], dtype=np.int64)
