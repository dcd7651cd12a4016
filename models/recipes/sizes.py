"""Sizes: the bytes of every tensor as a polynomial in micro-batch and sequence length, determined by a few walks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from peakcast.models.ledger.tape.polynomials import EXPONENTS, PARTS
from peakcast.models.recipes.walk import Ints

LARGEST = 2.0**62
"""Least bytes that are too many for 64 bits, with a margin for rounding."""
Exponents = tuple[tuple[int, ...], ...]
LENGTH_EXPONENTS = ((0, 0), (0, 1), (0, 2))
"""Exponents of micro-batch and sequence length if the micro-batch is always one."""
TARGET_EXPONENTS = ((0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 0, 1), (0, 0, 2), (0, 1, 1))
"""The same where targets have a length of their own."""
BATCH_AND_TARGETS = tuple((batch, *lengths) for batch in (0, 1) for _, *lengths in TARGET_EXPONENTS)
BY_POINTS: dict[tuple[int, int], Exponents] = {
    **{(2, len(one)): one for one in (((0, 0),), LENGTH_EXPONENTS, EXPONENTS)},
    **{(3, len(one)): one for one in (((0, 0, 0),), TARGET_EXPONENTS, BATCH_AND_TARGETS)},
}
"""(numbers of a point, number of points through which polynomials go) -> their exponents."""
MULTIPLES = (1, 8, 16, 32, 64, 128, 256)
"""Multiples to which kernels round up the length of a sequence."""


@dataclass(frozen=True)
class Sizes:
    """The bytes of each tensor. `coefficients` [num_terms, num_entries] are in 1/PARTS of a byte; `multiples`
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
            found[which] = powers @ self.coefficients[:, which] // PARTS
        return found

    def confirmed(self, samples: Mapping[tuple[int, ...], Ints]) -> Sizes | None:
        """With the multiples to which lengths are rounded up, as `samples` show; None if a tensor still has another size in
        one of them."""
        found = self
        for multiple in MULTIPLES:
            wrong = found.wrong(samples)
            if not wrong.any():
                return found
            found = replace(found, multiples=np.where(wrong, multiple, found.multiples))
        return None if found.wrong(samples).any() else found

    def wrong(self, samples: Mapping[tuple[int, ...], Ints]) -> npt.NDArray[np.bool_]:
        """Which tensors have another size in one of `samples`. [num_entries]"""
        wrong = np.zeros(len(self.multiples), dtype=bool)
        for point, num_bytes in samples.items():
            wrong |= self.at(*point) != num_bytes
        return wrong


def through(samples: Mapping[tuple[int, ...], Ints], solving: Sequence[tuple[int, ...]]) -> Sizes | None:
    """The polynomials through the points `solving`. `samples`: point -> bytes of each tensor; None if another sample has
    other sizes."""
    exponents = BY_POINTS[len(solving[0]), len(solving)]
    powers = np.stack([_powers(point, exponents) for point in solving])
    bytes_of = np.stack([samples[point] for point in solving])
    scale = powers.max(axis=0).astype(float)
    solved = np.linalg.solve(powers / scale, bytes_of.astype(float) * PARTS) / scale[:, None]
    found = Sizes(exponents, np.rint(solved).astype(np.int64), np.ones(bytes_of.shape[1], dtype=np.int64))
    return found.confirmed(samples)


def _powers(point: Sequence[int], exponents: Exponents) -> Ints:
    """The powers of a point's numbers, term by term."""
    return np.array([math.prod(map(pow, point, powers)) for powers in exponents], dtype=np.int64)
