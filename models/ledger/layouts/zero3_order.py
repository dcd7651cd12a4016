"""What ZeRO-3 knows of the order in which modules run: DeepSpeed records it, and relies on it until a module deviates.

Source: DeepSpeed 0.19.8 `runtime/zero/partitioned_param_coordinator.py` (`reset_step`, `trace_prologue`, `record_module`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero3_hooks import ModuleTurn


@dataclass(slots=True)
class Order:
    """The turns since the network last began to run forward. A forward without a backward (of a reference model, or to
    prepare) is part of them."""

    known: tuple[ModuleTurn, ...] | None = None
    """The turns of the previous run, as long as this run repeats them; None if there are none or this run has deviated."""
    recorded: list[ModuleTurn] | None = None
    """The turns of this run, if none were known when it began."""
    at: int = 0
    """How many of the known turns this run has repeated."""
    _uses: tuple[tuple[ModuleTurn, ...], dict[bool, _Uses]] | None = None
    """For the known turns: where each tensor is used, as a leaf module counts it and as others do."""

    def begin(self) -> None:
        """The network begins to run forward."""
        if self.known is None:
            self.known, self.recorded = (None, []) if self.recorded is None else (tuple(self.recorded), None)
        self.at = 0

    def deviates_at(self, turn: ModuleTurn) -> bool:
        """Note that a module's turn begins. Returns whether another module was expected: then the order of all later turns
        is unknown."""
        if self.known is None:
            if self.recorded is not None:
                self.recorded.append(turn)
            return False
        if self.at < len(self.known) and self.known[self.at].name == turn.name:
            return False
        self.known = None
        return True

    def used_soon(self, tensors: Sequence[StoredTensor], within: int, *, leaf: bool) -> set[StoredTensor]:
        """Those of `tensors` that the next expected turns use before turns with `within` elements have passed. A `leaf`
        also counts tensors inside the modules that come; other modules do not (`recurse` in `__params_to_release`)."""
        if self.known is None or not tensors:
            return set()
        if self._uses is None or self._uses[0] is not self.known:
            self._uses = self.known, {}
        of_known = self._uses[1]
        if leaf not in of_known:
            of_known[leaf] = _Uses([turn.module.counted(by_leaf=leaf) for turn in self.known])
        return of_known[leaf].used_within(tensors, self.at, within)


class _Uses:
    """Where in an order each tensor is used. `counted`: the tensors that count for each turn."""

    def __init__(self, counted: Sequence[Sequence[StoredTensor]]) -> None:
        self.passed = list(accumulate((sum(t.numel for t in tensors) for tensors in counted), initial=0))
        """Elements counted before each turn."""
        self.turns: dict[StoredTensor, list[int]] = {}
        for index, tensors in enumerate(counted):
            for tensor in tensors:
                self.turns.setdefault(tensor, []).append(index)

    def used_within(self, tensors: Iterable[StoredTensor], at: int, within: int) -> set[StoredTensor]:
        """Those of `tensors` that are used from turn `at` on, before `within` elements have passed."""
        end = bisect_left(self.passed, self.passed[at] + within, at)  # the first turn before which as many have passed
        found = set()
        for tensor in tensors:
            turns = self.turns.get(tensor, ())
            following = bisect_left(turns, at)
            if following < len(turns) and turns[following] < end:
                found.add(tensor)
        return found
