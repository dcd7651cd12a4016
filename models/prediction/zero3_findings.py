"""The finding that ZeRO-3 keeps the weights that checkpoints gather again, which some releases of DeepSpeed do."""

from __future__ import annotations

from peakcast.core.findings import Finding
from peakcast.core.units import format_gib
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import Baseline
from peakcast.timelines.timeline import Category

_GATHERED, _SHARDED = Category.COMMUNICATION_BUFFERS, Category.PARAMETERS
NOTABLE = 0.25
"""The share of the allocated peak from which gathered weights are worth a finding."""


def weights_stay_gathered(job: TrainingJob, base: Baseline) -> Finding | None:
    """The finding for a job whose frozen weights are all gathered at the peak, because reentrant checkpoints recompute
    them; None for other jobs. Source: DeepSpeed 0.19.3 `runtime/zero/partitioned_param_coordinator.py`
    (`ds_recompute_parameters`); a trace of Qwen2.5-7B with LoRA under TRL's GRPO holds all of its weights in backward."""
    gathered, sharded = (base.composition.get(kind.name.lower(), 0) for kind in (_GATHERED, _SHARDED))
    if gathered <= max(sharded, NOTABLE * base.peak_allocated_bytes) or not _gathers_frozen_weights_again(job):
        return None
    sentence = (
        f"{format_gib(gathered)} of the peak are weights that ZeRO-3 has gathered and keeps until backward ends, as "
        "DeepSpeed does since 0.19.3 where reentrant checkpoints recompute frozen weights. DeepSpeed 0.19.2 avoids it, and "
        "so does use_reentrant=false, which TRL's trainers do not allow."
    )
    return Finding("weights_stay_gathered", "activation_checkpointing.use_reentrant", "less", sentence)


def _gathers_frozen_weights_again(job: TrainingJob) -> bool:
    """Whether reentrant checkpoints gather frozen weights that DeepSpeed then assigns to the whole network."""
    whole = job.framework == "deepspeed" and job.parallelism.zero_stage == 3 and job.parallelism.data_parallel_size > 1
    recomputed = job.activation_checkpointing.mode != "none" and job.finetuning.method != "full"
    if not (whole and recomputed and job.activation_checkpointing.use_reentrant):
        return False
    return bool(conventions(job)["reassigns_recomputed_weights"])
