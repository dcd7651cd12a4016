"""How FSDP1 sends rank 0's weights to the other ranks while the network is built (`sync_module_states`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from peakcast.core.units import MIB
from peakcast.models.ledger.layouts.fsdp_units import Unit
from peakcast.models.ledger.layouts.run_ahead import LAUNCHES_AHEAD
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category, Phase

BROADCAST_BUCKET_BYTES = 250 * MIB
"""`PARAM_BROADCAST_BUCKET_SIZE` (torch 2.4-2.13 `distributed/fsdp/_init_utils.py`)."""


def size_buckets(sizes: Sequence[int]) -> list[list[int]]:
    """`sizes` grouped into buckets, as `compute_bucket_assignment_by_size` does."""
    made: list[list[int]] = [[]]
    for size in sizes:
        if sum(made[-1]) >= BROADCAST_BUCKET_BYTES:
            made.append([])
        made[-1].append(size)
    return made


LAUNCHES_OF_A_UNIT = 3
"""Launches for a unit besides those of its broadcasts: joining and padding the flat parameter, and copying the rank's
part."""


class Broadcasts:
    """Sends the buckets of one network, unit after unit. The tensors of a bucket are joined to one tensor; a bucket of one
    tensor is sent without a copy. Two buckets are sent at a time (`_broadcast_coalesced`).

    `ahead`: this rank's weights are on `meta`, so it copies nothing from the host and its CPU does not wait for rank 0: it
    launches broadcasts until the stream's queue is full. The tensors that it receives into are recorded on NCCL's stream
    (`csrc/distributed/c10d/comm.cpp` BroadcastWork, whose `asyncOp` is set) and cannot be reused before they have arrived.
    A rank that has weights on the host waits when it copies the next unit's: until then it has joined and cut this one.
    """

    def __init__(self, *, ahead: bool) -> None:
        self._ahead = ahead
        self._launched = 0
        self._under_way: deque[tuple[int, list[int]]] = deque()
        """For each bucket being sent: the number of launches up to its last, and the handles of its tensor."""

    def send(self, step: Step, unit: Unit, sizes: Sequence[int]) -> None:
        """Send the buckets of a unit whose tensors have `sizes` bytes."""
        for bucket in size_buckets(sizes):
            self._free_arrived(step)
            joined = len(bucket) > 1
            copied = step.allocate("broadcast", Category.COMMUNICATION_BUFFERS, [sum(bucket)] * joined, unit.name)
            self._launched += (1 + len(bucket)) * joined  # one joins the tensors, one per tensor copies what has arrived
            self._under_way.append((self._launched, copied))
            step.moment("broadcast", Phase.INIT)
        self._launched += LAUNCHES_OF_A_UNIT

    def copied_from_host(self, step: Step) -> None:
        """This rank's CPU has copied weights from the host, which waits for all that was launched before."""
        if not self._ahead:
            self.finish(step)

    def _free_arrived(self, step: Step) -> None:
        """Free the tensors of buckets that have arrived."""
        while self._under_way:
            arrived = self._launched - self._under_way[0][0] > LAUNCHES_AHEAD
            if not (arrived if self._ahead else len(self._under_way) == 2):
                break
            step.free(self._under_way.popleft()[1])

    def finish(self, step: Step) -> None:
        """Wait until all buckets have arrived."""
        while self._under_way:
            step.free(self._under_way.popleft()[1])
