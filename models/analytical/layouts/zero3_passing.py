"""What stage 3 allocates within one instant of the ledger, which is an operation: weights are fetched before it runs,
gradients are reduced when it is over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Fetched:
    """What modules fetch before the operation at instant `at` runs, one after the other."""

    at: int
    _bytes: int = 0
    _most_bytes: int = 0

    def allocate(self, num_bytes: int) -> None:
        """So many bytes more are there."""
        self._bytes += num_bytes
        self._most_bytes = max(self._most_bytes, self._bytes)

    def free(self, num_bytes: int) -> None:
        """So many of them are gone again."""
        self._bytes -= num_bytes

    def free_older(self, num_bytes: int) -> None:
        """What was there before this instant is gone, after what has been fetched so far."""
        self._most_bytes += num_bytes if self._most_bytes else 0

    def more_than(self, operation_bytes: int) -> int:
        """Bytes by which this was more, at the most, than what is left of it and what the operation allocates then."""
        return max(self._most_bytes - self._bytes - operation_bytes, 0)


@dataclass(slots=True)
class Reduction:
    """What reducing gradients takes when an operation is over: a joined copy of them, then what is made of this rank's
    part. `gone_bytes`: of the operation's, which are there no more."""

    joined_bytes: int
    parts_bytes: int
    gone_bytes: int

    @property
    def beyond(self) -> int:
        """Bytes beyond what was there while the operation ran, negative where less is left."""
        return self.joined_bytes + self.parts_bytes - self.gone_bytes

    def num_bytes(self) -> tuple[int, int]:
        """Beyond what was there while the operation ran: of the copy, and of the rest."""
        joined = max(self.joined_bytes - self.gone_bytes, 0)
        return joined, max(self.parts_bytes - max(self.gone_bytes - self.joined_bytes, 0), 0)
