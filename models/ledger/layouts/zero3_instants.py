"""What ZeRO-3 allocates within one instant of the ledger: weights are gathered before the instant's operation, and
gradients are reduced after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class GatheredBefore:
    """Bytes that modules gather, one after the other, before the operation at instant `at` runs."""

    at: int
    _bytes: int = 0
    _most_bytes: int = 0

    def allocate(self, num_bytes: int) -> None:
        """Add `num_bytes`."""
        self._bytes += num_bytes
        self._most_bytes = max(self._most_bytes, self._bytes)

    def free(self, num_bytes: int) -> None:
        """Free `num_bytes` again."""
        self._bytes -= num_bytes

    def free_older(self, num_bytes: int) -> None:
        """Count `num_bytes`, gathered before this instant, that are freed only after what has been gathered so far."""
        self._most_bytes += num_bytes if self._most_bytes else 0

    @property
    def any(self) -> bool:
        """Whether anything has been gathered."""
        return self._most_bytes > 0

    def more_than(self, operation_bytes: int) -> int:
        """By how many bytes the peak while gathering exceeds the bytes that exist while the operation runs: those that are
        still gathered, and `operation_bytes`."""
        return max(self._most_bytes - self._bytes - operation_bytes, 0)


@dataclass(slots=True)
class Reduction:
    """Bytes that reducing gradients allocates after an operation: first a copy that joins them, then tensors of this rank's
    part. `gone_bytes`: bytes that the operation used and that are free by then."""

    joined_bytes: int
    parts_bytes: int
    gone_bytes: int

    @property
    def beyond(self) -> int:
        """Bytes beyond what existed while the operation ran; negative if less is left."""
        return self.joined_bytes + self.parts_bytes - self.gone_bytes

    def num_bytes(self) -> tuple[int, int]:
        """Bytes beyond what existed while the operation ran: (of the copy, of the rest)."""
        joined = max(self.joined_bytes - self.gone_bytes, 0)
        return joined, max(self.parts_bytes - max(self.gone_bytes - self.joined_bytes, 0), 0)


@dataclass(slots=True)
class Instants:
    """Allocations at each instant of a micro-batch other than gathered weights. `made`: bytes that the instant's operation
    allocates. `reductions`: by instant, the reduction that follows the operation; by then what a checkpoint kept for the
    operation is free. `ends`: the instant after the last, at which the CPU waits for the GPU."""

    made: Sequence[int] | npt.NDArray[np.int64] = ()
    reductions: dict[int, Reduction] = field(default_factory=dict)
    ends: int = 0

    def made_at(self, instant: int) -> int:
        """Bytes that are allocated at an instant."""
        made = int(self.made[instant]) if 0 <= instant < len(self.made) else 0
        return made + sum(self.reductions[instant].num_bytes()) if instant in self.reductions else made

    def free_before_reduction(self, instant: int, num_bytes: int) -> None:
        """Count `num_bytes`, used by the operation at `instant`, as free before the operation's gradients are reduced."""
        if instant in self.reductions:
            self.reductions[instant].gone_bytes += num_bytes
