"""How FSDP1 sends the weights of rank 0 to the others while the network is built (`sync_module_states`)."""

from __future__ import annotations

from collections.abc import Sequence

from peakcast.models.analytical.layouts.units import Unit
from peakcast.models.analytical.step import Step
from peakcast.timeline import Category, Phase
from peakcast.units import MIB

BROADCAST_BUCKET_BYTES = 250 * MIB
"""`PARAM_BROADCAST_BUCKET_SIZE` (torch 2.4-2.13 `distributed/fsdp/_init_utils.py`)."""


def buckets(sizes: Sequence[int]) -> list[list[int]]:
    """`compute_bucket_assignment_by_size`."""
    made: list[list[int]] = [[]]
    for size in sizes:
        if sum(made[-1]) >= BROADCAST_BUCKET_BYTES:
            made.append([])
        made[-1].append(size)
    return made


def broadcast(step: Step, unit: Unit, sizes: Sequence[int]) -> None:
    """`_broadcast_coalesced`: in buckets that end with the tensor that fills them, two under way at a time. A tensor that
    is a bucket by itself is not copied."""
    under_way: list[list[int]] = []
    for bucket in buckets(sizes):
        if len(under_way) == 2:
            step.free(under_way.pop(0))
        copied = [sum(bucket)] if len(bucket) > 1 else []
        under_way.append(step.allocate("broadcast", Category.COMMUNICATION_BUFFERS, copied, unit.name))
        step.moment("broadcast", Phase.INIT)
    for copies in under_way:
        step.free(copies)
