"""The parts of the entries of `adapter_methods.py`: a tensor, a projection, and what autograd saves."""

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
    """Bytes of an element; None: as the adapters' own dtype."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Matrix(NamedTuple):
    """A projection that is adapted, or from whose sizes the network's tensors follow."""

    name: str
    rows_out: int
    columns_in: int
    rank: int
    settings: Mapping[str, Any]
    layer: int = 0


class AdapterSaves(NamedTuple):
    """What autograd saves in a projection's forward because of the adapter."""

    wide: tuple[int, ...] = ()
    """Elements of saved tensors in the adapters' dtype."""
    narrow: tuple[int, ...] = ()
    """Elements of saved tensors in the dtype in which the network computes."""
    inputs: bool = False
    """Whether the projection's own input is saved too."""
    result: bool = False
    """Whether the projection's output before the adapter is saved too."""
