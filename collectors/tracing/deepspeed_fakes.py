"""Answers DeepSpeed's questions to a GPU and to other ranks on fake tensors. ZeRO then runs as on CUDA, and tensors that it
offloads are on the device "cpu", separate from the others.

Read and tried on DeepSpeed 0.19.8.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from peakcast.collectors.machine.packages import imported


def install() -> None:
    """Choose DeepSpeed's CUDA accelerator, and replace, for this process, code that needs a driver or the values of
    tensors. To be called before torch is changed: parts of DeepSpeed are passed to torch.compile when they are imported."""
    os.environ["DS_ACCELERATOR"] = "cuda"
    asked: dict[str, Any] = {"parameter": "framework", "value": "deepspeed"}
    imported("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed", **asked)
    accelerator: Any = imported("deepspeed.accelerator", "deepspeed", **asked).get_accelerator()
    zero = {
        name: imported(f"deepspeed.runtime.zero.{name}", "deepspeed", **asked)
        for name in ("stage_1_and_2", "stage3", "partition_parameters", "partitioned_param_coordinator")
    }
    accelerator.is_available = lambda: True
    used = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    for reading in (*used, "available_memory", "total_memory"):
        setattr(accelerator, reading, lambda *_: 0)
    for call in ("reset_peak_memory_stats", "empty_cache", "range_push", "range_pop"):
        setattr(accelerator, call, lambda *_, **__: None)
    for module in zero.values():  # the first gather compares numbers with other ranks'
        module.assert_ints_same_as_other_ranks = lambda *_: None  # type: ignore[attr-defined]
    zero["partitioned_param_coordinator"].set = _LastFirst  # type: ignore[attr-defined]
    _take_every_step(zero["stage_1_and_2"].DeepSpeedZeroOptimizer)
    _take_every_step(zero["stage3"].DeepSpeedZeroOptimizer_Stage3)


class _LastFirst(set[Any]):
    """A set of parameters with a fixed order. A module waits for its weights in the order of a set, which depends on their
    addresses: if they are gathered in several parts, the buffer of one may be freed before or after the next is copied.
    With the last one first, the buffer of the first is kept until the others have been gathered."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=lambda one: getattr(one, "ds_id", 0), reverse=True))


def _take_every_step(optimizer: Any) -> None:
    """Never skip a step: whether a fake gradient is infinite is unknown, and the step that is taken is the one to trace."""
    asked = optimizer.has_overflow

    def has_overflow(*arguments: Any, **keywords: Any) -> bool:
        asked(*arguments, **keywords)
        return False

    optimizer.has_overflow = has_overflow
