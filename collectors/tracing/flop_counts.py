"""How many floating-point operations have been launched, which tells how long a GPU takes for them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from peakcast.collectors.tracing.known_values import label

LENGTHS_ARE_VALUES = ("aten._flash_attention", "aten._efficient_attention")
"""Operators whose operations depend on the values of a tensor, which are not known."""
COUNTS = {str(one): count for one, count in flop_registry.items() if not str(one).startswith(LENGTHS_ARE_VALUES)}


class Operations:
    """Counts the operations of matrix products, convolutions and attention, as torch's `FlopCounterMode` does, and those of
    matrix products that a script has written in Triton (`of_matrices`). Kernels that `torch.compile` writes are not
    counted."""

    def __init__(self) -> None:
        self._instants: list[int] = []
        """The instant of each operator that was counted."""
        self._totals = [0]
        """Operations launched before the first of these, before the second, and so on."""

    def ran(self, operator: Any, args: Any, kwargs: Any, result: Any, instant: int) -> None:
        """Count an operator that was launched at `instant`."""
        count = COUNTS.get(label(getattr(operator, "_overloadpacket", operator)))
        if count is not None:
            sizes = [one for one in args if not isinstance(one, torch.dtype)]  # `addmm` with a dtype of its output
            self.launched(int(count(*sizes, **kwargs, out_val=result)), instant)

    def launched(self, count: int, instant: int) -> None:
        """Count `count` operations that were launched at `instant`."""
        if count:
            self._instants.append(instant)
            self._totals.append(self._totals[-1] + count)

    def before(self, instant: int) -> int:
        """Number of operations that were launched before `instant`."""
        return self._totals[bisect.bisect_left(self._instants, instant)]


def of_matrices(tensors: Iterable[torch.Tensor]) -> int:
    """Operations of a kernel that multiplies two of the matrices `tensors` into a third: twice the product of the three
    sizes that they have. Where two sizes are equal, one of the matrices is square."""
    shapes = [tuple(int(size) for size in tensor.shape) for tensor in tensors if tensor.ndim >= 2]
    matrices = {shape[-2:] for shape in shapes}
    sizes = sorted({size for matrix in matrices for size in matrix}, reverse=True)[:3]
    square = [rows for rows, columns in matrices if rows == columns]
    if len(sizes) < 3:
        sizes = (sizes + square)[:3] if len(sizes) == 2 else sizes * 3
    batch = max((math.prod(shape[:-2]) for shape in shapes), default=0)
    return 2 * batch * math.prod(sizes) if len(sizes) == 3 else 0
