"""Columns of texts with few distinct values, such as the names of a timeline's entries, stored and compared as numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class _Numbers(dict[str, int]):
    """The number of every text that this process has seen, counted from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._lock = threading.Lock()

    def __missing__(self, text: str) -> int:
        with self._lock:
            if text not in self:
                self.texts.append(text)
                self[text] = len(self.texts) - 1
            return self[text]


_KNOWN = _Numbers()


number_of = _KNOWN.__getitem__
"""The number of a text in this process."""


class Texts(Sequence[str]):
    """Texts stored as `numbers` [num_texts]; within one process, equal texts have equal numbers."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Ints) -> None:
        self.numbers = numbers

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """`texts` as such a column."""
        if isinstance(texts, Texts):
            return texts
        return cls(np.fromiter(map(number_of, texts), np.int64, len(texts)))

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Texts: ...
    def __getitem__(self, index: int | slice) -> str | Texts:
        return Texts(self.numbers[index]) if isinstance(index, slice) else _KNOWN.texts[self.numbers[index]]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[str]:
        return map(_KNOWN.texts.__getitem__, self.numbers.tolist())

    def __reduce__(self) -> tuple[Any, ...]:
        return Texts.of, (list(self),)
