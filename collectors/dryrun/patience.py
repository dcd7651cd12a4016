"""How many more steps a dry run follows after the usual number of steps.

A script that compiles often warms up first: it runs each of its batch sizes and attention windows for a few steps, undoes
them, evaluates and only then trains. Three steps would show the smallest batch, and no evaluation.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from peakcast.collectors.dryrun.lengths import NUM_STEPS

QUIET_STEPS = 4
"""After this many steps in which nothing was compiled, no further graph is expected."""
QUICK, MOST_SECONDS = 10, 60.0
"""If an evaluation is to come, further steps are followed while each takes less than 1/QUICK of the time of the first
steps, which includes compiling; those in which nothing was compiled altogether for at most MOST_SECONDS, and no longer than
the first steps took. These are seconds of processor time, because the machine may be busy."""
MOST_IDLE_STEPS = 512
"""Then steps in which the network is not trained follow until the evaluation, at most so many, for MOST_SECONDS again."""
MOST_STEPS, SHARE = 48, 0.6
"""The limits that always hold: MOST_STEPS more steps, and this share of the run's time limit."""


class Patience:
    """Watches the steps of a run that may take `seconds`. `settled` tells whether a step no longer leaves more in memory
    than the one before."""

    def __init__(self, seconds: float, settled: Callable[[], bool] = lambda: True) -> None:
        self._settled = settled
        self._until = time.monotonic() + SHARE * seconds
        self._ended = [time.process_time()]
        """Times of the process at which the script began and each step ended."""
        self._graphs = [_num_graphs()]
        """The number of graphs compiled by each of these times."""
        self._idle: list[float] = []
        """Times of the process at which idle steps began."""
        self.interrupted = ""
        """What was still going on when a limit ended it; "" if nothing was."""

    def end_step(self) -> None:
        """Note that a step has ended."""
        self._ended.append(time.process_time())
        self._graphs.append(_num_graphs())

    def goes_on(self, *, evaluates_later: bool) -> bool:
        """Whether to follow another step after enough have ended: while steps still compile something, or leave more in
        memory than the one before, or if an evaluation is to come (`evaluates_later`) and steps are quick."""
        compiles = self._graphs[-1] > self._graphs[max(0, len(self._graphs) - 1 - QUIET_STEPS)]
        if not (compiles or not self._settled() or (evaluates_later and self._is_quick())):
            return False
        late, steps = time.monotonic() > self._until, len(self._ended) - 1
        if not late and steps < NUM_STEPS + MOST_STEPS:
            return True
        if compiles and self._graphs[-1] > self._graphs[NUM_STEPS - 1]:  # not only to begin with
            limit = f"{SHARE:.0%} of --timeout-seconds" if late else f"{steps} steps"
            self.interrupted = f"torch.compile was still compiling when {limit} had passed"
        return False

    def idles(self) -> bool:
        """Whether to go on with another step in which the network is not trained, to reach an evaluation."""
        self._idle.append(time.process_time())
        spent = self._idle[-1] - self._idle[0]
        return time.monotonic() < self._until and spent < MOST_SECONDS and len(self._idle) <= MOST_IDLE_STEPS

    def _is_quick(self) -> bool:
        took = [after - before for before, after in itertools.pairwise(self._ended)]
        quiet = [before == after for before, after in itertools.pairwise(self._graphs)]
        waited = sum(itertools.compress(took[NUM_STEPS:], quiet[NUM_STEPS:]))
        first = sum(took[:NUM_STEPS])
        return QUICK * took[-1] < first and waited < min(first, MOST_SECONDS)


def _num_graphs() -> int:
    """The number of graphs that `torch.compile` has compiled; it is not imported for that."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
