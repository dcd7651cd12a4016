"""Records a real run on a GPU: a tracer that also stamps the allocator's history with the current operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter

from peakcast.collectors.tracing import history
from peakcast.collectors.tracing.tracer import Tracer
from peakcast.core.errors import CollectorError
from peakcast.timelines.files import timeline_to_mapping
from peakcast.timelines.timeline import Category, Phase

MAX_ENTRIES = 2_000_000
"""Actions that the allocator keeps. A longer run overwrites its beginning, and is then not recorded."""


class Recording(Tracer):
    """A `Tracer` for real tensors, together with the allocator's history. `content` is the content of a file of
    timelines."""

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__(device_type)
        self._addresses: dict[int, int] = {}  # number of the entry -> its address
        self._ran_in: list[str] = []
        self._steps: list[int] = []

    def __enter__(self) -> Recording:
        """Begin to record."""
        if not hasattr(torch.cuda.memory, "_set_memory_metadata"):
            raise CollectorError(
                f"an allocator history needs torch 2.10 or newer, and this is {torch.__version__}; leave --history out.",
                parameter="history",
            )
        torch.cuda.memory._record_memory_history(context=None, max_entries=MAX_ENTRIES)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.cuda.memory._set_memory_metadata("")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_iter((args, kwargs)):  # tensors made by C++ code without an operator are seen when one uses them
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, self.now)
        torch.cuda.memory._set_memory_metadata(str(self.now))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._ran_in.append(self.module)
        torch.cuda.memory._set_memory_metadata(f"{self.now - 1}+")
        return result

    def _begin(self, storage: torch.UntypedStorage, instant: int) -> None:
        number = self._count
        super()._begin(storage, instant)
        if self._count != number and storage.nbytes():
            self._addresses[number] = storage.data_ptr()

    def step(self) -> None:
        """A step begins."""
        self._steps.append(self.now)

    def content(self) -> dict[str, Any]:
        """The first and the last step, and the run's hidden allocations. Raises: CollectorError when it was too long."""
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        return self.content_of(trace)

    def content_of(self, trace: list[dict[str, Any]]) -> dict[str, Any]:
        """The same as `content`, from an allocator's trace."""
        if len(trace) >= MAX_ENTRIES:
            raise CollectorError(f"the run has more than {MAX_ENTRIES:,} actions of the allocator; record a shorter one.")
        made = history.allocations(trace)
        operators = [
            history.Operator(name, Phase(phase), module)
            for name, phase, module in zip(self._labels, self._phases, self._ran_in, strict=True)
        ]
        storages = [self._storage(number, address) for number, address in self._addresses.items()]
        starts = [*self._steps, self.now]
        spans = {"first": starts[:2], "steady": starts[-2:]}
        steps = {step: history.timeline(made, storages, operators, *span) for step, span in spans.items()}
        mappings = {step: timeline_to_mapping(timeline) for step, timeline in steps.items()}
        return {**mappings, "hidden": history.hidden(made, storages, operators)}

    def _storage(self, number: int, address: int) -> history.ReportedStorage:
        one = self._entries[number]
        named = self._named.get(number)
        category, called = named or (self._guess(one.born, self.now if one.dies is None else one.dies, self.now), one.name)
        return history.ReportedStorage(one.born, address, called or "tensor", Category(category), one.module)
