"""Sizes: bytes of every tensor as a polynomial in micro-batch and sequence length, through a few walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from peakcast.models.analytical.polynomials import EXPONENTS, PARTS
from peakcast.models.recipes.walk import Ints

LARGEST = 2.0**62
"""Of what is counted in 64 bits, with room for rounding."""
CONSTANT = ((0, 0),)
LENGTH_EXPONENTS = ((0, 0), (0, 1), (0, 2))
"""Where the micro-batch is one."""
MULTIPLES = (1, 8, 16, 32, 64, 128, 256)
"""To which kernels round the length of a sequence up."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of each tensor. `coefficients` [num_terms, num_entries] are in 1/PARTS of a byte; `multiples` [num_entries]: to
    what the length is rounded up first."""

    exponents: tuple[tuple[int, int], ...]
    coefficients: Ints
    multiples: Ints

    def at(self, batch: int, length: int) -> Ints:
        """Bytes of each tensor, unrounded."""
        found = np.zeros(len(self.multiples), dtype=np.int64)
        for multiple in np.unique(self.multiples).tolist():
            which = self.multiples == multiple
            powers = _powers(batch, -(-length // multiple) * multiple, self.exponents)
            if (powers.astype(float) @ abs(self.coefficients[:, which]).astype(float)).max(initial=0.0) > LARGEST:
                raise OverflowError(f"a tensor of {batch} sequences of {length} tokens has more bytes than 64 bits count")
            found[which] = powers @ self.coefficients[:, which] // PARTS
        return found

    def confirmed(self, samples: Mapping[tuple[int, int], Ints]) -> Sizes | None:
        """With what rounds lengths up, as `samples` show; None where a tensor of theirs has another size all the same."""
        found = self
        for multiple in MULTIPLES:
            wrong = found.wrong(samples)
            if not wrong.any():
                return found
            found = replace(found, multiples=np.where(wrong, multiple, found.multiples))
        return None if found.wrong(samples).any() else found

    def wrong(self, samples: Mapping[tuple[int, int], Ints]) -> npt.NDArray[np.bool_]:
        """Which tensors have another size in one of `samples`."""
        wrong = np.zeros(len(self.multiples), dtype=bool)
        for point, num_bytes in samples.items():
            wrong |= self.at(*point) != num_bytes
        return wrong


def through(samples: Mapping[tuple[int, int], Ints], solving: Sequence[tuple[int, int]]) -> Sizes | None:
    """The polynomials that the points `solving` determine of `samples`, (batch, length) -> bytes of each tensor; None where
    another sample has other sizes."""
    exponents = {1: CONSTANT, 3: LENGTH_EXPONENTS, 6: EXPONENTS}[len(solving)]
    powers = np.stack([_powers(*point, exponents) for point in solving])
    bytes_of = np.stack([samples[point] for point in solving])
    scale = powers.max(axis=0).astype(float)
    solved = np.linalg.solve(powers / scale, bytes_of.astype(float) * PARTS) / scale[:, None]
    found = Sizes(exponents, np.rint(solved).astype(np.int64), np.ones(bytes_of.shape[1], dtype=np.int64))
    return found.confirmed(samples)


def _powers(batch: int, length: int, exponents: Sequence[tuple[int, int]]) -> Ints:
    return np.array([batch**i * length**j for i, j in exponents], dtype=np.int64)
