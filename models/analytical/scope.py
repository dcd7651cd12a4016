"""What the ledger covers. A job outside is named with its reason; it is never answered as if it were inside."""

from __future__ import annotations

from peakcast.architecture import Architecture
from peakcast.spec import TrainingJob


def out_of_scope(job: TrainingJob) -> str:
    """Why the ledger does not cover `job`, as one sentence; "" when it does."""
    if job.framework == "megatron":
        from peakcast.models.analytical.megatron import megatron_out_of_scope

        return megatron_out_of_scope(job)
    return _architecture_reason(job.architecture) or _huggingface_reason(job)


def _architecture_reason(architecture: Architecture) -> str:
    if architecture.kind != "decoder":
        return f"{architecture.name!r} is not a decoder-only transformer (kind={architecture.kind!r})."
    if architecture.mla is not None:
        return f"{architecture.name!r} has multi-latent attention, which is not modelled here."
    return ""


def _huggingface_reason(job: TrainingJob) -> str:
    layout = job.parallelism
    checks = [
        (job.task != "train", f"task={job.task!r} is not modelled; only training is."),
        (
            layout.data_parallel_size > 1 or layout.context_parallel_size > 1,
            f"{layout.world_size} ranks (sharding={layout.sharding!r}, zero_stage={layout.zero_stage}): gathered "
            "weights and communication buffers are a rule of thumb, not yet modelled one by one.",
        ),
        (job.compile, "compile=true is not modelled: the compiler decides what is kept."),
        (job.loss.fused_linear_cross_entropy, "fused linear cross entropy is not modelled."),
        (any((job.offload.parameters, job.offload.optimizer, job.offload.activations)), "offload is not modelled."),
        (job.activation_checkpointing.mode == "selective", "selective checkpointing is not modelled."),
        (bool(job.framework_options.get("fused_kernels")), "fused LoRA, loss and norm kernels are not modelled."),
        (job.precision.compute == "float8", "float8 compute is not modelled."),
    ]
    return next((sentence for fails, sentence in checks if fails), "")
