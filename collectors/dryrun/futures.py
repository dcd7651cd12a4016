"""Says where a script waits for a collective by its future: NCCL then keeps the collective's tensors for longer, which
depends on times that a dry run does not have."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from peakcast.collectors.dryrun.noted import Notes, where


def install(notes: Notes) -> None:
    """Note the first future that the script asks a collective for.

    A collective with `async_op=True` keeps its tensors until its handle is waited for. If only its future is, they stay
    until NCCL's watchdog, which looks every 100 ms, has seen it end, and another collective is called. The CPU may have
    sent some further steps by then. Source: torch 2.8 ProcessGroupNCCL, `stashed_for_allocator_safety_` and
    `shelvesToUnstash_`.
    """
    if not dist.is_available():
        return
    work: Any = dist.Work
    get_future, said = work.get_future, False

    @functools.wraps(get_future)
    def noted(handle: Any) -> Any:
        nonlocal said
        if not said:
            said = True
            notes.add(
                "script_part_skipped",
                "command",
                f"{where()} waits for a collective by its future, not its handle: from torch 2.8 on NCCL keeps its tensors "
                "until its watchdog has seen it end, those of some steps if the CPU runs ahead; they are not counted.",
                "more",
            )
        return get_future(handle)

    work.get_future = noted
