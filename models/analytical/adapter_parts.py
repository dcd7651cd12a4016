"""What the entries of `adapter_methods.py` are made of: a tensor, a projection, and what autograd keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Made(NamedTuple):
    """A tensor that a method makes."""

    name: str
    shape: tuple[int, ...]
    trains: bool = True
    element_bytes: int | None = None
    """None: the adapters' own dtype."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class Matrix(NamedTuple):
    """A projection that is adapted, or of which the network's tensors are made."""

    name: str
    rows_out: int
    columns_in: int
    rank: int
    settings: Mapping[str, Any]
    layer: int = 0


class Kept(NamedTuple):
    """What autograd keeps of a projection's forward beside what it would anyway."""

    wide: tuple[int, ...] = ()
    """Elements of tensors in the adapters' dtype."""
    narrow: tuple[int, ...] = ()
    """... and of tensors in the dtype that the network computes in."""
    inputs: bool = False
    """The projection's own input too."""
    result: bool = False
    """... and its result before the adapter."""
