"""Which jobs recipes cover, as findings about those that they do not."""

from __future__ import annotations

from peakcast.findings import Finding, found
from peakcast.lengths import lengths_change
from peakcast.models.recipes.shelf import recipe_of, why_not
from peakcast.spec import Offload, TrainingJob

FRAMEWORKS = ("huggingface", "torch")
"""Stacks whose loops are recorded."""


def cannot_be_recorded(job: TrainingJob) -> str:
    """Why no recipe of `job` is ever made, whatever is installed; "" where one can be."""
    layout = job.parallelism
    checks = (
        (job.framework not in FRAMEWORKS, f"framework={job.framework!r} is not recorded"),
        (job.task != "train", "generation is not recorded"),
        (job.compile or job.attention == "flex", "compiled code has no blocks that could be recorded"),
        (job.finetuning.method not in ("full", "lora"), f"finetuning.method={job.finetuning.method!r} is not recorded"),
        (bool(job.finetuning.quantization), "weights are quantised by their values, which a recording does not have"),
        (job.precision.compute == "float8", "float8 is not recorded"),
        (job.offload != Offload(), "offloading is not recorded"),
        (job.loss.kind != "cross_entropy", f"loss.kind={job.loss.kind!r} is not recorded"),
        (lengths_change(job), "lengths that change are not recorded"),
        (
            layout.world_size > layout.data_parallel_size or layout.zero_stage > 0 or layout.expert_parallel_size > 1,
            "of layouts, recipes are placed under DDP, FSDP and HSDP",
        ),
    )
    return next((reason for holds, reason in checks if holds), "")


def no_recipe(job: TrainingJob) -> str:
    """Why a job that wants a recipe has none; "" where it has one."""
    if recipe_of(job) is not None and not cannot_be_recorded(job):
        return ""
    return cannot_be_recorded(job) or why_not(job) or "no recipe of it has been recorded"


def recipe_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """What of a job that wants a recipe is not as recorded."""
    architecture = job.architecture
    if reason := no_recipe(job):
        taken = "" if architecture.kind == "undescribed" else " It is counted as a network like Llama, by its keys."
        return (found(f"model_type={architecture.model_type!r} is no family of the ledger: {reason}.{taken}", "architecture"),)
    return ()
