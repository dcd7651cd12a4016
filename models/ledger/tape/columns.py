"""Tensors and their lifetimes as columns of an array, for the tensors of a step that belong to no block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from peakcast.core.texts import Texts
from peakcast.models.allocator.rounding import MIN_BLOCK_BYTES

NAME, MODULE, CATEGORY, NUM_BYTES, BORN, DIES, STREAM, REUSABLE = range(8)
"""The rows of an array of tensors, [8, num_tensors]; names and modules are the numbers of `Texts`; REUSABLE is 0 where a
block is free as soon as its tensor is gone."""
WIDTH = 8


class OpenTensor(NamedTuple):
    """A tensor that has not been freed yet, as the first rows of its column; DIES and REUSABLE are still open."""

    name: int
    module: int
    category: int
    num_bytes: int
    born: int
    stream: int

    def until(self, dies: int, reusable: int = 0) -> tuple[int, ...]:
        """Its row (`WIDTH` columns) if it lives until before `dies`; an empty one if it has no bytes or never lives.
        `reusable`: the instant from which its block can be reused, if that is later."""
        if self.num_bytes <= 0 or self.born >= dies:
            return ()
        return (*self[:-1], dies, self.stream, reusable)


@dataclass(frozen=True, slots=True)
class RecordedColumns:
    """A part of a step, to be run again on others (`Step.record`, `Step.run_again`). `columns`: [8, num_tensors]."""

    columns: npt.NDArray[np.int64]
    phases: bytes = b""
    labels: tuple[str, ...] = ()


def tensors_held(tensors: Iterable[tuple[str, str, int]], category: int, born: int, dies: int) -> npt.NDArray[np.int64]:
    """The columns of (name, module, bytes) of tensors that share a category and a lifetime, rounded as the allocator does;
    tensors without bytes are left out."""
    rows = [row for row in tensors if row[2] > 0]
    columns = np.array([0, 0, category, 0, born, dies, 0, 0]).repeat(len(rows)).reshape(WIDTH, len(rows))
    if rows:
        names, modules, sizes = zip(*rows, strict=True)
        columns[NAME], columns[MODULE] = Texts.of(names).numbers, Texts.of(modules).numbers
        columns[NUM_BYTES] = -(-np.array(sizes, dtype=np.int64) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    return columns
