"""Which fraction of parameters, gradients and optimizer states a data-parallel rank keeps, and what gathering them costs.

The persistent part is exact up to padding. The transient part is the rule of thumb of where-memory-goes G (two gathered
units, one unit of unsharded gradients, the root unit all along); `scope` says so until buffers are modelled one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from peakcast.spec import TrainingJob


@dataclass(frozen=True, slots=True)
class Sharding:
    """Shard counts (1: not sharded) of one data-parallel group."""

    parameters: int = 1
    gradients: int = 1
    states: int = 1
    gathered_units: int = 0
    """Unsharded layers alive at once while computing."""
    gradient_copies: int = 0
    """Further full copies of the gradients that stay (DDP's buckets)."""

    @property
    def gathers(self) -> bool:
        return self.parameters > 1


def sharding(job: TrainingJob) -> Sharding:
    """The sharding of `job`'s data-parallel ranks."""
    layout = job.parallelism
    ranks = layout.data_parallel_size * layout.context_parallel_size
    if ranks == 1:
        return Sharding()
    if layout.sharding in ("fsdp1", "fsdp2", "hsdp") or layout.zero_stage == 3:
        return Sharding(parameters=ranks, gradients=ranks, states=ranks, gathered_units=2)
    if layout.zero_stage == 2:
        return Sharding(gradients=ranks, states=ranks)
    if layout.zero_stage == 1:
        return Sharding(states=ranks)
    return Sharding(gradient_copies=1)  # DDP: buckets are a second set unless gradient_as_bucket_view


def shard(num_bytes: int, shards: int) -> int:
    """Bytes of one rank's part of a tensor of `num_bytes`."""
    return -(-num_bytes // shards)
