"""Which tensor-parallel jobs of Hugging Face and plain PyTorch the ledger covers."""

from __future__ import annotations

from peakcast.core.findings import FAILS, UNKNOWN, Check, Finding, first
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions, fuses_loss
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.builder import is_adapter_target
from peakcast.models.ledger.parameters.inventory import layer_parameters
from peakcast.networks.families import families_where, family_of


def tensor_reason(job: TrainingJob) -> Finding | None:
    """Why the ledger does not cover the job's tensor parallelism, as a finding; None if it does."""
    architecture, layout, ranks = job.architecture, job.parallelism, job.parallelism.tensor_parallel_size
    library = job.framework == "huggingface"
    family = family_of(architecture)
    traced = like_llama(architecture) or (library and family.traces.tensor_parallel)
    checks: list[Check] = [
        (
            not traced,
            f"tensor parallelism of {architecture.model_type!r} under framework={job.framework!r} is not modelled: that of "
            "layers like Llama's is, and with framework='huggingface' that of "
            f"{'' if traced else ', '.join(families_where(lambda known: known.traces.tensor_parallel))}.",
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
            f"whose result is gathered (in {', '.join(sorted(family.modules.gathered_parts))}); name other targets.",
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
    """Which adapters that torch's plan splits no trace has confirmed, as the end of a sentence; "" if none."""
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
    """Whether adapters are on parts of a layer whose outputs tensor parallelism gathers."""
    matrices = (tensor.name.removesuffix(".weight") for tensor in layer_parameters(job.architecture, 0))
    adapted = {name for name in matrices if is_adapter_target(name, job.finetuning, job.architecture)}
    return any(name.partition(".")[0] in family_of(job.architecture).modules.gathered_parts for name in adapted)


def like_llama(architecture: Architecture) -> bool:
    """Whether layers are like Llama's: RMSNorm, separate projections, a gated feed-forward of separate matrices, which both
    plans name."""
    plain = architecture.kind == "decoder" and architecture.moe is None and architecture.mla is None
    separate = architecture.gated_mlp and not (architecture.fused_qkv or architecture.fused_gate_up)
    usual = architecture.normalization == "rmsnorm" and architecture.norm_placement == "pre"
    whole = architecture.qk_norm in ("none", "head") and not architecture.parallel_block
    return plain and separate and usual and whole and not family_of(architecture).ends.scales_embedding
