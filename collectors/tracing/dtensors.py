"""Keeps DTensor's auxiliary computations out of a trace. To find an operation's global shape, it runs the operation on fake
tensors of that shape; and a mesh of ranks is a CPU tensor whose values are read. In a process whose tensors are all fake,
the former would be traced like everything else, and the latter would have no values."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _dispatch, _sharding_prop
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

STRIDED = "_propagate_use_strided_shard_flag"
"""Of torch 2.13: called for each tensor of an operation on lists (`_foreach_mul_`), each time it looks at all."""


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
    if hasattr(_sharding_prop, STRIDED):
        setattr(_sharding_prop, STRIDED, _only_if_strided(getattr(_sharding_prop, STRIDED)))


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **keywords)

    return run


def _only_if_strided(propagate: Callable[..., None]) -> Callable[..., None]:
    """`propagate`, which does nothing without strided shards. Whether an operation has any is asked once for all its
    tensors: of a network with 723 of them, an optimizer's first step takes nine seconds less."""
    asked: tuple[Callable[[], Any], bool] = (lambda: None), False

    @functools.wraps(propagate)
    def run(strategy: Any, schema: Any) -> None:
        nonlocal asked
        if asked[0]() is not schema:
            strided = any(isinstance(one, _StridedShard) for spec in schema.args_spec for one in spec.placements)
            asked = weakref.ref(schema), strided
        if asked[1]:
            propagate(strategy, schema)

    return run
