"""Truth values that follow from one assumption: the numbers that a script computes on the GPU are finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from peakcast.collectors.tracing.known_values import label, value_of

_NEVER = {"aten.isnan.default", "aten.isinf.default", "aten.isposinf.default", "aten.isneginf.default"}
"""Operators that ask for numbers that are not finite."""
_COMPARISONS = {
    "aten.eq.Scalar": False, "aten.ne.Scalar": True, "aten.lt.Scalar": True, "aten.le.Scalar": True,
    "aten.gt.Scalar": False, "aten.ge.Scalar": False,
}  # fmt: skip
"""Comparison with infinity -> what it says of a finite number."""
_OF_ITSELF = {"aten.eq.Tensor": True, "aten.ne.Tensor": False}
"""Comparison of a tensor with itself, as `torch.isfinite` is made of -> what it says where no number is NaN."""
_ALIKE = {
    *(f"aten.{name}.Tensor" for name in ("mul", "add", "bitwise_and", "bitwise_or")),
    *(f"aten.{name}_.Tensor" for name in ("mul", "add", "bitwise_and", "bitwise_or")),
    *(f"aten.{name}.default" for name in ("logical_and", "logical_or", "logical_not", "bitwise_not", "_to_copy", "clone")),
    *(f"aten.{name}_.default" for name in ("logical_and", "logical_or", "logical_not", "bitwise_not")),
}
"""Operators on single elements: if all elements of each argument are equal, so are those of the result."""
_SHAPES = {
    *(f"aten.{name}.default" for name in ("view", "detach", "alias", "expand", "unsqueeze", "stack", "cat")),
    *(f"aten.{name}" for name in ("any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims")),
    *(f"aten.{name}" for name in ("squeeze.default", "squeeze.dim", "select.int", "max.default", "min.default")),
}
"""Operators that move elements or pick some: if all elements of all arguments are equal, the result's have their value."""
_FOLLOWS = _ALIKE | _SHAPES | {"aten.sum.default"}


def follow(func: Any, args: Any, result: Any) -> None:
    """Note the value that all elements of `result` have, if that follows."""
    name = label(func)
    asks = name in _NEVER or name in _COMPARISONS or name in _OF_ITSELF
    if not asks and not (name in _FOLLOWS and any(hasattr(one, "of_finite") for one in _first_two(args))):
        return
    if not isinstance(result, FakeTensor) or value_of(result) is not None:
        return
    value = _value(func, name, args)
    if value is not None:
        result.of_finite = value, _version(result)


def _first_two(args: Any) -> list[Any]:
    return [*(args[0][:1] if isinstance(args[0], (list, tuple)) else args[:1]), *args[1:2]] if args else []


def value_if_finite(tensor: Any) -> float | bool | None:
    """The value of a `tensor` that follows from numbers being finite; None if none does."""
    value, version = getattr(tensor, "of_finite", (None, 0))
    return value if value is not None and version == _version(tensor) else None


def _value(func: Any, name: str, args: Any) -> float | bool | None:
    """The value of all elements of the operator's result; None if it does not follow."""
    if name in _NEVER:
        return False
    if name in _OF_ITSELF and args[0] is args[1] and args[0].is_floating_point():
        return _OF_ITSELF[name]
    if name in _COMPARISONS and isinstance(args[1], float) and math.isinf(args[1]):
        return _COMPARISONS[name] if args[1] > 0 or name in ("aten.eq.Scalar", "aten.ne.Scalar") else not _COMPARISONS[name]
    tensors = [one for one in tree_iter(args) if isinstance(one, torch.Tensor)]
    values = {id(one): _of_all(one) for one in tensors}
    if not tensors or None in values.values() or name in _OF_ITSELF:
        return None
    found = list(values.values())
    if name in _SHAPES:
        return found[0] if len(set(found)) == 1 else None
    if name == "aten.sum.default":
        return int(found[0] or 0) * int(tensors[0].numel())
    with _disable_current_modes():
        numbers = tree_map_only(torch.Tensor, lambda one: torch.tensor(values[id(one)]), args)
        made = (torch.clone if name in ("aten._to_copy.default", "aten.clone.default") else func)(*numbers)
        answer: float | bool = made.item()
    return answer


def _of_all(tensor: torch.Tensor) -> float | bool | None:
    """The value that all elements of a tensor have, as far as that is known."""
    if (value := value_if_finite(tensor)) is not None:
        return value
    known = value_of(tensor) if tensor.numel() == 1 else None
    if known is None or known.is_complex():
        return None
    with _disable_current_modes():
        answer: float | bool = known.item()
    return answer


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
