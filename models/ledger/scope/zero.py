"""Which settings of DeepSpeed's ZeRO the ledger covers: those that `peakcast verify agreement-deepspeed` has traced."""

from __future__ import annotations

from peakcast.core.findings import MORE, NEARLY_MORE, UNKNOWN, Check, Finding, first
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import Offload, TrainingJob
from peakcast.networks.families import families_where, family_of


def zero_reason(job: TrainingJob) -> Finding | None:
    """What of the job's ZeRO settings no trace has confirmed, as a finding; None if all were confirmed."""
    layout, optimizer = job.parallelism, job.optimizer
    if layout.zero_stage == 0:
        return None
    family = family_of(job.architecture)
    apart = job.architecture.moe is not None and layout.zero_stage == 3 and not family.libraries.deepspeed_leaf
    quantized, name = job.finetuning.quantization, f"zero_stage={layout.zero_stage} is compared with DeepSpeed's trace"
    checks: list[Check] = [
        (job.offload.activations, "without offloaded activations only.", UNKNOWN, "offload.activations"),
        (job.task != "train", "in training only.", UNKNOWN, "task"),
        (
            quantized not in (None, "nf4"),
            f"with nf4 or whole weights only, not finetuning.quantization={quantized!r}.",
        ),
        (bool(quantized) and job.offload != Offload(), "offloading with whole weights only, not quantised ones."),
        (
            job.offload.parameters and layout.num_replicas == 1,
            "on one rank with its weights on the GPU only: from the host, first steps are counted up to 0.5 % too low.",
            NEARLY_MORE,
        ),
        (
            layout.zero_stage == 1 and conventions(job).get("overlap_comm") is True and _beside_early_reduction(job),
            "with overlap_comm only where no table is shared beside several micro-batches, without offloading, quantised "
            "weights, experts and preferences.",
        ),
        (
            not conventions(job).get("contiguous_gradients", True) and _beside_scattered_gradients(job),
            "with contiguous_gradients=true only beside offloading, quantised weights, experts, preferences, overlap_comm.",
        ),
        (
            job.precision.parameters != job.precision.compute,
            f"computed in the dtype of the weights only, not {job.precision.parameters!r} in {job.precision.compute!r}.",
        ),
        (
            layout.zero_stage < 3 and conventions(job).get("overlap_comm") is True and job.offload.optimizer,
            "without overlap_comm beside an optimizer on the host only: gradients larger than a bucket then stay longer.",
            MORE,
            "framework_options.overlap_comm",
        ),
        (
            layout.zero_stage == 3 and "adapters under ZeRO-3" in family.traces.differ and job.finetuning.method != "full",
            "without adapters on GPT-Neo only, whose frozen weights stay gathered longer in backward.",
            MORE,
            "finetuning.method",
        ),
        (
            layout.zero_stage == 3 and job.architecture.moe is not None and job.activation_checkpointing.every_n_layers > 1,
            "with experts only where every layer is checkpointed, or none.",
        ),
        (
            job.architecture.moe is not None and job.precision.parameters != "bfloat16",
            "with experts in bfloat16 only: grouped products of other dtypes cannot be traced.",
        ),
        (job.architecture.moe is not None and bool(quantized), "with whole experts only, not quantised ones."),
        (
            apart,
            f"with experts of {_leaves() if apart else ''} only, whose feed-forwards are modules without parts.",
        ),
        (
            optimizer.name not in ("adamw", "adam"),
            f"with torch's AdamW only, not optimizer.name={optimizer.name!r}.",
            UNKNOWN,
            "optimizer.name",
        ),
        (
            job.activation_checkpointing.mode == "selective",
            "without selective checkpointing only.",
            UNKNOWN,
            "activation_checkpointing.mode",
        ),
        (layout.world_size > layout.data_parallel_size, "beside no other parallelism."),
    ]
    return first(checks, "parallelism.zero_stage", start=f"{name} ")


def _leaves() -> str:
    """The families whose feed-forward ZeRO-3 takes for one module."""
    return ", ".join(families_where(lambda family: family.libraries.deepspeed_leaf))


def _beside_scattered_gradients(job: TrainingJob) -> bool:
    """Whether the job has settings that were not traced together with gradients that stay where backward made them."""
    overlaps = job.parallelism.zero_stage < 3 and conventions(job).get("overlap_comm") is True
    return overlaps or _beside_plain_weights(job)


def _beside_early_reduction(job: TrainingJob) -> bool:
    """Whether the job has settings that were not traced, or were 2 % off, together with stage 1 reducing during
    backward."""
    shared = job.architecture.tie_word_embeddings and job.gradient_accumulation_steps > 1
    return shared or _beside_plain_weights(job)


def _beside_plain_weights(job: TrainingJob) -> bool:
    otherwise = job.offload != Offload() or job.loss.kind != "cross_entropy"
    return otherwise or bool(job.finetuning.quantization) or job.architecture.moe is not None
