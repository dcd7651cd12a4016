"""Parameters of lazy modules (`nn.LazyLinear`), which get their shape in the first forward, as fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter


class _Lazy:
    """An empty fake tensor until it gets its shape. torch's own refuse nearly all questions before, also those of the fake
    tensors' mode."""

    shape = torch.Tensor.shape
    __torch_function__ = torch._C._disabled_torch_function_impl

    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        """Get data of `shape`, and be like any other fake tensor from now on."""
        self.__class__ = FakeTensor
        self.data = _fake(self.fake_mode, shape, device or self.device, dtype or self.dtype)


class _Parameter(_Lazy, UninitializedParameter, FakeTensor):  # type: ignore[misc]
    """A parameter without a shape."""


class _Buffer(_Lazy, UninitializedBuffer, FakeTensor):  # type: ignore[misc]
    """A buffer without a shape."""


def install(mode: FakeTensorMode) -> None:
    """Make what lazy modules wait with fake: a real tensor could not get fake data."""

    def parameter(cls: type, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
        made = _fake(mode, 0, device, dtype).requires_grad_(requires_grad)
        made._is_param = True
        made.__class__ = _Parameter  # the reverse of `UninitializedTensorMixin.materialize`
        return made

    def buffer(
        cls: type, requires_grad: bool = False, device: Any = None, dtype: Any = None, persistent: bool = True
    ) -> Any:
        made = _fake(mode, 0, device, dtype).requires_grad_(requires_grad)
        made.persistent, made._is_buffer = persistent, True
        made.__class__ = _Buffer
        return made

    UninitializedParameter.__new__ = parameter  # type: ignore[method-assign,assignment]
    UninitializedBuffer.__new__ = buffer  # type: ignore[method-assign,assignment]


def _fake(mode: FakeTensorMode, shape: Any, device: Any, dtype: Any) -> Any:
    """A fake tensor, also where the script's mode would make a real one, as it is small and on the CPU."""
    place = torch.device(device) if device is not None else torch.get_default_device()
    if place.type != "cpu":
        return torch.empty(shape, device=place, dtype=dtype)
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, torch.empty(shape, device="meta", dtype=dtype), place)
