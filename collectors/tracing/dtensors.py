"""Keeps DTensor's auxiliary computations out of a trace. To find an operation's global shape, it runs the operation on fake
tensors of that shape; and a mesh of ranks is a CPU tensor whose values are read. In a process whose tensors are all fake,
the former would be traced like everything else, and the latter would have no values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _dispatch
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes


def install() -> None:
    """Make them invisible to the tracer, for this process."""
    for owner, name in (
        (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
        (DeviceMesh, "__init__"),
        (DeviceMesh, "__getitem__"),
        (DeviceMesh, "_flatten"),
    ):
        setattr(owner, name, _unseen(getattr(owner, name)))
    _dispatch.is_rng_supported_mesh = lambda mesh: False  # dropout would use a GPU's generator


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **keywords)

    return run
