"""Tensors of ones: a fake tensor has no values, but a mask of ones answers whether all of it is true."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from peakcast.collectors.tracing.known_values import label, version_of

_MAKE = ("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")
_KEEP = (
    *("aten._to_copy.default", "aten.clone.default", "aten.detach.default", "aten.alias.default", "aten.slice.Tensor"),
    *("aten.view.default", "aten.expand.default", "aten.unsqueeze.default", "aten.select.int"),
    *("aten.all.default", "aten.all.dim"),
)
"""Operators whose result is of ones if their first argument is."""
_COMPARE = {"aten.eq.Scalar": 1, "aten.ne.Scalar": 0, "aten.gt.Scalar": 0, "aten.ge.Scalar": 1}
"""Operators that compare with a number -> that for which they answer true of ones."""


def note(func: Any, args: Any, result: Any) -> None:
    """Note on `result` that it is of ones, if that follows from the operator and what is noted on its first argument."""
    if not isinstance(result, FakeTensor):
        return
    operator = label(func)
    if operator in _MAKE:
        made = True
    elif operator in _KEEP:
        made = are_ones(args[0])
    else:
        made = operator in _COMPARE and args[1] == _COMPARE[operator] and are_ones(args[0])
    if made:
        result.of_ones = version_of(result)  # type: ignore[attr-defined]


def are_ones(tensor: torch.Tensor) -> bool:
    """Whether a tensor is noted to be of ones and was not written since."""
    return bool(getattr(tensor, "of_ones", None) == version_of(tensor))
