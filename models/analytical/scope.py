"""What the ledger covers. A job outside is named with its reason; it is never answered as if it were inside."""

from __future__ import annotations

from peakcast.architecture import Architecture
from peakcast.models.analytical.parallel_scope import parallel_reason
from peakcast.spec import Offload, TrainingJob


def out_of_scope(job: TrainingJob) -> str:
    """Why the ledger does not cover `job`, as one sentence; "" when it does."""
    if job.framework == "megatron":
        from peakcast.models.analytical.megatron import megatron_out_of_scope

        return megatron_out_of_scope(job)
    return _architecture_reason(job.architecture) or parallel_reason(job) or _huggingface_reason(job)


def _architecture_reason(architecture: Architecture) -> str:
    if architecture.kind == "encoder" and architecture.model_type != "bert":
        return f"{architecture.name!r}: of encoders only BERT is modelled, not model_type={architecture.model_type!r}."
    if architecture.kind not in ("decoder", "encoder"):
        return f"{architecture.name!r} is not a decoder-only transformer or BERT (kind={architecture.kind!r})."
    return ""


def _plain_float8(job: TrainingJob) -> bool:
    """Whether float8 is torchao's over bf16 weights. GPT-2's Conv1D is no nn.Linear and stays as it is."""
    plain = job.task == "train" and job.finetuning.method == "full" and job.framework in ("huggingface", "torch")
    wide = job.precision.parameters == "bfloat16" and not job.framework_options.get("autocast")
    return plain and wide and job.architecture.model_type not in ("gpt2", "gpt_bigcode")


def _outgrows_window(job: TrainingJob) -> bool:
    prompt, new = job.inference.prompt_length or job.sequence_length, job.inference.new_tokens or 1
    return job.architecture.sliding_window is not None and prompt + new > job.architecture.sliding_window


def _huggingface_reason(job: TrainingJob) -> str:
    layout = job.parallelism
    checks = [
        (
            job.task == "inference" and _outgrows_window(job),
            "generation beyond the sliding window is not modelled: such layers cut their cache and mask their attention.",
        ),
        (
            layout.zero_stage > 0 and layout.data_parallel_size > 1,
            f"zero_stage={layout.zero_stage} is read from DeepSpeed's source and compared with few traces so far.",
        ),
        (
            layout.sharding == "fsdp1" and layout.data_parallel_size > 1 and job.finetuning.method != "full",
            "adapters under FSDP1 agree with the trace, but published runs need more and the reason is not known.",
        ),
        (job.compile, "compile=true is not modelled: the compiler decides what is kept."),
        (
            (job.offload.parameters or job.offload.optimizer) and not _offloads_with_fsdp2(job),
            "offload of parameters or optimizer states is modelled for FSDP2's policy only.",
        ),
        (
            bool(job.activation_checkpointing.modules),
            "activation_checkpointing.modules is not modelled here; without it, matrix products and attention are kept.",
        ),
        (bool(job.framework_options.get("fused_kernels")), "fused LoRA, loss and norm kernels are not modelled."),
        (
            job.precision.compute == "float8" and not _plain_float8(job),
            "float8 compute is modelled for full training of bf16 nn.Linear layers with torchao's dynamic scales alone.",
        ),
    ]
    return next((sentence for fails, sentence in checks if fails), "")


def _offloads_with_fsdp2(job: TrainingJob) -> bool:
    """FSDP2's CPUOffloadPolicy moves parameters, gradients and the optimizer's states together."""
    layout = job.parallelism
    sharded = layout.sharding in ("fsdp2", "hsdp") and layout.data_parallel_size > 1
    return sharded and job.offload == Offload(parameters=True, optimizer=True)
