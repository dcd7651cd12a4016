"""Cheaper keys for the cache in which torch's fake tensors look up what an operator returns.

A key has what the result may depend on: of every argument that is a tensor its shape, strides, dtype and so on. torch
(2.13, `FakeTensorMode._prep_args_for_hash`) fills a record of 17 fields for each of them and flattens it again, which took
a quarter of the time of tracing a step. Here a tensor without symbols is one tuple of the same facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device))
"""Types of arguments that stand for themselves."""


class CheaperKeys(FakeTensorMode):  # type: ignore[misc]
    """Makes fake tensors, and looks up what an operator returns by cheaper keys."""

    def _prep_args_for_hash(self, result: list[Any], args: Any, *rest: Any) -> None:
        """Append what `args` say to the key under which an operator's result is kept."""
        prepare = super()._prep_args_for_hash
        if type(args) in (list, tuple):
            add_arguments(self, result, args, lambda *some: prepare(*some, *rest))
        else:
            prepare(result, args, *rest)


def add_arguments(mode: Any, result: list[Any], args: Iterable[Any], others: Callable[[list[Any], Any], None]) -> None:
    """Append the arguments `args` of an operator to the key `result`, as `FakeTensorMode` does; `others` appends those that
    are rare."""
    result.append(type(args))
    result.append(len(args))  # type: ignore[arg-type]
    for one in args:
        kind = type(one)
        if kind is FakeTensor and one.fake_mode is mode and one.constant is None and _is_plain(one):
            result.append(_facts(one))
        elif kind in PLAIN:
            result.append(kind)  # 1 and 1.0 are equal
            result.append(one)
        elif kind is list or kind is tuple:
            add_arguments(mode, result, one, others)
        else:
            others(result, (one,))


def _is_plain(tensor: Any) -> bool:
    return tensor.layout is torch.strided and not (tensor._has_symbolic_sizes_strides or tensor.is_quantized)


def _facts(tensor: Any) -> tuple[object, ...]:
    """What a result may depend on; whether a tensor is contiguous follows from its shape and strides."""
    return (
        *(tensor.dtype, tensor.shape, tensor.stride(), tensor.fake_device, tensor.storage_offset()),
        *(tensor.untyped_storage().nbytes(), tensor.requires_grad),
        *(tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
    )
