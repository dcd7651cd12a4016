"""`torch.set_default_tensor_type` for a type of the GPU, as LLaMA's first code calls it: builds without CUDA refuse it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DTYPES = {
    "HalfTensor": torch.float16, "FloatTensor": torch.float32, "DoubleTensor": torch.float64,
    "BFloat16Tensor": torch.bfloat16,
}  # fmt: skip
"""Name of a type -> its dtype."""
ON_GPU = "torch.cuda."


def install() -> None:
    """Replace it in this process by the two functions that torch names instead of it since 2.1 (`__init__.py`)."""
    torch.set_default_tensor_type = _settled(torch.set_default_tensor_type)


def _settled(own: Callable[[Any], None]) -> Callable[[Any], None]:
    def set_type(kind: Any) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        if (dtype := DTYPES.get(name.rpartition(".")[2])) is None:
            own(kind)
        else:
            torch.set_default_dtype(dtype)
            torch.set_default_device("cuda" if name.startswith(ON_GPU) else None)

    return set_type
