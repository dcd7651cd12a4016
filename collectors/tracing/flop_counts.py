"""How many floating-point operations have been launched, which tells how long a GPU takes for them."""

from __future__ import annotations

import bisect
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from peakcast.collectors.tracing.known_values import label

LENGTHS_ARE_VALUES = ("aten._flash_attention", "aten._efficient_attention")
"""Operators whose operations depend on the values of a tensor, which are not known."""
COUNTS = {str(one): count for one, count in flop_registry.items() if not str(one).startswith(LENGTHS_ARE_VALUES)}


class Operations:
    """Counts the operations of matrix products, convolutions and attention, as torch's `FlopCounterMode` does. Kernels that
    a script or `torch.compile` has written in Triton are not counted."""

    def __init__(self) -> None:
        self._instants: list[int] = []
        """The instant of each operator that was counted."""
        self._totals = [0]
        """Operations launched before the first of these, before the second, and so on."""

    def ran(self, operator: Any, args: Any, kwargs: Any, result: Any, instant: int) -> None:
        """Count an operator that was launched at `instant`."""
        count = COUNTS.get(label(getattr(operator, "_overloadpacket", operator)))
        if count is not None:
            self._instants.append(instant)
            sizes = [one for one in args if not isinstance(one, torch.dtype)]  # `addmm` with a dtype of its output
            self._totals.append(self._totals[-1] + int(count(*sizes, **kwargs, out_val=result)))

    def before(self, instant: int) -> int:
        """Number of operations that were launched before `instant`."""
        return self._totals[bisect.bisect_left(self._instants, instant)]
