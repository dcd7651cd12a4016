"""Which operators launch kernels, and for which the CPU waits until the GPU has finished."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from peakcast.collectors.tracing.known_values import label

ALLOCATE = ("aten.empty", "aten.new_empty")
"""Operators that only allocate."""
READS = frozenset({"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"})
COPIES = frozenset({"aten._to_copy.default", "aten.copy_.default"})
"""READS and COPIES are operators for which the CPU waits until the GPU has finished everything: those that read a value,
and copies between the two unless they are asked not to block (ATen `native/cuda/Copy.cu`)."""


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """`tensor`, or the tensors of which a wrapper is made (a DTensor also lists its mesh). None of a quantised tensor of
    Transformer Engine, which does not list its parts; operators of their own have made them."""
    if not is_traceable_wrapper_subclass(tensor):
        if "_quantizer" in vars(tensor):
            return
        yield tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, attribute), torch.Tensor):
            yield from plain_tensors(part)


def launches(func: Any, args: Any, results: list[torch.Tensor], device_type: str) -> bool:
    """Whether an operator that has run launched a kernel on `device_type`. Those that return nothing write into their
    arguments, or ask something (`prim.device`)."""
    if func.is_view or label(func).startswith(ALLOCATE):
        return False
    written = results or (tensors_of(args) if func._schema.is_mutable else [])
    return any(tensor.device.type == device_type for tensor in written)


def waits(func: Any, args: Any, kwargs: Any, results: list[torch.Tensor], device_type: str) -> bool:
    """Whether the CPU only goes on when the GPU has finished everything that was launched."""
    operator = label(func)
    if operator in READS:
        return bool(args[0].device.type == device_type)
    if operator not in COPIES or kwargs.get("non_blocking") or any(one is True for one in args):
        return False
    if operator == "aten.copy_.default":  # one into a quantised tensor returns nothing
        return bool(args[1].device.type != args[0].device.type)
    return bool(args[0].device.type != results[0].device.type)
