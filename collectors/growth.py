"""GPU memory outside PyTorch's allocator, step by step: what each library takes when it is first used.

The CUDA context, the code of kernels, handles, communicators: the driver counts them, PyTorch does not. Of a measured cell
the steps are the phases of its first training step; `collectors/first_uses.py` has one for each library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Reading = Callable[[], "int | None"]


class Growth:
    """Bytes outside the allocator that were added from one mark to the next. `used` reads the whole GPU's memory, and
    `reserved` the allocator's; `idle` was in use before the context. Without a driver there is nothing to say."""

    def __init__(self, used: Reading, reserved: Callable[[], int], idle: int | None) -> None:
        self._used = used
        self._reserved = reserved
        self._before = idle
        self.steps: dict[str, int] = {}

    def mark(self, step: str) -> int | None:
        """Everything since the last mark belongs to `step`; returns it. Marked again, a step adds up."""
        used = self._used()
        if used is None or self._before is None:
            return None
        outside = used - self._reserved()
        grown, self._before = outside - self._before, outside
        self.steps[step] = self.steps.get(step, 0) + grown
        return grown

    def readings(self) -> dict[str, Any]:
        """`outside_bytes` by step, in their order; nothing without a driver."""
        return {"outside_bytes": dict(self.steps)} if self.steps else {}
