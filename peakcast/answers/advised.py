"""`Advice`: a change of a job that would lower its peak, as answers and explanations have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A changed job whose peak was computed, and what it saves."""

    name: str
    sentence: str
    price: str
    """What the change costs, in words."""
    changes: Mapping[str, Any]
    """Field of the job -> its new value."""
    same_training: bool
    """Whether the change trains the same, up to rounding."""
    saved_bytes: int
    peak_bytes: int
    """The peak of the quantity after the change."""
    quantity: str = "peak_allocated_bytes"


def json_values(value: Any) -> Any:
    """`value` as JSON values: dataclasses become mappings, tuples become lists."""
    if isinstance(value, tuple):
        return [json_values(item) for item in value]
    if isinstance(value, Mapping):
        return {key: json_values(item) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {key: json_values(item) for key, item in asdict(value).items()}
    return value
