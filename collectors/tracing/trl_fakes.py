"""Replaces what fake tensors cannot do: run the kernels of TRL's head, and be copied as a classifier's head."""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy of a parameter as `Parameter.__deepcopy__` makes it; a fake one would use Tensor's, which asks for its
    address."""
    if id(tensor) not in memo:
        memo[id(tensor)] = torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    copied: torch.Tensor = memo[id(tensor)]
    return copied


class _IdleKernel:
    """A Triton kernel that is launched and does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **keywords: None


def install() -> None:
    """Install it in the process that traces. Does nothing if TRL is not installed: code that needs it will report that."""
    FakeTensor.__deepcopy__ = _copied
    try:
        head: Any = importlib.import_module("trl.kernels.chunked_logprob")
    except ImportError:
        return
    head._TRITON_AVAILABLE = True
    head._forward_kernel = head._backward_kernel = _IdleKernel()
    head.triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
