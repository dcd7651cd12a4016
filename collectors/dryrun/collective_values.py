"""What collectives do to values that are known: every other rank is taken to have sent what this one has.

The fake process group moves nothing. Numbers that decide shapes (how many tokens each expert of each rank gets) would
otherwise be unknown behind the first collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from peakcast.collectors.tracing.known_values import label, value_of

PREFIXES = ("c10d.", "_c10d_functional.")
AS_MANY = ("avg", "max", "min")
"""Reductions of equal numbers that give the same number."""
LEFT = ("c10d.allreduce_.default",)
"""Collectives whose reduction cannot be read here: a rank's own numbers stay."""


def follow(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Give what the collective `func` has written or returned its values, or none if they are not known."""
    if label(func) in LEFT:
        return
    arguments = {one.name: given for one, given in zip(func._schema.arguments, args, strict=False)} | kwargs
    sources, targets = _ends(arguments, result)
    values = [value_of(one) for one in sources]
    known = bool(values) and all(one is not None and not one.is_floating_point() for one in values)
    group = _group(arguments)
    if known and group is not None:
        with _disable_current_modes():
            received = _received(label(func), values, arguments, group)
    else:
        received = None
    if received is None or [one.shape for one in received] != [one.shape for one in targets]:
        received = [None] * len(targets)
    for target, value in zip(targets, received, strict=True):
        target.known_value, target.all_of = value, None
        if value is not None:
            value.guessed = any(getattr(one, "guessed", False) for one in values)


def _ends(arguments: dict[str, Any], result: Any) -> tuple[list[Any], list[Any]]:
    """The tensors that a collective sends and those that it writes or returns."""
    sent = [arguments[name] for name in ("input", "input_tensor", "input_tensors", "inputs") if name in arguments]
    written = [arguments[name] for name in ("output", "output_tensor", "output_tensors", "outputs") if name in arguments]
    targets = written or [result]
    tensors = [one for one in tree_iter(sent) if isinstance(one, torch.Tensor)]
    return tensors, [one for one in tree_iter(targets) if isinstance(one, FakeTensor)]


def _group(arguments: dict[str, Any]) -> Any:
    """The process group of a collective; None if it is not known by its argument."""
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    name = arguments.get("group_name")
    return dist.distributed_c10d._resolve_process_group(name) if isinstance(name, str) else name


def _received(operator: str, values: Sequence[Any], arguments: dict[str, Any], group: Any) -> list[Any] | None:
    """What this rank receives where every rank of `group` sends `values`; None for operators without a rule."""
    size = group.size()
    if "gather" in operator:
        listed = isinstance(arguments.get("output_tensors"), (list, tuple))
        return [one.clone() for one in values for _ in range(size)] if listed else [torch.cat([*values] * size)]
    if "all_to_all_single" in operator or "alltoall_base" in operator:
        given = arguments.get("input_split_sizes") or values[0].shape[0] // size
        return [torch.cat([values[0].split(given)[group.rank()]] * size)]
    if "alltoall" in operator:
        return [values[group.rank()].clone() for _ in range(size)]
    if "all_reduce" not in operator:
        return None
    if (reduction := arguments["reduce_op"]) in AS_MANY:
        return [one.clone() for one in values]
    return [one * size for one in values] if reduction == "sum" else None
