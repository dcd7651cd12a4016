"""How far the CPU is ahead of the GPU, and which freed blocks the allocator cannot reuse in the meantime.

When a tensor is freed, its block no longer counts as allocated. If another stream than the block's own uses it
(`record_stream`), the block returns to the cache only once an event, recorded on that stream at the free, is done
(c10/cuda/CUDACachingAllocator.cpp `free`, `insert_events`, `process_events`). Which events are done when the CPU requests
the next block depends on how far the CPU is ahead of the GPU. Assumed here: as far as it can be. The GPU has then done what
the CPU has waited for and nothing later, as in a run whose kernels take longer than their launches, and communication ends
together with the computation that hides it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from peakcast.models.ledger.tape.placing import BlockRun, Ints
from peakcast.models.ledger.tape.step import Step

LAUNCHES_AHEAD = 1024
"""How many kernels a CUDA stream's queue holds; a CPU that launches one more has to wait. Source: NVIDIA developer forums
68937 (about 1,000, measured)."""
OPERATIONS_AHEAD = LAUNCHES_AHEAD * 3 // 5
"""How many instants of the ledger launch as many kernels: a forward of Llama-3-8B under ZeRO-3 launches 1,991 in 1,193
(DeepSpeed 0.19.8, traced)."""
MOST_IN_FLIGHT = 2
"""`_max_num_inflight_all_gathers` (torch 2.4-2.13 `distributed/fsdp/_limiter_utils.py`)."""


@dataclass(slots=True)
class _Waiting:
    """Freed blocks that can be reused only when one event of the computing stream is done."""

    handles: list[int] = field(default_factory=list)
    gradients: list[tuple[BlockRun, Ints | None]] = field(default_factory=list)
    """(run, places) of the parameters' gradients that wait; None: all of the run."""

    def end(self, step: Step) -> None:
        """The event is done: the blocks can be reused."""
        step.reuse(self.handles)
        for run, places in self.gradients:
            run.reuse_gradients(step.now, places)


class RunAhead:
    """The events that the CPU records and waits for. `limits`: before an all-gather the CPU waits for the event before the
    last (FSDP1's `limit_all_gathers`); otherwise it waits for no event until backward ends."""

    def __init__(self, *, limits: bool) -> None:
        self.limits = limits
        self._events: deque[_Waiting] = deque()
        self._since_last_event = _Waiting()

    def let_go(self, step: Step, handles: list[int]) -> None:
        """Free tensors from the next instant on; their blocks can be reused after the next event. Empties the list."""
        self._since_last_event.handles += step.let_go(handles)

    def let_gradients_go(self, gradients: Iterable[tuple[BlockRun, Ints | None]]) -> None:
        """As `let_go`, for parameter gradients of runs, each with their places (None: all of them). They are freed at the
        instants that the runs have."""
        self._since_last_event.gradients += gradients

    def record(self) -> None:
        """Record an event after everything that the CPU has launched so far (`_FreeEventQueue.enqueue`)."""
        self._events.append(self._since_last_event)
        self._since_last_event = _Waiting()

    def wait(self, step: Step) -> None:
        """Before the next all-gather the CPU waits for the oldest event, if enough are outstanding
        (`_FreeEventQueue.dequeue_if_needed`)."""
        if self.limits and len(self._events) >= MOST_IN_FLIGHT:
            self._events.popleft().end(step)

    def catch_up(self, step: Step) -> None:
        """The CPU waits for everything, as when it reads the loss."""
        for waiting in (*self._events, self._since_last_event):
            waiting.end(step)
        self._events.clear()
        self._since_last_event = _Waiting()


@dataclass(frozen=True, slots=True)
class Awaited:
    """The events for which the CPU waits in a backward. `recorded`: the instants at which one is recorded, in order. The
    CPU lets `outstanding` of them be under way and waits for the oldest before it records another; at `ends` it waits for
    everything."""

    recorded: Sequence[int]
    outstanding: int
    ends: int

    def reusable(self, freed: int) -> int:
        """The instant from which the block of a tensor freed at instant `freed` can be reused, if the GPU is as far behind
        as it can be: when the CPU has waited for an event recorded since, or its queue of launches has been full."""
        waits = bisect_left(self.recorded, freed) + self.outstanding
        awaited = self.recorded[waits] if waits < len(self.recorded) else self.ends
        return min(freed + OPERATIONS_AHEAD, awaited, self.ends)
