"""Replaces what fake tensors cannot do: run the kernels of TRL's head."""

from __future__ import annotations

import importlib
import types
from typing import Any


class _IdleKernel:
    """A Triton kernel that is launched and does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **keywords: None


def install() -> None:
    """Install it in the process that traces. Does nothing if TRL is not installed: code that needs it will report that."""
    try:
        head: Any = importlib.import_module("trl.kernels.chunked_logprob")
    except ImportError:
        return
    head._TRITON_AVAILABLE = True
    head._forward_kernel = head._backward_kernel = _IdleKernel()
    head.triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
