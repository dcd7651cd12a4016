"""How FSDP1 sends the weights of rank 0 to the others while the network is built (`sync_module_states`)."""

from __future__ import annotations

from collections import deque
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


LAUNCHES_AHEAD = 1024
"""Kernels that wait in a CUDA stream's queue before the CPU that launches another one waits as well.
Source: NVIDIA developer forums 68937 (about 1,000, measured)."""
LAUNCHES_OF_A_UNIT = 3
"""Beside those of its broadcasts: the flat parameter joined and padded, and the rank's part of it copied."""


class Broadcasts:
    """The buckets of one network, a unit after the other, each in one tensor; a tensor that is a bucket by itself is not
    copied. Two are under way at a time (`_broadcast_coalesced`).

    `ahead`: the rank has nothing to copy from the host (its weights are on `meta`), so its CPU does not wait for rank 0,
    which has: it goes on until the queue of launches is full. What it broadcasts into is recorded on NCCL's stream
    (`csrc/distributed/c10d/comm.cpp` BroadcastWork, whose `asyncOp` is set) and cannot be used again until it has arrived.
    """

    def __init__(self, *, ahead: bool) -> None:
        self._ahead = ahead
        self._launched = 0
        self._under_way: deque[tuple[int, list[int]]] = deque()
        """Launches up to each bucket's last one, and its tensor."""

    def send(self, step: Step, unit: Unit, sizes: Sequence[int]) -> None:
        """Those of a unit whose tensors have these bytes."""
        for bucket in buckets(sizes):
            self._let_go(step)
            joined = len(bucket) > 1
            copied = step.allocate("broadcast", Category.COMMUNICATION_BUFFERS, [sum(bucket)] * joined, unit.name)
            self._launched += (1 + len(bucket)) * joined  # joins the tensors, and copies what came into each
            self._under_way.append((self._launched, copied))
            step.moment("broadcast", Phase.INIT)
        self._launched += LAUNCHES_OF_A_UNIT
        if not self._ahead:
            self.finish(step)

    def _let_go(self, step: Step) -> None:
        while self._under_way:
            arrived = self._launched - self._under_way[0][0] > LAUNCHES_AHEAD
            if not (arrived if self._ahead else len(self._under_way) == 2):
                break
            step.free(self._under_way.popleft()[1])

    def finish(self, step: Step) -> None:
        """All have arrived."""
        while self._under_way:
            step.free(self._under_way.popleft()[1])
