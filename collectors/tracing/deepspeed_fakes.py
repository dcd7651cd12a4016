"""What DeepSpeed asks of a GPU and of other ranks, answered on fake tensors: ZeRO then runs as it does on CUDA, and what it
offloads is on the device "cpu", apart from what stays.

Read and tried on DeepSpeed 0.19.8.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from peakcast.collectors.packages import imported


def install() -> None:
    """Choose DeepSpeed's CUDA accelerator, and replace, for this process, what needs a driver or the values of tensors. To
    be called while torch is still as it was: parts of DeepSpeed are given to torch.compile as they are imported."""
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
    """A set of parameters in an order that no run changes. A module waits for its weights as a set has them, which is by
    their addresses: where they come by several gathers, one's buffer may be freed before the next is copied out, or after.
    The last first keeps the buffer of the first until the others have come."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=lambda one: getattr(one, "ds_id", 0), reverse=True))


def _take_every_step(optimizer: Any) -> None:
    """A fake gradient cannot tell whether it is infinite; the step that is taken is the one to see."""
    asked = optimizer.has_overflow

    def has_overflow(*arguments: Any, **keywords: Any) -> bool:
        asked(*arguments, **keywords)
        return False

    optimizer.has_overflow = has_overflow
