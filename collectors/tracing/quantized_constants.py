"""Tensors that bitsandbytes keeps with the packed weights of a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KEPT = ("absmax", "code", "offset")


def constants_of(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of each: of a weight's own quantization state, and of that of its scales if they are quantised too."""
    for name, part in model.named_modules():
        weight = getattr(part, "weight", None)
        state = getattr(part, "quant_state", None) or getattr(weight, "quant_state", None)
        for of, found in (("", state), ("nested_", getattr(state, "state2", None))):
            for key in KEPT:
                if getattr(found, key, None) is not None:
                    yield f"{name}.weight.{of}{key}", getattr(found, key)
