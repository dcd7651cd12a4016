"""Tensors and their lives in columns: what a step holds beside the runs of its blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peakcast.models.allocator_sizes import MIN_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors in columns, each [num_tensors]; `num_bytes` rounded as the allocator does. Made once, held as often as asked:
    a ledger caches those that many jobs share, such as a network's parameters."""

    names: list[str]
    modules: list[str]
    num_bytes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, int]]) -> Tensors:
        """The tensors of (name, module, bytes); those without bytes are none."""
        rows = [row for row in tensors if row[2] > 0]
        sizes = np.array([row[2] for row in rows], dtype=np.int64)
        return cls(
            names=[row[0] for row in rows],
            modules=[row[1] for row in rows],
            num_bytes=-(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES,
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """A part of a step, to be run again on others (`Step.record`, `Step.run_again`). `columns` [5, num_tensors]: category,
    bytes, born, dies, stream."""

    names: list[str]
    modules: list[str]
    columns: npt.NDArray[np.int64]
    phases: bytes = b""
    labels: tuple[str, ...] = ()


class Rows:
    """Single tensors: names, modules, and the five columns of a `Recording` row after row."""

    __slots__ = ("modules", "names", "numbers")

    def __init__(self, names: list[str], modules: list[str], numbers: list[int]) -> None:
        self.names, self.modules, self.numbers = names, modules, numbers

    def copy(self) -> Rows:
        return Rows(self.names.copy(), self.modules.copy(), self.numbers.copy())

    @property
    def columns(self) -> npt.NDArray[np.int64]:
        return np.array(self.numbers, dtype=np.int64).reshape(-1, 5).T
