"""What collectives do to values that are known: every other rank is assumed to have sent what this one has.

The fake process group moves nothing. Numbers that decide shapes (how many tokens each expert of each rank gets) would
otherwise be unknown behind the first collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from peakcast.collectors.tracing.known_values import label, value_of

SENT = ("input", "input_tensor", "input_tensors")
WRITTEN = ("output", "output_tensor", "output_tensors")
"""Names of the arguments that a collective sends, and of those that it writes; one without these returns a tensor."""
EQUAL = ("avg", "max", "min")
"""Reductions of equal numbers that give the same number."""

Values = list[torch.Tensor]


def follow(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """If `func` is a collective of `RULES`, give what it has written or returned its values, or none if these are not
    known."""
    rule = RULES.get(label(func))
    if rule is None:
        return
    arguments = {one.name: given for one, given in zip(func._schema.arguments, args, strict=False)} | kwargs
    values = [value_of(one) for one in _tensors(arguments, SENT)]
    targets = _tensors(arguments, WRITTEN) or [result]
    known = [one for one in values if one is not None and not one.is_floating_point()]
    with _disable_current_modes():
        received = rule(known, arguments, _group(arguments)) if len(known) == len(values) else []
    if [one.shape for one in received] != [one.shape for one in targets]:
        received = []
    for number, target in enumerate(targets):
        if isinstance(target, FakeTensor):
            target.known_value, target.all_of = received[number] if received else None, None  # type: ignore[attr-defined]
    for one in received:
        one.guessed = any(getattr(value, "guessed", False) for value in known)  # type: ignore[attr-defined]


def _tensors(arguments: dict[str, Any], names: tuple[str, ...]) -> list[torch.Tensor]:
    given = [arguments[name] for name in names if name in arguments]
    return [one for one in tree_iter(given) if isinstance(one, torch.Tensor)]


def _group(arguments: dict[str, Any]) -> Any:
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    name = arguments["group_name"]
    return dist.distributed_c10d._resolve_process_group(name) if isinstance(name, str) else name


def _gathered(values: Values, arguments: dict[str, Any], group: Any) -> Values:
    return [torch.cat(values * group.size())]


def _gathered_in_lists(values: Values, arguments: dict[str, Any], group: Any) -> Values:
    return [one.clone() for one in values for _ in range(group.size())]


def _exchanged(values: Values, arguments: dict[str, Any], group: Any) -> Values:
    """This rank's part of what each rank sends."""
    sizes = arguments["input_split_sizes"] or values[0].shape[0] // group.size()
    return [torch.cat([values[0].split(sizes)[group.rank()]] * group.size())]


def _exchanged_in_lists(values: Values, arguments: dict[str, Any], group: Any) -> Values:
    return [values[group.rank()].clone() for _ in values]


def _reduced(values: Values, arguments: dict[str, Any], group: Any) -> Values:
    if arguments["reduce_op"] in EQUAL:
        return [one.clone() for one in values]
    return [one * group.size() for one in values] if arguments["reduce_op"] == "sum" else []


RULES: dict[str, Callable[[Values, dict[str, Any], Any], Values]] = {
    "c10d._allgather_base_.default": _gathered,
    "c10d.allgather_.default": _gathered_in_lists,
    "c10d.alltoall_base_.default": _exchanged,
    "c10d.alltoall_.default": _exchanged_in_lists,
    "c10d._reduce_scatter_base_.default": lambda *_: [],
    "_c10d_functional.all_gather_into_tensor.default": _gathered,
    "_c10d_functional.all_to_all_single.default": _exchanged,
    "_c10d_functional.all_reduce.default": _reduced,
}
"""Collective -> (values sent, its arguments, its process group) -> values received, none if they are not known. Others
leave a rank its own numbers: which reduction `c10d.allreduce_` was asked for cannot be read here."""
