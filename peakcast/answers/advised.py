"""`Advice`: a change of a job that would lower its peak, as answers and explanations have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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


def counted_from(steps: Sequence[Advice], peak_bytes: int) -> tuple[Advice, ...]:
    """`steps`, each on top of those before it, in proportion to the peak that the answer prints: the timelines that they
    are computed from leave out what the residual adds, and one peak should not have two sizes on one screen."""
    if not steps:
        return ()
    scale = peak_bytes / (steps[0].peak_bytes + steps[0].saved_bytes)
    peaks = [peak_bytes, *(round(item.peak_bytes * scale) for item in steps)]
    pairs = zip(steps, peaks, peaks[1:], strict=False)
    return tuple(replace(item, peak_bytes=after, saved_bytes=before - after) for item, before, after in pairs)


def json_values(value: Any) -> Any:
    """`value` as JSON values: dataclasses become mappings, tuples become lists."""
    if isinstance(value, tuple):
        return [json_values(item) for item in value]
    if isinstance(value, Mapping):
        return {key: json_values(item) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {key: json_values(item) for key, item in asdict(value).items()}
    return value
