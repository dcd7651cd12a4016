"""Features that a stack on one GPU does not have. A job that asks for one is refused: a row must never claim something that
was not run."""

from __future__ import annotations

from collections.abc import Callable

from peakcast.collectors.stacks.layouts.torchtitan_experts import are_divided
from peakcast.collectors.stacks.parts.compiled import compiles_shards, is_compiled_whole
from peakcast.core.errors import CollectorError
from peakcast.jobs.conventions import conventions, fsdp_offloads, mixes_precision
from peakcast.jobs.spec import Parallelism, TrainingJob

LEFT_OUT = (
    "fused_kernels",
    "generate_logits",
    "latent_cache",
    "gptq_group_size",
    "loss_chunks",
    "logits_upcast",
    "norms_in_float32",
    "trainer",
)
"""Options of frameworks that the library decides by itself here, whatever the job says."""


def _left_out(job: TrainingJob) -> list[str]:
    return [name for name in LEFT_OUT if name in job.framework_options]


def _uses_bfloat16(job: TrainingJob) -> bool:
    return job.precision.parameters == "bfloat16" or mixes_precision(job)


def _options_beside_float8(job: TrainingJob) -> set[str]:
    """Options that were never traced together with float8: all but what is compiled, and what FSDP2 gathers."""
    traced = {"compiled_regions", "float8_recipe", "fsdp_float8_all_gather", "float8_weights_kept"}
    return set(job.framework_options) - traced


def _is_split(layout: Parallelism) -> bool:
    return layout.tensor_parallel_size * layout.pipeline_parallel_size > 1


def _has_ddp(layout: Parallelism) -> bool:
    return layout.num_replicas > 1 and layout.sharding == "none"


def _is_split_otherwise(layout: Parallelism) -> bool:
    """Whether sequences, tensors or stages are split together with data parallelism other than DDP and FSDP2."""
    split = _is_split(layout) or layout.context_parallel_size > 1
    return split and layout.num_replicas > 1 and layout.sharding not in ("none", "fsdp2", "hsdp")


def _divides_packed(job: TrainingJob) -> bool:
    """Whether quantised weights are divided in another way than FSDP divides the bytes of 4-bit ones, or copied by DDP."""
    layout = job.parallelism
    alone = layout.world_size == layout.data_parallel_size and job.finetuning.quantization == "nf4"
    return layout.world_size > 1 and not alone


def _divides_experts(job: TrainingJob) -> bool:
    """Whether experts are divided in another way than torchtitan does under FSDP2 without other parallelism."""
    layout = job.parallelism
    alone = layout.sharding == "fsdp2" and layout.world_size == layout.data_parallel_size and job.framework == "torch"
    return layout.expert_parallel_size > 1 and not (are_divided(job) and alone)


def _turns_in_no_ring(job: TrainingJob) -> bool:
    """Whether ranks share sequences and torch's ring attention cannot compute the job's attention: the ring is flash
    attention of whole rows."""
    half = ("bfloat16", "float16")
    narrow = job.precision.parameters in half or job.precision.compute in half
    causal = job.architecture.kind == "decoder" and job.architecture.sliding_window is None
    plain = job.attention == "sdpa" and job.batch.form == "rows"
    return job.parallelism.context_parallel_size > 1 and not (narrow and causal and plain)


def _outgrows_table(job: TrainingJob) -> int:
    """Number of positions beyond the end of a learned table; 0 or less without one."""
    rows = job.architecture.max_position_embeddings
    return job.sequence_length - rows if job.architecture.position_embedding == "learned" and rows else 0


Rule = tuple[Callable[[TrainingJob], bool], Callable[[TrainingJob], object], str]


def _compiles_layers(job: TrainingJob) -> bool:
    """Whether the layers are compiled one by one in a layout that they were traced in, and nothing between them is."""
    alone = job.parallelism.world_size == 1 or compiles_shards(job)
    return alone and (job.framework == "huggingface" or conventions(job)["compiled_regions"] != "network_in_parts")


SINGLE_GPU: dict[str, Rule] = {
    "task": (lambda j: j.task != "train", lambda j: j.task, "train"),
    "compile": (
        lambda j: j.compile and (j.framework not in ("huggingface", "torch") or _is_split(j.parallelism)),
        lambda j: j.compile,
        "it with framework huggingface or torch, without tensor and pipeline parallelism",
    ),
    "framework_options.compiled_regions": (
        lambda j: j.compile and not is_compiled_whole(j) and not _compiles_layers(j),
        lambda j: conventions(j)["compiled_regions"],
        "layers on one GPU, or with sharding: fsdp2 or hsdp; network on several GPUs otherwise",
    ),
    "offload": (
        lambda j: (j.offload.parameters or j.offload.optimizer) and not fsdp_offloads(j),
        lambda j: j.offload,
        "activations offloaded, or parameters with FSDP (and with them the optimizer), or nothing",
    ),
    "framework_options.checkpoints_around_units": (
        lambda j: j.offload.activations and bool(conventions(j).get("checkpoints_around_units")),
        lambda j: True,
        "false, or without offload.activations",
    ),
    "activation_checkpointing.modules": (
        lambda j: bool(j.activation_checkpointing.modules),
        lambda j: j.activation_checkpointing.modules,
        "the default (matrix products and attention are kept)",
    ),
    "activation_checkpointing.num_layers": (
        lambda j: j.activation_checkpointing.num_layers is not None,
        lambda j: j.activation_checkpointing.num_layers,
        "null (every_n_layers chooses layers)",
    ),
    "precision.main_parameters": (
        lambda j: j.precision.main_parameters is not None,
        lambda j: j.precision.main_parameters,
        "null",
    ),
    "precision.compute": (
        lambda j: (
            j.precision.compute == "float8"
            and (j.finetuning.method != "full" or not _uses_bfloat16(j) or bool(_options_beside_float8(j)))
        ),
        lambda j: j.precision.compute,
        "float8 over weights used in bf16, all of them trained, without options",
    ),
    "sequence_length": (
        lambda j: _outgrows_table(j) > 0,
        lambda j: j.sequence_length,
        "no more than max_position_embeddings, the rows of its table of positions: a GPU stops at an index beyond",
    ),
    "finetuning.adapter_dtype": (
        lambda j: j.finetuning.adapter_dtype not in (None, "float32", j.precision.parameters),
        lambda j: j.finetuning.adapter_dtype,
        "float32 or precision.parameters, which is all that peft offers",
    ),
    "framework_options": (
        lambda j: bool(_left_out(j)),
        lambda j: _left_out(j),
        "without them: they say how other stacks do it, and change nothing here",
    ),
    "finetuning.method": (
        lambda j: j.finetuning.method != "full" and _is_split(j.parallelism) and _has_ddp(j.parallelism),
        lambda j: j.finetuning.method,
        "adapters under tensor parallelism alone or with fsdp2: over it DDP makes every frozen weight trainable",
    ),
    "finetuning.quantization": (
        lambda j: j.finetuning.quantization == "gptq" or (bool(j.finetuning.quantization) and _divides_packed(j)),
        lambda j: j.finetuning.quantization,
        "nf4 or int8 (gptq needs a calibrated checkpoint) on one GPU, or nf4 with data parallelism alone",
    ),
    "framework_options.smooths_labels": (
        lambda j: bool(j.framework_options.get("smooths_labels")) and j.framework_options.get("loop") != "trainer",
        lambda j: True,
        "it with framework_options.loop: trainer",
    ),
    "batch.form": (
        lambda j: j.batch.form != "rows" and _is_split(j.parallelism),
        lambda j: j.batch.form,
        "rows under tensor or pipeline parallelism",
    ),
    "parallelism.context_parallel_size": (
        _turns_in_no_ring,
        lambda j: j.parallelism.context_parallel_size,
        "it with sdpa in half precision of a decoder without a sliding window, whole rows",
    ),
    "parallelism": (
        lambda j: j.parallelism.zero_stage > 0 or _is_split_otherwise(j.parallelism) or _divides_experts(j),
        lambda j: f"{j.parallelism.world_size} ranks (zero_stage {j.parallelism.zero_stage})",
        "one GPU, data parallelism with DDP or FSDP, or tensor, context and pipeline parallelism alone or with DDP or "
        "FSDP2 (ZeRO: framework deepspeed)",
    ),
}
"""parameter -> (whether the job asks for something that the stack does not do, the value to show, what it does)."""


def _option(name: str) -> Rule:
    return (lambda j: bool(j.framework_options.get(name)), lambda j: True, "without it under pipeline parallelism")


PIPELINE: dict[str, Rule] = {
    "framework": (lambda j: j.framework != "torch", lambda j: j.framework, "stages with framework: torch or megatron"),
    "architecture.kind": (
        lambda j: j.architecture.kind != "decoder",
        lambda j: j.architecture.kind,
        "a decoder under pipeline parallelism",
    ),
    "architecture.tie_word_embeddings": (
        lambda j: j.architecture.tie_word_embeddings,
        lambda j: True,
        "false under pipeline parallelism: the table and the head are on different stages, and nothing keeps them equal",
    ),
    "parallelism.pipeline_schedule": (
        lambda j: (
            _has_ddp(j.parallelism) and j.parallelism.pipeline_schedule in ("zero_bubble", "zero_bubble_v", "dualpipe_v")
        ),
        lambda j: j.parallelism.pipeline_schedule,
        "another schedule under DDP, or FSDP2: weights' gradients come from torch.autograd.grad, which no hook of DDP sees",
    ),
    "finetuning.method": (
        lambda j: j.finetuning.method != "full",
        lambda j: j.finetuning.method,
        "full under pipeline parallelism",
    ),
    "loss.fused_linear_cross_entropy": (
        lambda j: j.loss.fused_linear_cross_entropy,
        lambda j: True,
        "false under pipeline parallelism: the last stage hands its logits to the schedule",
    ),
    "gradient_accumulation_steps": (
        lambda j: (
            j.parallelism.pipeline_schedule == "1f1b"
            and j.gradient_accumulation_steps < j.parallelism.pipeline_parallel_size
        ),
        lambda j: j.gradient_accumulation_steps,
        "at least as many micro-batches as pipeline_parallel_size with 1f1b, or pipeline_schedule: gpipe",
    ),
    "framework_options.liger_kernels": _option("liger_kernels"),
    "framework_options.autocast": _option("autocast"),
    "offload.activations": (
        lambda j: j.offload.activations and j.activation_checkpointing.mode == "none",
        lambda j: True,
        "false, or with activation_checkpointing.mode: full",
    ),
    "precision.compute": (
        lambda j: j.precision.compute == "float8",
        lambda j: j.precision.compute,
        "bfloat16 under pipeline parallelism",
    ),
}
"""The same as `SINGLE_GPU` for the stages of a pipeline, whose run has a loop of its own (`pipeline.py`)."""


def check(job: TrainingJob) -> None:
    """Refuse settings that the stack would silently ignore. Raises: CollectorError naming the parameter and what is
    done."""
    staged = job.parallelism.pipeline_parallel_size > 1
    for parameter, (asked, value, done) in [*SINGLE_GPU.items(), *(PIPELINE.items() if staged else ())]:
        if asked(job):
            raise CollectorError(
                f"{parameter}={value(job)!r} has no collector yet with framework={job.framework!r}; measure {done}.",
                parameter=parameter,
                value=value(job),
            )
