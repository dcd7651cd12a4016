"""Keeps what DTensor computes on the side out of a trace: to know an operation's global shape it runs the operation on
fake tensors of that shape, and a mesh of ranks is a tensor on the CPU whose numbers are asked for. In a process whose every
tensor is fake, the former would look like everything else, and the latter would have no numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _dispatch
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes


def install() -> None:
    """Run them unseen, for this process."""
    for owner, name in (
        (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
        (DeviceMesh, "__init__"),
        (DeviceMesh, "__getitem__"),
        (DeviceMesh, "_flatten"),
    ):
        setattr(owner, name, _unseen(getattr(owner, name)))
    _dispatch.is_rng_supported_mesh = lambda mesh: False  # dropout would read and set the state of a GPU's generator


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **keywords)

    return run
