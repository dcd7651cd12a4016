"""What stands on a rank all through a step, whatever is computed: a bound below every peak that costs no timeline."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from peakcast.models.analytical.columns import Recording
from peakcast.models.analytical.step import FOREVER
from peakcast.spec import ActivationCheckpointing, TrainingJob


def standing_bytes(job: TrainingJob, stage: int) -> int:
    """Bytes of weights, gradient buffers, main parameters and optimizer states that the first rank of pipeline stage
    `stage` holds from the beginning to the end of a steady step. 0, no bound, for frameworks other than Megatron-LM, whose
    gradients come and go."""
    if job.framework != "megatron":
        return 0
    layout = job.parallelism
    # context-parallel ranks are replicas to all that stands, and sequence parallelism splits activations alone
    replicas = layout.data_parallel_size * layout.context_parallel_size
    shards = replace(layout, data_parallel_size=replicas, context_parallel_size=1, sequence_parallel=False)
    alike = job.replace(
        parallelism=shards,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        activation_checkpointing=ActivationCheckpointing(),
    )
    return _megatron(alike, stage)


@lru_cache(maxsize=4096)
def _megatron(job: TrainingJob, stage: int) -> int:
    from peakcast.models.analytical.megatron_persistent import optimizer_stepped, parameters_held
    from peakcast.models.analytical.megatron_share import rank_share, weights_share

    ranks_per_stage = job.parallelism.world_size // job.parallelism.pipeline_parallel_size
    share = weights_share(rank_share(job, None, stage * ranks_per_stage))
    return _all_along(parameters_held(share)) + _all_along(optimizer_stepped(share, False))


def _all_along(recorded: Recording) -> int:
    _, sizes, born, dies, _ = recorded.columns
    return int(sizes[(born == 0) & (dies == FOREVER)].sum())
