"""LLaMA-Factory's YAML for Megatron (USE_MCA=1): a network of transformers, trained by megatron-core through mcore_adapter.

Source: LLaMA-Factory 0.9.4 examples/megatron/*.yaml, src/llamafactory/train/mca; mcore_adapter (alibaba/ROLL)
training_args.py DistributingParallelArguments and MegatronArguments, whose defaults are not Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.job_file import resolve_architecture
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, note_numbers, note_unsupported
from peakcast.dialects.llamafactory.job import IGNORED
from peakcast.dialects.megatron.adapters import AdapterKeys, with_adapters
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import check_framework_options, conventions
from peakcast.jobs.spec import ActivationCheckpointing, Offload, Optimizer, Parallelism, Precision, TrainingJob

SIZES = {
    "tensor_parallel_size": "tensor_model_parallel_size", "pipeline_parallel_size": "pipeline_model_parallel_size",
    "context_parallel_size": "context_parallel_size", "expert_parallel_size": "expert_model_parallel_size",
    "virtual_pipeline_stages": "virtual_pipeline_model_parallel_size",
}  # fmt: skip
SWITCHES = {
    "apply_rope_fusion": "apply_rope_fusion", "bias_swiglu_fusion": "bias_activation_fusion",
    "bias_gelu_fusion": "bias_activation_fusion", "cross_entropy_loss_fusion": "cross_entropy_loss_fusion",
    "moe_grouped_gemm": "moe_grouped_gemm", "moe_shared_expert_overlap": "moe_shared_expert_overlap",
    "overlap_grad_reduce": "overlap_grad_reduce", "overlap_param_gather": "overlap_param_gather",
    "ddp_average_in_collective": "ddp_average_in_collective", "calculate_per_token_loss": "calculate_per_token_loss",
    "moe_layer_recompute": "moe_layer_recompute",
}  # fmt: skip
"""Framework option -> the key that switches it on; all are off by default, fusions included."""
TEXTS = {"moe_token_dispatcher_type": "allgather", "moe_router_dtype": "", "transformer_impl": "transformer_engine"}
NUMBERS = {"ddp_bucket_size": 0, "moe_aux_loss_coeff": 0}
UNSUPPORTED = {
    "fp8": "FP8 training", "fp8_format": "FP8 training", "fp8_recipe": "FP8 training",
    "cuda_graph_impl": "CUDA graphs",
    "pipeline_model_parallel_layout": "a layout of layers over stages", "additional_configs": "additional_configs",
    "account_for_embedding_in_pipeline_split": "the embedding as a layer of the split",
    "account_for_loss_in_pipeline_split": "the loss as a layer of the split", "variable_seq_lengths": "changing lengths",
    "sequence_packing": "sequence packing", "packing": "packing", "neat_packing": "packing",
}  # fmt: skip


ADAPTERS = AdapterKeys("lora_rank", "lora_alpha", "lora_dropout", "lora_target", 8, 0.0, ("all",))
"""LoRA's keys; mcore_adapter's layers are divided as mcore-bridge's (alibaba/ROLL mcore_adapter/adapters/lora_layer.py)."""
COUNTED = {"mtp_num_layers": "Multi-token prediction", "moe_expert_capacity_factor": "A capacity of experts"}
"""Settings that any number except 0 switches on."""


def _method(settings: Settings) -> str:
    """ "full" or "lora". Raises: SpecError for other methods, and for stages that are not modelled."""
    method = settings.text("finetuning_type", "lora")
    if method not in ("full", "lora"):
        raise settings.refuse("finetuning_type", "is not modelled with Megatron; full and lora are", "lora")
    if settings.text("stage", "sft") not in ("sft", "pt"):
        raise settings.refuse("stage", "is not modelled with Megatron; sft and pt are")
    return method


def from_llamafactory_megatron(pasted: Pasted) -> Translation:
    """The job of a LLaMA-Factory configuration for Megatron. Raises: SpecError naming the key, its value, the rule and the
    way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "LLaMA-Factory")
    architecture = resolve_architecture(pasted.model or settings.text("model_name_or_path"))
    settings.given("model_name_or_path")
    method = _method(settings)
    layout = _layout(settings, architecture, pasted)
    options = _options(settings)
    note_unsupported(settings, UNSUPPORTED)
    note_numbers(settings, COUNTED)
    job = TrainingJob(
        architecture=architecture,
        framework="megatron",
        versions=FrozenMapping(pasted.versions.of("megatron")),
        micro_batch_size=settings.integer("micro_batch_size")
        or settings.size("per_device_train_batch_size", 8, assume=True),
        sequence_length=settings.size("cutoff_len", 2048, assume=True),
        gradient_accumulation_steps=settings.size("gradient_accumulation_steps", 1),
        precision=_precision(settings),
        optimizer=Optimizer(name="sgd" if settings.text("optimizer", "adam") == "sgd" else "adamw", implementation="fused"),
        attention="sdpa",
        activation_checkpointing=_recomputation(settings),
        parallelism=layout,
        offload=Offload(optimizer=settings.switch("optimizer_cpu_offload")),
    )
    known: Mapping[str, Any] = conventions(job)
    own = {key: value for key, value in options.items() if known[key] != value}
    job = job.replace(framework_options=FrozenMapping(own))
    check_framework_options(job)
    if method == "lora":
        job = _with_lora(job, settings)
    notes.assumptions.append(
        "mcore_adapter's defaults hold (fusions only where asked for), and Megatron-LM's where it has none."
    )
    settings.note_left(IGNORED)
    return notes.finish(job)


def _options(settings: Settings) -> dict[str, Any]:
    """The framework options, by name: those of the file, else mcore_adapter's defaults."""
    return {
        **{option: settings.switch(key) for option, key in SWITCHES.items()},
        **{name: settings.text(name, default) for name, default in TEXTS.items()},
        **{name: settings.number(name, default) for name, default in NUMBERS.items()},
    }


def _with_lora(job: TrainingJob, settings: Settings) -> TrainingJob:
    if job.parallelism.sequence_parallel:
        settings.notes.unsupported.append(
            "mcore_adapter gathers the inputs of adapters and keeps them whole under sequence parallelism, which is not "
            "counted.",
            "finetuning_type",
            "more",
        )
    return with_adapters(job, settings, ADAPTERS, "mcore_bridge")


def _layout(settings: Settings, architecture: Architecture, pasted: Pasted) -> Parallelism:
    sizes: dict[str, Any] = {field: settings.size(key, 1) for field, key in SIZES.items()}
    tensor, experts = sizes["tensor_parallel_size"], sizes["expert_parallel_size"]
    ranks = tensor * sizes["pipeline_parallel_size"] * sizes["context_parallel_size"]
    expert_tensor = settings.integer("expert_tensor_parallel_size")
    if architecture.moe is not None and tensor > 1 and expert_tensor is None:
        expert_tensor = 1
        settings.notes.assumptions.append("expert_tensor_parallel_size is not given; the default of mcore_adapter is 1.")
    least = ranks * max(1, experts * (expert_tensor or tensor) // (tensor * sizes["context_parallel_size"]))
    num_gpus = pasted.gpus(settings.notes, least, ", the least for this layout")
    if num_gpus % ranks:
        raise settings.refuse(
            "pipeline_model_parallel_size",
            f"times the other sizes makes {ranks} ranks, which do not divide {num_gpus} GPUs",
            1,
        )
    virtual = sizes["virtual_pipeline_stages"]
    return Parallelism(
        **sizes,
        data_parallel_size=num_gpus // ranks,
        sequence_parallel=settings.switch("sequence_parallel") and tensor > 1,
        pipeline_schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        expert_tensor_parallel_size=expert_tensor if architecture.moe is not None else None,
        zero_stage=int(settings.switch("use_distributed_optimizer")),
    )


def _precision(settings: Settings) -> Precision:
    """The dtypes; with bf16, gradients are accumulated in float32 (training_args.py TrainingArguments.__post_init__)."""
    bf16, fp16 = settings.switch("bf16"), settings.switch("fp16")
    settings.given("pure_bf16")
    in_fp32 = bf16 or settings.switch("accumulate_allreduce_grads_in_fp32")
    if not bf16 and not fp16:
        return Precision(parameters="float32", compute="float32", gradients="float32", optimizer_states="float32")
    half: Any = "bfloat16" if bf16 else "float16"
    return Precision(
        parameters=half,
        compute=half,
        gradients="float32" if in_fp32 else half,
        optimizer_states="float32",
        main_parameters="float32",
    )


def _recomputation(settings: Settings) -> ActivationCheckpointing:
    settings.given("disable_gradient_checkpointing")
    granularity = settings.one_of("recompute_granularity", "none", ("none", "full", "selective"))
    modules, method = settings.words("recompute_modules"), settings.text("recompute_method", "uniform")
    num_layers = settings.integer("recompute_num_layers")
    if granularity == "none":
        return ActivationCheckpointing()
    if granularity == "selective":
        return ActivationCheckpointing(mode="selective", modules=tuple(modules if modules != ("core_attn",) else ()))
    # without a method every layer is checkpointed by itself ("all layers will do recomputation")
    return ActivationCheckpointing(
        mode="full", use_reentrant=True, method="uniform" if method == "uniform" else "block", num_layers=num_layers or 1
    )
