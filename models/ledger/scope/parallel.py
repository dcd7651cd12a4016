"""Which tensor-, pipeline- and context-parallel jobs of Hugging Face and plain PyTorch the ledger covers."""

from __future__ import annotations

from peakcast.core.findings import FAILS, LESS, MORE, NEARLY_MORE, UNKNOWN, Check, Finding, first, found
from peakcast.jobs.conventions import conventions, fuses_loss
from peakcast.jobs.spec import ActivationCheckpointing, Offload, TrainingJob
from peakcast.models.ledger.layouts import expert_ranks, gathered_dtype
from peakcast.models.ledger.layouts.pipeline import SPLIT_BACKWARD
from peakcast.models.ledger.scope.data_parallel import data_parallel_reason, matrix_optimizer_reason
from peakcast.models.ledger.scope.tensor import like_llama, tensor_reason
from peakcast.networks.families import family_of

PIPELINE_SCHEDULES = {
    *(("gpipe", False), ("gpipe", True), ("1f1b", False), ("interleaved_1f1b", True)),
    *(("zero_bubble", False), ("zero_bubble", True), ("zero_bubble_v", True)),
    ("dualpipe_v", True),
}
"""(schedule, whether a rank has several stages): the combinations that torch has and the ledger covers."""


def parallel_reason(job: TrainingJob) -> Finding | None:
    """Why the ledger does not cover the job's layout beyond data parallelism, as a finding; None if it does."""
    layout, reasons = job.parallelism, [data_parallel_reason(job)]
    if layout.tensor_parallel_size > 1:
        reasons.append(tensor_reason(job))
    if layout.tensor_parallel_size * layout.pipeline_parallel_size > 1 and job.batch.form != "rows":
        said = f"batch.form={job.batch.form!r} under tensor or pipeline parallelism is not modelled."
        reasons.append(found(said, "batch.form"))
    if layout.expert_parallel_size > 1:
        reasons.append(_expert_reason(job))
    if layout.context_parallel_size > 1:
        reasons.append(_context_reason(job))
    if layout.pipeline_parallel_size > 1:
        reasons.append(_pipeline_reason(job))
    reasons.append(matrix_optimizer_reason(job))
    return next(filter(None, reasons), None)


def _expert_reason(job: TrainingJob) -> Finding | None:
    """Why expert parallelism is out of scope; None if it is not."""
    layout = job.parallelism
    size = f"expert_parallel_size={layout.expert_parallel_size} is modelled for Megatron and torchtitan's experts"
    if expert_ranks(job) == 1:
        return found(
            f"{size}; with ZeRO or FSDP1 every rank is taken to have all experts.",
            "parallelism.expert_parallel_size",
            effect=LESS,
        )
    if job.framework != "torch" or conventions(job).get("experts_implementation") != "torchtitan":
        return found(
            f"{size}; for others experts are divided, and what the exchange of tokens allocates is left out.",
            "parallelism.expert_parallel_size",
            effect=MORE,
        )
    checks: list[Check] = [
        (
            layout.sharding != "fsdp2" or layout.world_size > layout.data_parallel_size,
            "under FSDP2 beside no other parallelism only.",
        ),
        (job.task != "train" or job.finetuning.method != "full", "where all weights train only."),
        (job.optimizer.name != "adamw", f"with AdamW only, not optimizer.name={job.optimizer.name!r}."),
        (job.offload != Offload(), "without offload only."),
        (job.batch.form != "rows", "with full rows only."),
        (job.precision.compute != "bfloat16", "computed in bfloat16 only."),
        (job.activation_checkpointing.use_reentrant, "without reentrant checkpointing only."),
        (fuses_loss(job), "without a fused loss only."),
    ]
    return first(checks, "parallelism.expert_parallel_size", start=f"{size}: compared with its trace ")


def _context_reason(job: TrainingJob) -> Finding | None:
    """Why context parallelism is out of scope; None if it is not."""
    architecture, layout, ranks = job.architecture, job.parallelism, job.parallelism.context_parallel_size
    half = ("bfloat16", "float16")
    autocast = bool(job.framework_options.get("autocast"))
    computed = job.precision.compute if autocast or gathered_dtype(job) != job.precision.parameters else None
    checks: list[Check] = [
        (
            job.framework not in ("huggingface", "torch"),
            f"context parallelism is not modelled for framework={job.framework!r}; for megatron, huggingface, torch it is.",
        ),
        (
            not like_llama(architecture),
            f"context parallelism of {architecture.model_type!r} is not modelled; that of layers like Llama's is.",
        ),
        (job.task != "train", "context parallelism is modelled in training only."),
        (
            job.attention != "sdpa" or (computed or job.precision.parameters) not in half or architecture.head_dim > 256,
            "context parallelism is a ring of flash attention: sdpa in half precision, heads of at most 256 elements.",
        ),
        (
            architecture.sliding_window is not None,
            f"{architecture.name!r} attends within a sliding window, which torch's context parallelism cannot; use 1 rank.",
            FAILS,
            "parallelism.context_parallel_size",
        ),
        (
            bool(job.sequence_length % (2 * ranks)),
            f"sequence_length={job.sequence_length} is no multiple of 2 × context_parallel_size={ranks}: torch gives ranks "
            "unequal work then, which is not modelled; use one.",
        ),
        (
            job.batch.form != "rows",
            f"batch.form={job.batch.form!r} under context parallelism is not modelled; use rows.",
            UNKNOWN,
            "batch.form",
        ),
        (
            layout.sharding not in ("fsdp2", "hsdp") and (job.framework == "huggingface" or layout.sharding != "none"),
            f"context parallelism with sharding={layout.sharding!r} is not modelled; accelerate has it with fsdp2, hsdp, a "
            "plain loop also without sharding.",
        ),
        (
            fuses_loss(job),
            "a fused loss under context parallelism is not modelled.",
            UNKNOWN,
            "loss.fused_linear_cross_entropy",
        ),
        (
            job.precision.compute == "float8",
            "float8 under context parallelism is not modelled.",
            UNKNOWN,
            "precision.compute",
        ),
        (
            job.offload.activations,
            "offloaded activations under context parallelism are not modelled.",
            UNKNOWN,
            "offload.activations",
        ),
    ]
    return first(checks, "parallelism.context_parallel_size")


def rounds(job: TrainingJob) -> int:
    """Number of rounds in which ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble run their micro-batches."""
    return max(1, job.gradient_accumulation_steps // job.parallelism.pipeline_parallel_size)


def _pipeline_reason(job: TrainingJob) -> Finding | None:
    """Why pipeline parallelism is out of scope; None if it is not."""
    architecture, layout = job.architecture, job.parallelism
    several, split = layout.virtual_pipeline_stages > 1, layout.pipeline_schedule in SPLIT_BACKWARD
    beside = layout.num_replicas > 1
    checks: list[Check] = [
        (
            job.framework != "torch",
            f"pipeline parallelism is modelled for framework='megatron' and 'torch', not {job.framework!r}.",
        ),
        (
            # SmolLM3's every fourth layer has no rotation: a stage with only such layers frees the tables
            not like_llama(architecture) or family_of(architecture).rotary.skipped_every > 0,
            f"pipeline parallelism of {architecture.model_type!r} is not modelled: that of layers like Llama's is.",
        ),
        (job.task != "train", "pipeline parallelism is modelled in training only."),
        (
            job.finetuning.method != "full",
            f"finetuning.method={job.finetuning.method!r} in pipeline stages is not modelled: all weights train.",
            UNKNOWN,
            "finetuning.method",
        ),
        (
            architecture.tie_word_embeddings,
            f"{architecture.name!r} shares its token table with the head, which stand on different stages: torch's "
            "pipelining keeps no two of them equal.",
        ),
        (
            (layout.pipeline_schedule, several) not in PIPELINE_SCHEDULES,
            f"pipeline_schedule={layout.pipeline_schedule!r} with virtual_pipeline_stages={layout.virtual_pipeline_stages} "
            "is not modelled; gpipe, 1f1b and zero_bubble with 1, gpipe, interleaved_1f1b and zero_bubble with more, "
            "zero_bubble_v and dualpipe_v with 2 are.",
        ),
        (
            split and job.activation_checkpointing not in (ActivationCheckpointing(), ActivationCheckpointing(mode="full")),
            f"{job.activation_checkpointing} under zero_bubble is not modelled: every weight's backward computes its layer "
            "anew; use activation_checkpointing.mode=none, or full for every layer and not reentrant, or trace it.",
        ),
        (
            split and job.precision.compute == "float32",
            "zero_bubble computed in float32 is not modelled: traced stages need up to 1.4 % more; use bfloat16, or "
            "another schedule.",
            NEARLY_MORE,
            "precision.compute",
        ),
        (
            0 in layout.pipeline_layers,
            f"parallelism.pipeline_layers={list(layout.pipeline_layers)} leaves a stage without layers: not modelled.",
            UNKNOWN,
            "parallelism.pipeline_layers",
        ),
        (
            beside and (layout.sharding not in ("none", "fsdp2", "hsdp") or layout.zero_stage > 0),
            f"pipeline parallelism with sharding={layout.sharding!r} and zero_stage={layout.zero_stage} is not modelled; "
            "with none (DDP), fsdp2 and hsdp it is.",
        ),
        (
            beside and split and layout.sharding == "none",
            "zero_bubble under DDP is not modelled: torch takes the weights' gradients by torch.autograd.grad, which calls "
            "no hook of DDP, so that they would not be reduced; use fsdp2, or another schedule.",
        ),
        (
            beside and layout.sharding != "none" and conventions(job)["fsdp2_units"] != "ends",
            "pipeline stages whose ends are FSDP's root are not modelled; with fsdp2_units=ends, torchtitan's, they are.",
        ),
        (
            layout.pipeline_schedule in ("interleaved_1f1b", "zero_bubble")
            and bool(job.gradient_accumulation_steps % rounds(job)),
            f"gradient_accumulation_steps={job.gradient_accumulation_steps} is no multiple of the {rounds(job)} rounds in "
            "which torch's interleaved schedules take them: they refuse that.",
            FAILS,
            "gradient_accumulation_steps",
        ),
        (
            layout.pipeline_schedule == "1f1b" and job.gradient_accumulation_steps < layout.pipeline_parallel_size,
            f"gradient_accumulation_steps={job.gradient_accumulation_steps} is fewer than pipeline_parallel_size="
            f"{layout.pipeline_parallel_size}: torch's Schedule1F1B refuses that; gpipe takes it.",
            FAILS,
            "gradient_accumulation_steps",
        ),
        (
            layout.pipeline_schedule == "dualpipe_v"
            and job.gradient_accumulation_steps < 2 * layout.pipeline_parallel_size,
            f"gradient_accumulation_steps={job.gradient_accumulation_steps} is fewer than the stages, of which dualpipe_v "
            f"has 2 × pipeline_parallel_size={layout.pipeline_parallel_size}: torch refuses that.",
            FAILS,
            "gradient_accumulation_steps",
        ),
        (
            bool(job.framework_options.get("autocast")),
            "autocast in pipeline stages is not modelled.",
            UNKNOWN,
            "framework_options.autocast",
        ),
        (job.precision.compute == "float8", "float8 in pipeline stages is not modelled.", UNKNOWN, "precision.compute"),
        (
            fuses_loss(job),
            "a fused loss in pipeline stages is not modelled.",
            UNKNOWN,
            "loss.fused_linear_cross_entropy",
        ),
        (job.offload != Offload(), "offload in pipeline stages is not modelled.", UNKNOWN, "offload"),
        (
            bool(job.framework_options.get("liger_kernels")),
            "Liger's kernels in pipeline stages are not modelled.",
            UNKNOWN,
            "framework_options.liger_kernels",
        ),
    ]
    return first(checks, "parallelism.pipeline_parallel_size")
