"""How far the CPU is ahead of the GPU, and which freed blocks the allocator may not hand out meanwhile.

A block that a stream other than its own uses (`record_stream`) is not allocated any more once its tensor is gone, but
stays out of the cache until an event recorded then on that stream is done (c10/cuda/CUDACachingAllocator.cpp `free`,
`insert_events`, `process_events`). Which events are done when the CPU asks for the next block depends on how far it is
ahead. It is taken to be as far ahead as it can be: the GPU has done what the CPU has waited for and nothing later, as in a
run whose kernels take longer than their launches; and communication is taken to be done with the computation that it is
hidden behind.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from peakcast.models.analytical.step import Run, Step

MOST_IN_FLIGHT = 2
"""`_max_num_inflight_all_gathers` (torch 2.4-2.13 `distributed/fsdp/_limiter_utils.py`)."""


@dataclass(slots=True)
class _Waiting:
    """What waits for one event of the stream that computes."""

    handles: list[int] = field(default_factory=list)
    gradients: list[tuple[Run, str]] = field(default_factory=list)
    """Runs of whose parameters the gradients wait: those of one operation, or ("") all."""

    def end(self, step: Step) -> None:
        step.reuse(self.handles)
        for run, operation in self.gradients:
            run.reuse_gradients(step.now, operation)


class RunAhead:
    """The events that a CPU leaves behind and waits for. `limits`: before an all-gather it waits for the event before the
    last one (FSDP1's `limit_all_gathers`), else for none until backward ends."""

    def __init__(self, *, limits: bool) -> None:
        self.limits = limits
        self._events: deque[_Waiting] = deque()
        self._since = _Waiting()

    def let_go(self, step: Step, handles: list[int]) -> None:
        """Tensors are gone from the next instant on, their blocks free with the next event. Empties the list."""
        self._since.handles += step.let_go(handles)

    def let_gradients_go(self, runs: list[Run], operation: str) -> None:
        """The same of the gradients of the runs' parameters, of one operation or ("") all, which die as the runs say."""
        self._since.gradients += [(run, operation) for run in runs]

    def record(self) -> None:
        """An event behind all that the CPU has sent so far (`_FreeEventQueue.enqueue`)."""
        self._events.append(self._since)
        self._since = _Waiting()

    def wait(self, step: Step) -> None:
        """Before the next all-gather the CPU waits for the oldest event, where enough are outstanding
        (`_FreeEventQueue.dequeue_if_needed`)."""
        if self.limits and len(self._events) >= MOST_IN_FLIGHT:
            self._events.popleft().end(step)

    def catch_up(self, step: Step) -> None:
        """The CPU waits for everything, as when it looks at the loss."""
        for waiting in (*self._events, self._since):
            waiting.end(step)
        self._events.clear()
        self._since = _Waiting()
