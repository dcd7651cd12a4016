"""What stage 3 allocates within a single instant of the ledger, that is, one operation: weights are gathered before it
runs, and gradients are reduced after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class Fetched:
    """What modules gather before the operation at instant `at` runs, one after the other."""

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
        """Free `num_bytes` that existed before this instant, after what has been gathered so far."""
        self._most_bytes += num_bytes if self._most_bytes else 0

    @property
    def any(self) -> bool:
        """Whether anything has been gathered."""
        return self._most_bytes > 0

    def more_than(self, operation_bytes: int) -> int:
        """By how many bytes the peak of gathering exceeds what is left of it plus what the operation allocates then."""
        return max(self._most_bytes - self._bytes - operation_bytes, 0)


@dataclass(slots=True)
class Reduction:
    """What reducing gradients allocates after an operation: a joined copy of them, then what is made of this rank's part.
    `gone_bytes`: what the operation used and has freed by then."""

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
    """What else is allocated at each instant of a micro-batch. `made`: bytes that operations allocate, after their modules
    have gathered. `reductions`: by instant, the reduction that follows the operation, when what a checkpoint kept for that
    operation is freed."""

    made: Sequence[int] | npt.NDArray[np.int64] = ()
    reductions: dict[int, Reduction] = field(default_factory=dict)

    def made_at(self, instant: int) -> int:
        """Bytes that are allocated at an instant."""
        made = int(self.made[instant]) if 0 <= instant < len(self.made) else 0
        return made + sum(self.reductions[instant].num_bytes()) if instant in self.reductions else made

    def free_before_reduction(self, instant: int, num_bytes: int) -> None:
        """Bytes are freed that the operation at an instant used, before what it made is reduced."""
        if instant in self.reductions:
            self.reductions[instant].gone_bytes += num_bytes
