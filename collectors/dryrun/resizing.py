"""Changes the size of a script's batches: tensors that it makes or puts on the GPU outside of its networks are resized.

The script runs unchanged: its networks, losses and loop get a batch with another number of sequences or another length, as
if its data had that size. Only code that computes with the script's own numbers, such as `view(batch_size, -1)`, does not
adapt, and fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from peakcast.collectors.tracing.phases import inside_backward

aten = torch.ops.aten


@dataclass(frozen=True)
class BatchShape:
    """A number of sequences with a number of tokens each."""

    size: int
    length: int

    def resized(self, shape: tuple[int, ...], other: BatchShape, *, floats: bool) -> tuple[int, ...] | None:
        """The shape in `other` of a tensor that has `shape` in this batch; None if it does not belong to a batch. A row may
        have one more token, the next one; floating-point tensors are rows of vectors."""
        one = {self.length: other.length, self.length + 1: other.length + 1}
        if len(shape) > (2 if floats else 1) and shape[0] == self.size and shape[1 if floats else -1] in one:
            if floats:
                return (other.size, one[shape[1]], *shape[2:])
            return (other.size, *(one.get(side, side) for side in shape[1:]))
        if floats or len(shape) != 1 or self.size == 1:
            return None
        flat = {self.size * self.length + more: other.size * other.length + more for more in (0, 1)}
        return next(((flat[side],) for side in shape if side in flat), None) or (
            (other.size,) if shape == (self.size,) else None
        )


class Resizing:
    """Changes batches of size `own` to another size, only while `outside()` is true, i.e. no network runs; `ask` returns
    the other size when the first batch comes."""

    def __init__(self, own: BatchShape, ask: Callable[[], BatchShape], outside: Callable[[], bool]) -> None:
        self._own, self._ask, self._outside = own, ask, outside
        self._other: BatchShape | None = None

    def arguments(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`args` of an operator that copies a batch from the CPU to the GPU, with that batch resized."""
        if func is aten._to_copy.default and kwargs.get("device", args[0].device).type == "cuda":
            return (self._resized(args[0]), *args[1:]) if args[0].device.type == "cpu" else args
        if func is aten.copy_.default and isinstance(args[0], FakeTensor) and args[0].device.type == "cuda":
            return (args[0], self._resized(args[1]), *args[2:]) if args[1].device.type == "cpu" else args
        return args

    def result(self, args: Any, made: Any) -> Any:
        """`made`, resized if it is a batch that was made directly on the GPU."""
        if not isinstance(made, FakeTensor) or made.device.type != "cuda":
            return made
        return made if any(isinstance(one, torch.Tensor) for one in args) else self._resized(made)

    def _resized(self, tensor: torch.Tensor) -> torch.Tensor:
        shape = tuple(tensor.shape)
        floats = tensor.is_floating_point()
        if not self._outside() or self._own.resized(shape, self._own, floats=floats) is None:
            return tensor
        if self._other is None:
            self._other = self._ask()
        found = self._own.resized(shape, self._other, floats=floats)
        if found == shape or found is None:
            return tensor
        known = getattr(tensor, "known_value", None) if isinstance(tensor, FakeTensor) else tensor
        real = _repeated(known, found) if known is not None else None
        if not isinstance(tensor, FakeTensor):
            assert real is not None
            return real
        made = tensor.new_empty(found)
        made.known_value = real  # type: ignore[attr-defined]
        return made


def _repeated(values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`values` cut or repeated to `shape`."""
    with _disable_current_modes():
        for dimension, side in enumerate(shape):
            values = values.index_select(dimension, torch.arange(side) % values.shape[dimension])
        return values.contiguous()


def outside_of(depth: Callable[[], int]) -> Callable[[], bool]:
    """A function that tells whether no network runs, forward or backward, and nothing is being compiled."""
    return lambda: depth() == 0 and not inside_backward() and torch._guards.TracingContext.try_get() is None
