"""What ZeRO-3 knows of the order in which modules come: DeepSpeed records it, and takes it for known until it is wrong.

Source: DeepSpeed 0.19.8 `runtime/zero/partitioned_param_coordinator.py` (`reset_step`, `trace_prologue`, `record_module`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peakcast.models.analytical.layouts.zero3_turns import Turn


@dataclass(slots=True)
class Order:
    """The turns since the network last began to run forward, whatever has come of it: a forward without a backward
    (of a reference, or beforehand) is one more of them."""

    known: tuple[Turn, ...] | None = None
    """Those of the last time, while what comes is the same."""
    recorded: list[Turn] | None = None
    """Those of this time, where they were not known as it began."""
    at: int = 0

    def begin(self) -> None:
        """The network runs forward."""
        if self.known is None:
            self.known, self.recorded = (None, []) if self.recorded is None else (tuple(self.recorded), None)
        self.at = 0

    def meet(self, turn: Turn) -> bool:
        """A module has its turn; whether another one was expected, and nothing is known from here on."""
        if self.known is None:
            if self.recorded is not None:
                self.recorded.append(turn)
            return False
        if self.at < len(self.known) and self.known[self.at].name == turn.name:
            return False
        self.known = None
        return True

    @property
    def coming(self) -> Iterator[Turn]:
        """The turns that are expected next."""
        known = self.known or ()
        return (known[at] for at in range(self.at, len(known)))
