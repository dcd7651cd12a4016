"""Operators that a script defines in Python (`torch.library.custom_op`): the tensors that they allocate inside are traced
too.

Their rule for fake tensors only gives their outputs. So the Python that runs on a GPU is run on the fake tensors, and what
it allocates is seen. If that is not possible (it launches a missing kernel, or reads a value), the rule is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library import custom_ops


def gpu_kernel(operator: Any) -> Callable[..., Any] | None:
    """The Python function that `operator` runs on a GPU; None for other kinds of operators."""
    defined = custom_ops.OPDEFS.get(getattr(operator, "_name", ""))
    if defined is None:
        return None
    kernels: dict[str | None, Callable[..., Any]] = defined._backend_fns
    return kernels.get("cuda") or kernels.get(None)
