"""Operators that a script defines in Python (`torch.library.custom_op`): what they do is seen as what they make is.

Their rule for fake tensors knows only their results. So what runs on a GPU is run on fake tensors too, and what it makes on
the way is seen; where it cannot be (it launches what is not there, or reads a value), the rule stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library import custom_ops


def gpu_kernel(operator: Any) -> Callable[..., Any] | None:
    """The Python that `operator` runs on a GPU; None for operators of other kinds."""
    defined = custom_ops.OPDEFS.get(getattr(operator, "_name", ""))
    if defined is None:
        return None
    kernels: dict[str | None, Callable[..., Any]] = defined._backend_fns
    return kernels.get("cuda") or kernels.get(None)
