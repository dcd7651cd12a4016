"""Which ranks of a job to compare when looking for its worst: one for each place in the layout that differs. Where ranks
own whole tensors, ranks with the same place differ too, and the one whose optimizer owns most is compared."""

from __future__ import annotations

from functools import lru_cache

from peakcast.core.units import FP32
from peakcast.jobs.ranks import ranks_that_differ
from peakcast.jobs.spec import TrainingJob


def fullest_ranks(job: TrainingJob) -> tuple[int, ...]:
    """`ranks_that_differ`, each replaced by the rank of its data-parallel group whose optimizer owns most."""
    ranks = ranks_that_differ(job)
    if job.framework != "megatron":
        return ranks
    from peakcast.models.ledger.megatron.buffers import owns_whole_tensors

    return tuple(_fullest(job, rank) for rank in ranks) if owns_whole_tensors(job) else ranks


@lru_cache(maxsize=1024)
def _fullest(job: TrainingJob, rank: int) -> int:
    """The rank, among the data-parallel replicas of `rank`, whose optimizer owns most."""
    layout = job.parallelism
    between = layout.tensor_parallel_size * layout.context_parallel_size
    return max(range(rank, rank + layout.data_parallel_size * between, between), key=lambda other: _owned(job, other))


def _owned(job: TrainingJob, rank: int) -> int:
    """Bytes of the fp32 parameters and states that the optimizer of `rank` owns."""
    from peakcast.models.ledger.megatron.buffers import buffers
    from peakcast.models.ledger.megatron.share import rank_share, weights_share
    from peakcast.models.ledger.megatron.states import state_widths

    share = weights_share(rank_share(job, None, rank))
    return sum(
        numel * (FP32 + sum(state_widths(share, p).values())) for buffer in buffers(share) for p, numel in buffer.pieces
    )
