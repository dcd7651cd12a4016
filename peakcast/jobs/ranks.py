"""Which ranks of a job hold different tensors: those of different pipeline stages and, with torch's ring attention, those
that share a sequence."""

from __future__ import annotations

from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob


def ranks_that_differ(job: TrainingJob) -> tuple[int, ...]:
    """One rank of each kind: of each pipeline stage, the first rank for each different position in the ring of attention.
    Stages are outermost, so the ranks of a stage are consecutive."""
    return _ranks(job, range(job.parallelism.pipeline_parallel_size))


def ranks_to_trace(job: TrainingJob) -> tuple[int, ...]:
    """Those ranks of `ranks_that_differ` that are traced: in a pipeline, those of the first, the middle and the last
    stage."""
    stages = job.parallelism.pipeline_parallel_size
    return _ranks(job, sorted({0, stages // 2, stages - 1}))


MOST_SHARDS = 8
"""For how many ranks of a stage reserved memory is computed, as it depends on their parts of the optimizer."""


def ranks_by_shard(job: TrainingJob, rank: int) -> tuple[int, ...]:
    """Ranks of the stage whose first rank is `rank`. They are equal except for the parameters whose states they own, or for
    how FSDP1 builds their networks (`fsdp1_others_on_meta`). Megatron's distributed optimizer splits buffers anywhere, so
    ranks with equal sums of bytes have tensors of different sizes, and reserve up to 5 % more or less. All ranks of a stage
    up to `MOST_SHARDS`, else as many at equal distances."""
    layout = job.parallelism
    if layout.sharding == "fsdp1" and layout.num_replicas > 1 and conventions(job).get("fsdp1_others_on_meta"):
        return (rank, 1)
    shards = layout.data_parallel_size * layout.context_parallel_size
    if job.framework != "megatron" or not layout.zero_stage or shards == 1:
        return (rank,)
    number = min(shards, MOST_SHARDS)
    first = rank - rank % (shards * layout.tensor_parallel_size)
    chosen = (i * (shards - 1) // (number - 1) for i in range(number))
    return tuple(sorted({rank, *(first + place * layout.tensor_parallel_size for place in chosen)}))


def worst_rank(job: TrainingJob, rank: int) -> str:
    """A sentence: the assumption that the question is about `rank`, which has the highest peak."""
    if job.parallelism.pipeline_parallel_size > 1:
        return f"the answer is for rank {rank}, whose pipeline stage allocates most."
    if len(ranks_that_differ(job)) > 1:
        return f"the answer is for rank {rank}, which allocates most by its place in the layout."
    return f"the answer is for rank {rank}; no other rank of this layout allocates more."


def _ranks(job: TrainingJob, stages: range | list[int]) -> tuple[int, ...]:
    per_stage = job.parallelism.world_size // job.parallelism.pipeline_parallel_size
    return tuple(stage * per_stage + place for stage in stages for place in _places(job))


def _places(job: TrainingJob) -> list[int]:
    """Positions in the ring that differ. In torch's ring attention the first rank has none before it, the last none after
    it, and all others are equal (`models/ledger/huggingface/blocks/ring_attention.py`). Megatron's ranks are equal except
    the ring's last one, for which every step of the ring returns whole outputs
    (`models/ledger/megatron/blocks/attention.py`)."""
    layout = job.parallelism
    if job.framework == "megatron":
        return [(layout.context_parallel_size - 1) * layout.tensor_parallel_size]
    if layout.zero_stage == 2:  # the last partition's gradients come first in backward, and stay
        return [layout.data_parallel_size - 1]
    positions = sorted({0, min(1, layout.context_parallel_size - 1), layout.context_parallel_size - 1})
    return [position * layout.tensor_parallel_size for position in positions]
