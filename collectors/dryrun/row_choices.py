"""Choices among rows that stand in for data: where a script takes more of them than there are, it gets those that there
are, as only their shapes count."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

SIZES = ("test_size", "train_size")
"""Arguments of `train_test_split`, in its order: numbers of rows, or their share of all."""


def install(kind: Any, is_made_up: Callable[[Any], bool]) -> None:
    """Change methods of `kind`, the class of rows in `datasets`, for rows that `is_made_up`."""
    choose, leave, divide = kind.select, kind.skip, kind.train_test_split

    @functools.wraps(choose)
    def select(rows: Any, indices: Iterable[int], *arguments: Any, **keywords: Any) -> Any:
        if is_made_up(rows) and len(rows):
            indices = [index % len(rows) for index in itertools.islice(indices, len(rows))]
        return choose(rows, indices, *arguments, **keywords)

    @functools.wraps(leave)
    def skip(rows: Any, n: int) -> Any:
        return rows if is_made_up(rows) and n >= len(rows) else leave(rows, n)

    @functools.wraps(divide)
    def train_test_split(rows: Any, *sizes: Any, **keywords: Any) -> Any:
        keywords |= dict(zip(SIZES, sizes, strict=False))  # the others are given by name
        if is_made_up(rows):
            keywords |= {name: _fitting(keywords.get(name), len(rows)) for name in SIZES}
        return divide(rows, **keywords)

    kind.select, kind.skip, kind.train_test_split = select, skip, train_test_split


def _fitting(size: int | float | None, count: int) -> int | float | None:
    """`size`, or a quarter of `count` rows if it is a number of rows that leaves fewer than half of them."""
    return count // 4 if isinstance(size, int) and size > count // 2 else size
