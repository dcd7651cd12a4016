"""Which ranks of a job hold different things: those of pipeline stages, and in torch's ring those that share a sequence."""

from __future__ import annotations

from peakcast.conventions import conventions
from peakcast.spec import TrainingJob


def ranks_that_differ(job: TrainingJob) -> tuple[int, ...]:
    """One rank of each kind: the first of each pipeline stage, since stages are outermost and the ranks of one are
    consecutive, and of it those whose place in the ring of attention differs."""
    return _ranks(job, range(job.parallelism.pipeline_parallel_size))


def ranks_to_trace(job: TrainingJob) -> tuple[int, ...]:
    """Of those, the ones worth a trace: of a pipeline the first, the middle and the last stage."""
    stages = job.parallelism.pipeline_parallel_size
    return _ranks(job, sorted({0, stages // 2, stages - 1}))


MOST_SHARDS = 8
"""So many ranks of a stage are looked at for the memory that their parts of the optimizer make PyTorch reserve."""


def ranks_by_shard(job: TrainingJob, rank: int) -> tuple[int, ...]:
    """Ranks of the stage of `rank`, the first of it, alike but for the parameters whose states they own, or for how FSDP1
    builds their networks (`fsdp1_others_on_meta`). Megatron's
    distributed optimizer cuts buffers anywhere, so that ranks with equal sums of bytes have tensors of other sizes, and
    reserve up to 5 % more or less. All of a stage up to `MOST_SHARDS`, else so many at equal distances."""
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
    """The assumption that `rank`, whose peak is the highest, is the one asked about, as a sentence."""
    if job.parallelism.pipeline_parallel_size > 1:
        return f"the answer is for rank {rank}, whose pipeline stage allocates most."
    if len(ranks_that_differ(job)) > 1:
        return f"the answer is for rank {rank}, which allocates most by its place in the layout."
    return f"the answer is for rank {rank}; no other rank of this layout allocates more."


def _ranks(job: TrainingJob, stages: range | list[int]) -> tuple[int, ...]:
    per_stage = job.parallelism.world_size // job.parallelism.pipeline_parallel_size
    return tuple(stage * per_stage + place for stage in stages for place in _places(job))


def _places(job: TrainingJob) -> list[int]:
    """In torch's ring attention the first rank has nobody before it, the last nobody behind it, and all others are alike
    (`models/analytical/blocks/ring_attention.py`). Megatron's ranks are alike but for the ring's last one, whose turns all
    give whole outputs (`blocks/megatron_attention.py`)."""
    layout = job.parallelism
    if job.framework == "megatron":
        return [(layout.context_parallel_size - 1) * layout.tensor_parallel_size]
    if layout.zero_stage == 2:  # the last partition's gradients come first in backward, and stay
        return [layout.data_parallel_size - 1]
    positions = sorted({0, min(1, layout.context_parallel_size - 1), layout.context_parallel_size - 1})
    return [position * layout.tensor_parallel_size for position in positions]
