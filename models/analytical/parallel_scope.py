"""Which tensor-, pipeline- and context-parallel jobs of Hugging Face and plain PyTorch the ledger covers."""

from __future__ import annotations

from peakcast.architecture import Architecture
from peakcast.conventions import conventions, fuses_loss
from peakcast.findings import FAILS, LESS, MORE, NEARLY_MORE, UNKNOWN, Check, Finding, first, found
from peakcast.models.analytical.blocks.hf_builder import is_adapter_target
from peakcast.models.analytical.blocks.hf_traits import traits
from peakcast.models.analytical.data_parallel_scope import data_parallel_reason, matrix_optimizer_reason
from peakcast.models.analytical.layouts import expert_ranks, gathered_dtype
from peakcast.models.analytical.parameters import layer_parameters
from peakcast.models.analytical.pipeline import SPLIT_BACKWARD, V_SHAPED
from peakcast.spec import ActivationCheckpointing, Offload, TrainingJob

PIPELINE_SCHEDULES = {
    *(("gpipe", False), ("gpipe", True), ("1f1b", False), ("interleaved_1f1b", True)),
    *(("zero_bubble", False), ("zero_bubble", True), ("zero_bubble_v", True)),
    ("dualpipe_v", True),
}
"""(schedule, whether a rank has several stages) that torch has and the ledger knows."""


TENSOR_PARALLEL_FAMILIES = frozenset(
    {
        *("cohere", "gemma", "gemma2", "gemma3_text", "glm", "gpt_neox"),
        *("granite", "olmo", "olmo2", "phi", "phi3", "starcoder2"),
    }
)
"""`model_type` of families with other layers than Llama's whose `base_model_tp_plan` of transformers 5.17 was traced."""


def parallel_reason(job: TrainingJob) -> Finding | None:
    """Why the ledger does not cover the job's layout beyond data parallelism, as a finding; None when it does."""
    layout, reasons = job.parallelism, [data_parallel_reason(job)]
    if layout.tensor_parallel_size > 1:
        reasons.append(_tensor_reason(job))
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


def _tensor_reason(job: TrainingJob) -> Finding | None:
    architecture, layout, ranks = job.architecture, job.parallelism, job.parallelism.tensor_parallel_size
    library = job.framework == "huggingface"
    checks: list[Check] = [
        (
            not (_like_llama(architecture) or (library and architecture.model_type in TENSOR_PARALLEL_FAMILIES)),
            f"tensor parallelism of {architecture.model_type!r} under framework={job.framework!r} is not modelled: that of "
            "layers like Llama's is, and with framework='huggingface' that of "
            f"{', '.join(sorted(TENSOR_PARALLEL_FAMILIES))}.",
        ),
        (
            job.framework not in ("huggingface", "torch"),
            f"tensor parallelism is not modelled for framework={job.framework!r}.",
        ),
        (job.task != "train", "tensor parallelism is modelled in training only."),
        (
            bool(left := _adapters_left_out(job)),
            f"finetuning.method={job.finetuning.method!r} under torch's tensor parallelism is compared with traces {left}",
        ),
        (
            bool(job.finetuning.quantization),
            f"finetuning.quantization={job.finetuning.quantization!r} under tensor parallelism is not modelled; lora is.",
            UNKNOWN,
            "finetuning.quantization",
        ),
        (
            job.finetuning.method != "full" and _adapts_whole_parts(job),
            f"adapters of {architecture.model_type!r} under tensor parallelism fail in peft 0.21, which knows no matrix "
            f"whose result is gathered (in {', '.join(sorted(traits(architecture).whole_parts))}); name other targets.",
            FAILS,
            "finetuning.targets",
        ),
        (
            bool(architecture.num_key_value_heads % ranks or architecture.intermediate_size % ranks),
            f"tensor_parallel_size={ranks} does not divide {architecture.num_key_value_heads} key heads and "
            f"intermediate_size={architecture.intermediate_size}, and parts of heads are not modelled.",
        ),
        (
            job.framework == "huggingface" and bool(architecture.vocab_size % ranks),
            f"tensor_parallel_size={ranks} does not divide vocab_size={architecture.vocab_size}: transformers refuses it.",
            FAILS,
            "parallelism.tensor_parallel_size",
        ),
        (
            job.framework == "huggingface" and layout.num_replicas > 1,
            "tensor with data parallelism under the Trainer is not modelled: accelerate 1.15 asks transformers 5.17 for a "
            "class that it no longer has (ReplicateParallel).",
        ),
        (
            job.framework == "huggingface" and layout.sequence_parallel,
            "sequence_parallel is not part of transformers' tensor-parallel plan for this architecture.",
        ),
        (
            job.framework == "huggingface" and job.optimizer.name != "adamw",
            f"optimizer.name={job.optimizer.name!r} cannot step over the mixture of tensors that tensor parallelism leaves "
            "to the Trainer; adamw can.",
            FAILS,
            "optimizer.name",
        ),
        (
            layout.num_replicas > 1 and layout.sharding not in ("none", "fsdp2", "hsdp"),
            f"tensor parallelism with sharding={layout.sharding!r} is not modelled; with none (DDP), fsdp2 and hsdp it is.",
        ),
        (
            layout.num_replicas > 1 and layout.sharding == "none" and architecture.tie_word_embeddings,
            f"{architecture.name!r} shares its token table with the head, of which torch's DDP over tensor parallelism "
            "makes plain tensors at one end only: torch 2.13 fails, and how others hold it is not modelled; fsdp2 is.",
            UNKNOWN,
            "parallelism.sharding",
        ),
        (
            fuses_loss(job),
            "a fused loss under tensor parallelism is not modelled.",
            UNKNOWN,
            "loss.fused_linear_cross_entropy",
        ),
        (
            job.framework == "torch" and bool(conventions(job).get("liger_kernels")),
            "Liger's kernels under torch's tensor parallelism fail: they give whole tensors where the plan has parts.",
            FAILS,
            "framework_options.liger_kernels",
        ),
        (
            layout.sequence_parallel and job.attention == "eager",
            "attention='eager' under sequence_parallel fails: transformers makes the mask for a rank's part; use sdpa.",
            FAILS,
            "attention",
        ),
        (
            library and bool(conventions(job).get("autocast")) and job.precision.compute == "float16",
            "fp16 under transformers' tensor parallelism fails: GradScaler takes no mixture of tensors; use bf16.",
            FAILS,
            "precision.compute",
        ),
        (job.attention == "flex", "flex attention under tensor parallelism is not modelled.", UNKNOWN, "attention"),
        (
            job.precision.compute == "float8",
            "float8 under tensor parallelism is not modelled.",
            UNKNOWN,
            "precision.compute",
        ),
        (
            job.offload.activations,
            "offloaded activations under tensor parallelism are not modelled.",
            UNKNOWN,
            "offload.activations",
        ),
    ]
    return first(checks, "parallelism.tensor_parallel_size")


def _adapters_left_out(job: TrainingJob) -> str:
    """What of adapters that torch's plan splits no trace has confirmed, as the end of a sentence; "" for nothing."""
    if job.finetuning.method == "full" or job.framework != "torch":
        return ""
    layout = job.parallelism
    checks = [
        (layout.context_parallel_size > 1, "without context parallelism only."),
        (
            layout.num_replicas > 1 and layout.sharding == "none",
            "alone and under fsdp2 and hsdp only: DDP would make every frozen weight trainable.",
        ),
        (job.optimizer.name != "adamw", f"with AdamW only, not optimizer.name={job.optimizer.name!r}."),
        (job.activation_checkpointing.use_reentrant, "without reentrant checkpointing only."),
    ]
    return next((sentence for left_out, sentence in checks if left_out), "")


def _adapts_whole_parts(job: TrainingJob) -> bool:
    matrices = (tensor.name.removesuffix(".weight") for tensor in layer_parameters(job.architecture, 0))
    adapted = {name for name in matrices if is_adapter_target(name, job.finetuning, job.architecture)}
    return any(name.partition(".")[0] in traits(job.architecture).whole_parts for name in adapted)


def _expert_reason(job: TrainingJob) -> Finding | None:
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
            not _like_llama(architecture),
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
    """In how many rounds ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble take their micro-batches."""
    return max(1, job.gradient_accumulation_steps // job.parallelism.pipeline_parallel_size)


def _pipeline_reason(job: TrainingJob) -> Finding | None:
    architecture, layout = job.architecture, job.parallelism
    several, split = layout.virtual_pipeline_stages > 1, layout.pipeline_schedule in SPLIT_BACKWARD
    beside = layout.num_replicas > 1
    checks: list[Check] = [
        (
            job.framework != "torch",
            f"pipeline parallelism is modelled for framework='megatron' and 'torch', not {job.framework!r}.",
        ),
        (
            # SmolLM3's fourth layers take no positions: a stage of such alone lets go of the tables
            not _like_llama(architecture) or architecture.model_type == "smollm3",
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
            (layout.pipeline_schedule, several) not in PIPELINE_SCHEDULES
            or (layout.pipeline_schedule in V_SHAPED and layout.virtual_pipeline_stages != 2),
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


def _like_llama(architecture: Architecture) -> bool:
    """Norm, separate projections, gated feed-forward of separate matrices: what both plans name."""
    plain = architecture.kind == "decoder" and architecture.moe is None and architecture.mla is None
    separate = architecture.gated_mlp and not (architecture.fused_qkv or architecture.fused_gate_up)
    usual = architecture.normalization == "rmsnorm" and architecture.norm_placement == "pre"
    whole = architecture.qk_norm in ("none", "head") and not architecture.parallel_block
    return plain and separate and usual and whole and not traits(architecture).scaled_embedding
