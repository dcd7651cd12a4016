"""What fake tensors cannot: run the kernels of TRL's head, which do nothing here, and be copied as a classifier's head."""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy of a parameter, as `Parameter.__deepcopy__` makes it; a fake one takes Tensor's, which asks where it is."""
    if id(tensor) not in memo:
        memo[id(tensor)] = torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    copied: torch.Tensor = memo[id(tensor)]
    return copied


class _Kernel:
    """A Triton kernel that is launched and does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **keywords: None


def install() -> None:
    """For the process that traces. Nothing where TRL is not installed: whoever needs it says so."""
    FakeTensor.__deepcopy__ = _copied
    try:
        head: Any = importlib.import_module("trl.kernels.chunked_logprob")
    except ImportError:
        return
    head._TRITON_AVAILABLE = True
    head._forward_kernel = head._backward_kernel = _Kernel()
    head.triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
