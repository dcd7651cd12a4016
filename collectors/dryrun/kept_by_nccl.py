"""Tensors that NCCL keeps beyond the step, because the script never waits for the handle of their collective.

From torch 2.8 on (pytorch pull request 150398) a collective with `async_op=True` holds its tensors until its handle is
waited for. A script that waits for the handle's future instead, or for nothing, leaves them to NCCL's watchdog: it looks
every 100 ms which collectives the GPU has finished, and the next call of a collective lets go of their tensors
(ProcessGroupNCCL.cpp, `stashed_for_allocator_safety_`, `Watchdog::runLoop`, `shelvesToUnstash_`). How many steps' tensors
that are depends on times. The most in a run of many steps is followed here: the CPU is as far ahead of the GPU as it can be
(`BlocksInUse`), and the watchdog has just looked when a collective ends. A collective of a list of tensors of one shape
goes through a flat copy of the list (`newLikeFlat`, in every release), which is held as well.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from peakcast.catalog import Device
from peakcast.catalog.speeds import speed
from peakcast.collectors.dryrun.noted import RunFindings, where
from peakcast.collectors.tracing.tracer import Tracer
from peakcast.core.units import format_gib
from peakcast.core.versions import release

FIRST_RELEASE = (2, 8)
"""Earlier ones mark blocks as used by NCCL's stream (`recordStream`): these count as free as soon as Python lets go, but
are not handed out again before NCCL has finished."""
STREAM = -1
"""NCCL's stream, which no script makes."""
UNMARKED = ("_allgather_base", "_reduce_scatter_base")
"""What marks nothing if it waits at once (torch 2.7 ProcessGroupNCCL.cpp: `avoidRecordStreams = ... || !opts.asyncOp`)."""
WATCHDOG_SECONDS = 0.1
"""`kWatchdogThreadSleepMillis`, torch 2.8 to 2.13."""
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "alltoall", "alltoall_base"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single"),
    "all_to_all_single",
)
"""Methods of a process group that hold tensors; sends and receives do not."""
FLATTENED = {"allgather": 0, "reduce_scatter": 1}
"""Methods that copy lists of tensors -> which of their arguments has the lists (ProcessGroupNCCL.cpp, `outputFlattened` and
`inputFlattened`)."""


@dataclass
class _Collective:
    """A collective that holds tensors."""

    handle: Any
    place: str
    launched: int
    """The operation at which it was called."""
    storages: set[int]
    let_go: int | None = None
    """The operation at which it let go of them; None: it still holds them."""


class KeptByNccl:
    """The collectives of one run that nobody has waited for."""

    def __init__(self, tracer: Tracer, device: Device) -> None:
        self._tracer = tracer
        self._delay = WATCHDOG_SECONDS * speed(device.name).operations_per_second
        self._holding: dict[int, _Collective] = {}
        """By the `id` of the handle, in the order of the calls."""
        self._ended: list[_Collective] = []
        """Those that the watchdog has seen end."""
        self._copies: set[int] = set()
        """Storages of the flat copies that the last collective made."""

    def install(self, torch_release: str | None) -> None:
        """Follow the collectives of this process, if the run's torch (None: the installed one) holds their tensors."""
        if not dist.is_available():
            return
        groups: Any = dist.ProcessGroup
        holds = release(torch_release or torch.__version__)[:2] >= FIRST_RELEASE
        for name, lists in FLATTENED.items():
            setattr(groups, name, self._through_copies(getattr(groups, name), lists, marks=not holds))
        for name in COLLECTIVES:
            if hasattr(groups, name):
                method = getattr(groups, name)
                setattr(groups, name, self._followed(method) if holds else self._marked(method))
        if not holds:
            return
        handles: list[Any] = [dist.Work, *dist.Work.__subclasses__()]
        for kind in handles:
            if "wait" in vars(kind):
                kind.wait = self._waited(kind.wait)

    @property
    def settled(self) -> bool:
        """Whether further steps keep no more: nothing is kept, or the watchdog has seen something end."""
        return not self._holding or bool(self._ended)

    @property
    def keeps(self) -> bool:
        """Whether something was left to the watchdog."""
        return bool(self._holding or self._ended)

    def say(self, notes: RunFindings, step_ends: Sequence[int], num_bytes: int) -> None:
        """Note how many steps' tensors are counted, with `num_bytes` at the peak; steps end at the operations
        `step_ends`."""
        if not self.keeps or num_bytes <= 0:
            return
        kept = [*self._ended, *self._holding.values()]
        steps = max(self._steps(one, step_ends) for one in kept)
        notes.add(
            "timing_assumed",
            "command",
            f"{kept[0].place} calls a collective and does not wait for its handle, so NCCL keeps its tensors until its "
            f"watchdog has seen it end, which depends on times: those of up to {steps} step{'s' * (steps > 1)} are "
            f"counted, {format_gib(num_bytes)}; the bar begins where none is kept.",
            "less",
        )

    def _steps(self, collective: _Collective, ends: Sequence[int]) -> int:
        """Number of steps that ended while it held its tensors."""
        until = self._tracer.now if collective.let_go is None else collective.let_go
        return bisect.bisect_right(ends, until) - bisect.bisect_right(ends, collective.launched)

    def _through_copies(self, method: Any, lists: int, *, marks: bool) -> Any:
        """`method` with the flat copies of the lists that argument number `lists` has. `marks`: they are used by NCCL's
        stream."""

        @functools.wraps(method)
        def called(group: Any, *arguments: Any, **keywords: Any) -> Any:
            copies = [_flat(tensors) for tensors in arguments[lists] if len({one.shape for one in tensors}) == 1]
            self._copies = self._tracer.numbers_of(copies)
            for copy in copies if marks else ():
                self._tracer.used(copy, STREAM)
            return method(group, *arguments, **keywords)

        return called

    def _followed(self, method: Any) -> Any:
        @functools.wraps(method)
        def called(group: Any, *arguments: Any, **keywords: Any) -> Any:
            handle = method(group, *arguments, **keywords)
            self._see()
            tensors = (leaf for leaf in tree_iter((arguments, keywords)) if isinstance(leaf, torch.Tensor))
            storages = self._tracer.numbers_of(tensors) | self._copies
            self._copies = set()
            if handle is not None and storages:
                self._tracer.kept_until.update(dict.fromkeys(storages))
                self._holding[id(handle)] = _Collective(handle, where(), self._tracer.now, storages)
            return handle

        return called

    def _marked(self, method: Any) -> Any:
        @functools.wraps(method)
        def called(group: Any, *arguments: Any, **keywords: Any) -> Any:
            handle = method(group, *arguments, **keywords)
            if method.__name__ not in UNMARKED or getattr(arguments[-1], "asyncOp", True):
                for leaf in tree_iter((arguments, keywords)):
                    if isinstance(leaf, torch.Tensor):
                        self._tracer.used(leaf, STREAM)
            return handle

        return called

    def _waited(self, wait: Any) -> Any:
        @functools.wraps(wait)
        def waited(handle: Any, *arguments: Any, **keywords: Any) -> Any:
            answer = wait(handle, *arguments, **keywords)
            if id(handle) in self._holding:
                self._let_go(id(handle))
            return answer

        return waited

    def _see(self) -> None:
        """Let go of the tensors of collectives that the watchdog has seen end by now."""
        for key, collective in list(self._holding.items()):
            if self._tracer.operations_between(collective.launched, self._tracer.finished) < self._delay:
                break
            self._ended.append(self._let_go(key))

    def _let_go(self, key: int) -> _Collective:
        collective = self._holding.pop(key)
        still = set().union(*(other.storages for other in self._holding.values()))
        self._tracer.kept_until.update(dict.fromkeys(collective.storages - still, self._tracer.now))
        collective.handle, collective.let_go = None, self._tracer.now
        return collective


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor through which a collective moves `tensors`."""
    return torch.empty((len(tensors), *tensors[0].shape), dtype=tensors[0].dtype, device=tensors[0].device)
