"""GPU memory outside PyTorch's allocator, step by step: how much each library takes when it is first used.

The driver counts the CUDA context, the code of kernels, handles and communicators; PyTorch does not. In a measured cell the
steps are the phases of its first training step; in `collectors/measure/first_uses.py` there is one for each library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MemoryReading = Callable[[], "int | None"]


class Growth:
    """Bytes added outside the allocator between one mark and the next. `used` reads the memory of the whole GPU, `reserved`
    the allocator's; `idle` was in use before the context was made. Without a driver all figures are None."""

    def __init__(self, used: MemoryReading, reserved: Callable[[], int], idle: int | None) -> None:
        self._used = used
        self._reserved = reserved
        self._before = idle
        self.steps: dict[str, int] = {}

    def mark(self, step: str) -> int | None:
        """Attribute everything since the last mark to `step`, and return these bytes. Repeated marks of a step add up."""
        used = self._used()
        if used is None or self._before is None:
            return None
        outside = used - self._reserved()
        grown, self._before = outside - self._before, outside
        self.steps[step] = self.steps.get(step, 0) + grown
        return grown

    def readings(self) -> dict[str, Any]:
        """`outside_bytes` by step, in order of the steps; empty without a driver."""
        return {"outside_bytes": dict(self.steps)} if self.steps else {}
