"""Which jobs can run on fake tensors at all."""

from __future__ import annotations

from peakcast.core.errors import CollectorError
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob


def check_traceable(job: TrainingJob) -> None:
    """Refuse a job that cannot run on fake tensors. Raises: CollectorError."""
    beside = _beside_compile(job) if job.compile else ""
    for parameter, value, why in (
        ("compile", bool(beside), f"not yet with {beside}"),
        (
            "architecture",
            job.architecture.model_type == "dbrx" and job.framework != "megatron" and job.architecture.name,
            "its experts run one by one, those that tokens have chosen",
        ),
        (
            "finetuning.quantization",
            job.finetuning.quantization != "nf4" and job.finetuning.quantization,
            "weights are quantised by their values",
        ),
        ("optimizer.name", job.optimizer.is_paged and job.optimizer.name, "managed memory needs a GPU"),
        (
            "optimizer.implementation",
            job.optimizer.name in ("sgd", "adagrad") and job.optimizer.implementation == "fused" and "fused",
            f"torch has no rule for fake tensors of a fused {job.optimizer.name}",
        ),
    ):
        if value:
            raise CollectorError(
                f"{parameter}={value!r} cannot be traced: {why}; measure it on a GPU, or trace without it.",
                parameter=parameter,
                value=value,
            )


def _beside_compile(job: TrainingJob) -> str:
    """A setting of `job` that was never traced together with torch.compile, in words; "" if there is none."""
    from peakcast.collectors.stacks.parts.compiled import compiles_replica, compiles_shards

    checks = (
        (
            job.parallelism.world_size > 1 and not (compiles_shards(job) or compiles_replica(job)),
            "several ranks, but for FSDP2, HSDP, and a Hugging Face network under DDP",
        ),
        (job.task != "train", "generation"),
        (job.attention not in ("sdpa", "eager"), f"attention={job.attention!r}, whose kernels are compiled too"),
        (job.loss.fused_linear_cross_entropy or bool(conventions(job).get("liger_kernels")), "Liger's kernels"),
        (job.offload.activations, "offloaded activations"),
        (job.architecture.moe is not None, "experts, whose shares depend on the data"),
    )
    return next((what for asked, what in checks if asked), "")
