"""What building a network leaves in the allocator's cache before the first step.

It is known only where the framework itself builds, in a known order: FSDP1 makes one unit after the other from a network on
the host; DeepSpeed's engine makes partitions of weights; Megatron-LM makes weights on the GPU and copies them into buffers
(`building.py`). What a loader does (reading, placing or quantising weights) is in no timeline.
"""

from __future__ import annotations

from functools import lru_cache

from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters, weights_job
from peakcast.models.ledger.layouts import layout_of
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Timeline


def building(job: TrainingJob, rank: int | None = None) -> list[Timeline]:
    """One timeline, which ends with what exists before the first step; empty if the building is not known."""
    if job.framework == "megatron":
        from peakcast.models.ledger.megatron.building import megatron_built

        return [megatron_built(job, rank or 0)]
    if job.task == "train" and (job.parallelism.num_replicas > 1 or job.parallelism.zero_stage):
        return _built(weights_job(job), rank)
    return []


@lru_cache(maxsize=64)
def _built(job: TrainingJob, rank: int | None) -> list[Timeline]:
    """`building` with a layout, cached by the settings that matter."""
    step = Step()
    layout_of(job, stored_parameters(job), rank=rank).build(step)
    return [step.timeline()] if step.now else []
