"""Of which jobs recipes can be made at all, whatever is installed."""

from __future__ import annotations

from typing import NamedTuple

from peakcast.dialects.common.own_networks import library_of, own_network
from peakcast.jobs.conventions import adapter_dtype, conventions, mixes_precision
from peakcast.jobs.lengths import lengths_change
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts import gathered_dtype
from peakcast.networks.families import family_of

FRAMEWORKS = ("huggingface", "torch", "deepspeed")
"""Stacks whose training loops can be recorded."""
METHODS = ("full", "lora", "qlora")


class Obstacle(NamedTuple):
    """Whether something about a job stands in the way of a recipe, and how to say so."""

    holds: bool
    reason: str


def cannot_be_recorded(job: TrainingJob) -> str:
    """Why no recipe of `job` can be made, whatever is installed; "" if one can."""
    found = first_reason(*_of_stack(job), *_of_sharding(job), *_of_step(job))
    return found or (_not_of_its_library(job) if own_network(job) is not None else "")


def first_reason(*obstacles: Obstacle) -> str:
    """The reason of the first obstacle that there is; "" if there is none."""
    return next((obstacle.reason for obstacle in obstacles if obstacle.holds), "")


def _of_stack(job: TrainingJob) -> tuple[Obstacle, ...]:
    """What runs, and which weights train."""
    return (
        Obstacle(job.framework not in FRAMEWORKS, f"framework={job.framework!r} is not recorded"),
        Obstacle(job.task != "train", "generation is not recorded"),
        Obstacle(job.compile or job.attention == "flex", "compiled code has no blocks that could be recorded"),
        Obstacle(job.finetuning.method not in METHODS, f"finetuning.method={job.finetuning.method!r} is not recorded"),
        Obstacle(
            job.finetuning.quantization not in (None, "nf4"),
            f"finetuning.quantization={job.finetuning.quantization!r} is not recorded: nf4 and whole weights are",
        ),
    )


def _of_sharding(job: TrainingJob) -> tuple[Obstacle, ...]:
    """Weights that FSDP1 and ZeRO store or gather otherwise."""
    layout, adapts = job.parallelism, job.finetuning.method != "full"
    return (
        Obstacle(
            job.finetuning.quantization is not None and (layout.zero_stage > 0 or layout.sharding != "none"),
            "quantised weights are recorded for one GPU and DDP, not for layouts that shard them",
        ),
        Obstacle(
            adapts and layout.sharding == "fsdp1" and mixes_precision(job) and adapter_dtype(job) != gathered_dtype(job),
            "adapters that FSDP1 gathers narrower than they are stored are seen as stored in a first step, which is not "
            "recorded",
        ),
        Obstacle(
            adapts and layout.sharding == "fsdp1" and bool(conventions(job).get("checkpoints_around_units")),
            "FSDP1 keeps the inputs of checkpoints around its units, which is not recorded",
        ),
        Obstacle(
            layout.zero_stage == 3 and family_of(job.architecture).libraries.deepspeed_leaf,
            f"ZeRO-3 takes the experts of {job.architecture.model_type} as one module, which is not recorded",
        ),
    )


def _of_step(job: TrainingJob) -> tuple[Obstacle, ...]:
    """Precision, offloading, the loss, the batch, and layouts beside data parallelism."""
    layout = job.parallelism
    return (
        Obstacle(job.precision.compute == "float8", "float8 is not recorded"),
        Obstacle(
            _offloads_without_layout(job),
            "offloaded weights or optimizer states are placed under ZeRO, and under FSDP if both are",
        ),
        Obstacle(
            job.offload.activations and (layout.zero_stage > 0 or bool(conventions(job).get("checkpoints_around_units"))),
            "offloaded activations are recorded for layouts other than ZeRO, with checkpoints inside FSDP's units",
        ),
        Obstacle(job.loss.kind != "cross_entropy", f"loss.kind={job.loss.kind!r} is not recorded"),
        Obstacle(job.architecture.head != "language_model", "a classifier's head is not recorded"),
        Obstacle(lengths_change(job), "lengths that change are not recorded"),
        Obstacle(
            job.num_tokens < job.micro_batch_size * job.sequence_length,
            f"batch.num_tokens={job.batch.num_tokens}, fewer tokens than fit, is not recorded: leave it out for full rows",
        ),
        Obstacle(
            layout.world_size > layout.data_parallel_size or layout.expert_parallel_size > 1,
            "of layouts, recipes are placed under DDP, FSDP, HSDP and ZeRO",
        ),
    )


def _offloads_without_layout(job: TrainingJob) -> bool:
    """Whether something other than activations is kept on the host that the layout does not take there."""
    layout, kept = job.parallelism, (job.offload.parameters, job.offload.optimizer)
    sharded = layout.num_replicas > 1 and layout.sharding != "none"
    return any(kept) and not layout.zero_stage and not (sharded and all(kept))


def _not_of_its_library(job: TrainingJob) -> str:
    """What is not recorded of networks that a library has of its own."""
    library, checkpointing, tuning = library_of(job), job.activation_checkpointing, job.finetuning
    return first_reason(
        Obstacle(tuning.quantization is not None, f"{library}'s quantised weights are not recorded"),
        Obstacle(job.attention != "sdpa", f"attention={job.attention!r} is not recorded of {library}"),
        Obstacle(job.batch.form != "rows", f"batch.form={job.batch.form!r} is not recorded of {library}"),
        Obstacle(
            checkpointing.mode == "selective" or checkpointing.every_n_layers != 1,
            f"of {library}, checkpoints of every layer are recorded",
        ),
        Obstacle(job.loss.fused_linear_cross_entropy, f"a fused loss is not recorded of {library}"),
        Obstacle(job.offload.activations, f"offloaded activations are not recorded of {library}"),
        Obstacle(bool(tuning.frozen or tuning.modules_to_save), f"frozen parts are not recorded of {library}"),
    )
