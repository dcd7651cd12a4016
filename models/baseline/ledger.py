"""The ledger's entry point: from a job and a rank to a `Timeline`."""

from __future__ import annotations

from typing import Literal

from peakcast.catalog import Device
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.ledger import huggingface_ledger
from peakcast.models.ledger.recorded.covering import no_recipe
from peakcast.models.recipes.baseline_choice import tracer
from peakcast.models.recipes.lent import lent
from peakcast.models.recipes.recordable import cannot_be_recorded
from peakcast.models.recipes.shelf import recipe_of, wants_recipe, why_not
from peakcast.timelines.timeline import Timeline

HOPPER = (9, 0)
StepName = Literal["first", "steady", "captured", "replayed"]


def ledger(
    job: TrainingJob, *, device: Device | None = None, rank: int | None = None, step: StepName = "steady"
) -> Timeline:
    """Every tensor of one training step of `job` on `rank` (None: rank 0), in closed form or from the job's recipe. `step`:
    "first", "steady" for any later one, or one of those that CUDA graphs add (`megatron/cuda_graphs.py`). With a `device`,
    it includes library workspaces and what kernels allocate for themselves on that GPU type; without one, the timeline has
    what a trace sees.

    A job outside `scope.out_of_scope` is answered as far as the ledger goes; ask that function first.
    """
    try:
        return _ledger(job, device, rank, step)
    except OverflowError as error:
        raise SpecError(
            f"this job has tensors of more bytes than 64 bits count; lower sequence_length={job.sequence_length}, "
            f"micro_batch_size={job.micro_batch_size} or the network's sizes.",
            parameter="sequence_length",
            value=job.sequence_length,
        ) from error


def _ledger(job: TrainingJob, device: Device | None, rank: int | None, step: StepName) -> Timeline:
    """`ledger`, with whichever of trace, recipe or framework ledger the job needs."""
    if (trace := tracer()) is not None:
        return trace(job, rank or 0, device.name if device is not None else None)[step]
    if wants_recipe(job):
        from peakcast.models.ledger.recorded.composing import recipe_ledger

        recipe, reason = recipe_of(job), no_recipe(job)
        if recipe is not None and not reason:
            return recipe_ledger(job, recipe, device=device, rank=rank, step=step)
        if lent() is not None:
            raise SpecError(f"this recipe does not answer that: {reason}.", parameter="recipe")
        if job.architecture.kind == "undescribed":
            way = "" if cannot_be_recorded(job) or why_not(job) else " Make one with: peakcast record"
            raise SpecError(
                f"model_type={job.architecture.model_type!r} of {job.architecture.name!r} is no family of the ledger, and "
                f"{reason}.{way}",
                parameter="architecture",
                value=job.architecture.name,
            )
    elif job.architecture.kind == "undescribed":  # a mixture counted as a dense Llama has a twentieth of its bytes
        raise SpecError(
            f"baseline='ledger' has no numbers for model_type={job.architecture.model_type!r}, which is no family of the "
            "ledger; leave it out, or use 'recipe' or 'trace'.",
            parameter="baseline",
            value="ledger",
        )
    if job.framework == "megatron":
        from peakcast.models.ledger.megatron.ledger import megatron_ledger

        return megatron_ledger(job, device=device, rank=rank, step=step)
    job = _on(device, job)
    if job.parallelism.pipeline_parallel_size > 1:
        from peakcast.models.ledger.huggingface.torch_pipeline import pipeline_ledger

        return pipeline_ledger(job, device=device, rank=rank, step=step)
    return huggingface_ledger(job, device=device, rank=rank, step=step)


def _on(device: Device | None, job: TrainingJob) -> TrainingJob:
    """`job` with the kernels that `device` has: cuDNN's attention runs from Hopper on, and in no trace."""
    has = device is not None and device.compute_capability >= HOPPER
    if has or not conventions(job).get("cudnn_attention"):
        return job
    return job.replace(framework_options=FrozenMapping({**job.framework_options, "cudnn_attention": False}))
