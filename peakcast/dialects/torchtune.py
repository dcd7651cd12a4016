"""torchtune's YAML recipes.

Source: torchtune 0.6 recipes/configs, recipes/full_finetune_distributed.py and lora_finetune_*.py, torchtune/models.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from peakcast.core.fields import FrozenMapping, flat
from peakcast.dialects.common.foreign import SERVED
from peakcast.dialects.common.job_file import resolve_architecture
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, refuse_teacher, states_direction
from peakcast.dialects.huggingface.post_training import with_method
from peakcast.jobs.spec import (
    DECAYING_GRADIENTS,
    ActivationCheckpointing,
    Dtype,
    Finetuning,
    Loss,
    Offload,
    Optimizer,
    OptimizerName,
    Parallelism,
    Precision,
    TrainingJob,
)

BUILDERS = {
    "llama2_7b": "llama-2-7b", "llama2_13b": "llama-2-13b", "llama2_70b": "llama-2-70b",
    "code_llama2_7b": "codellama-7b", "code_llama2_13b": "codellama-13b",
    "llama3_8b": "llama-3-8b", "llama3_70b": "llama-3-70b",
    "llama3_1_8b": "llama-3.1-8b", "llama3_1_70b": "llama-3.1-70b", "llama3_1_405b": "llama-3.1-405b",
    "llama3_2_1b": "llama-3.2-1b", "llama3_2_3b": "llama-3.2-3b", "llama3_3_70b": "llama-3.1-70b",
    "mistral_7b": "mistral-7b", "gemma_2b": "gemma-2b", "gemma_7b": "gemma-7b",
    "gemma2_2b": "gemma-2-2b", "gemma2_9b": "gemma-2-9b", "gemma2_27b": "gemma-2-27b",
    "phi3_mini": "phi-3-mini", "phi4_14b": "phi-4",
    "qwen2_0_5b": "qwen2-0.5b", "qwen2_1_5b": "qwen2-1.5b", "qwen2_7b": "qwen2-7b",
    "qwen2_5_0_5b": "qwen2.5-0.5b", "qwen2_5_1_5b": "qwen2.5-1.5b", "qwen2_5_3b": "qwen2.5-3b",
    "qwen2_5_7b": "qwen2.5-7b", "qwen2_5_14b": "qwen2.5-14b", "qwen2_5_32b": "qwen2.5-32b", "qwen2_5_72b": "qwen2.5-72b",
    "qwen3_0_6b": "qwen3-0.6b", "qwen3_1_7b": "qwen3-1.7b", "qwen3_4b": "qwen3-4b",
    "qwen3_8b": "qwen3-8b", "qwen3_14b": "qwen3-14b", "qwen3_32b": "qwen3-32b",
}  # fmt: skip
"""torchtune's model builders, without `lora_`, `qlora_`, `_base` and `_instruct` -> the catalog's names."""
ATTENTION_MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
OPTIMIZERS: dict[str, OptimizerName] = {
    "torch.optim.AdamW": "adamw", "torch.optim.Adam": "adam", "torch.optim.SGD": "sgd",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit", "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit", "torchao.prototype.low_bit_optim.AdamW8bit": "adamw_8bit",
    "torchao.optim.AdamW8bit": "adamw_8bit", "torchao.prototype.low_bit_optim.AdamW4bit": "adamw_4bit",
}  # fmt: skip
CHUNKED_LOSS = "CEWithChunkedOutputLoss"
"""The recipes' default loss before LinearCrossEntropyLoss."""
OTHER_TASKS = ("tasks", "max_new_tokens")
"""Keys of recipes that evaluate or generate, which have no optimizer."""
DTYPES: dict[str, Dtype] = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
IGNORED = re.compile(
    r"((ref_)?checkpointer|dataset|dataset_val|lr_scheduler|metric_logger|profiler)(\..*|$)"
    r"|tokenizer\.(_component_|path|merges_(file|path)|prompt_template|special_tokens_path|vocab_path|truncation_type)"
    r"|optimizer\.(lr|weight_decay|betas|eps)|model\.lora_alpha|loss\.(num_output_chunks|ignore_index|beta|label_smoothing)|quantizer\..*"
    r"|(seed|shuffle|epochs|max_steps_per_epoch|resume_from_checkpoint|save_adapter_weights_only|output_dir|log_every_n_steps"
    r"|log_peak_memory_stats|log_level|device|low_cpu_ram|cudnn_deterministic_mode|use_output_dir|run_val_every_n_steps"
    r"|save_every_n_steps"
    r"|batch_size_val|clip_grad_norm|enable_async_checkpointing|keep_last_n_checkpoints"
    r"|tensor_parallel_plan\..*|data_parallel_.*|dcp_.*|compile\..*)"
)


def _parallelism(num_gpus: int, tensor: int) -> Parallelism:
    return Parallelism(
        data_parallel_size=max(num_gpus // tensor, 1),
        tensor_parallel_size=tensor,
        sharding="fsdp2" if num_gpus > 1 else "none",
    )


def _offload(settings: Settings, *, sharded: bool) -> Offload:
    shards = (settings.switch("fsdp_cpu_offload") or settings.switch("fsdp.cpu_offload")) and sharded
    return Offload(parameters=shards, optimizer=shards, activations=settings.switch("enable_activation_offloading"))


def from_torchtune(pasted: Pasted) -> Translation:
    """The job of a torchtune recipe. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(flat(pasted.values), notes, "torchtune")
    if "optimizer" not in pasted.values and (other := next((key for key in OTHER_TASKS if key in pasted.values), "")):
        raise settings.refuse(other, f"is of a recipe that trains nothing; {SERVED}")
    name, method = _network_and_method(settings)
    if pasted.model is None and name not in BUILDERS:
        raise settings.refuse("model._component_", "has no known shape here; give the network by --model", "")
    refuse_teacher(settings, "teacher_model._component_")
    architecture = resolve_architecture(pasted.model or BUILDERS[name])
    dtype = DTYPES[settings.one_of("dtype", "bf16", DTYPES)]
    tensor = settings.integer("tensor_parallel_dim", 1) or 1
    num_gpus = pasted.gpus(notes, tensor)
    sharded = num_gpus > 1
    job = TrainingJob(
        architecture=architecture,
        framework="torch",
        versions=FrozenMapping(pasted.versions.of("torch", {"torchtune": "main"})),
        micro_batch_size=settings.size("batch_size", 1, assume=True),
        sequence_length=_sequence_length(settings),
        gradient_accumulation_steps=settings.size("gradient_accumulation_steps", 1, assume=True),
        precision=Precision(parameters=dtype, compute=dtype, gradients=dtype, optimizer_states=dtype),
        optimizer=_optimizer(settings),
        finetuning=_finetuning(settings, method, dtype),
        activation_checkpointing=_checkpointing(settings),
        loss=_loss(settings),
        compile=settings.switch("compile"),
        parallelism=_parallelism(num_gpus, tensor),
        offload=_offload(settings, sharded=sharded),
        framework_options=FrozenMapping(_options(settings, sharded=sharded, method=method)),
    )
    if settings.text("loss._component_").endswith("rlhf.loss.DPOLoss"):
        job = _preference(job, method, notes)
    _note_unmodelled(settings)
    settings.note_left(IGNORED)
    return notes.finish(job)


def _network_and_method(settings: Settings) -> tuple[str, Literal["full", "lora", "qlora"]]:
    """The network's name in `BUILDERS`, and the finetuning method: both are in the name of the model's builder."""
    builder = settings.text("model._component_").rpartition(".")[2]
    name = re.sub(r"^(q?lora|dora|qdora)_|_(base|instruct)$", "", builder)
    if builder.startswith("qlora_"):
        return name, "qlora"
    if not builder.startswith("lora_"):
        return name, "full"
    return name, "qlora" if settings.switch("model.quantize_base") else "lora"


def _preference(job: TrainingJob, method: str, notes: Notes) -> TrainingJob:
    """`job` with DPO's loss, and a note of its reference."""
    job = with_method(job, "dpo", "loss._component_", notes, whole_logits="torchtune (rlhf/loss/dpo.py)", log_softmax=True)
    if method == "full" and job.parallelism.sharding != "none":
        notes.unsupported.append(
            "torchtune gathers its reference layer by layer (recipes/full_dpo_distributed.py); the answer is for a "
            "reference that is gathered whole, as in TRL.",
            "ref_checkpointer",
            "less",
        )
    return job


def _note_unmodelled(settings: Settings) -> None:
    for key in ("use_dora", "model.use_dora"):
        if settings.raw(key):
            settings.notes.unsupported.append(f"{key}={settings.raw(key)!r} is not modelled; LoRA is.", key, "more")
    if settings.raw("quantizer._component_"):
        settings.notes.unsupported.append(
            f"quantizer._component_={settings.raw('quantizer._component_')!r} is not modelled: quantisation-aware "
            "training also makes copies of weights and inputs that are rounded to their quantised values.",
            "quantizer._component_",
            "more",
        )


def _checkpointing(settings: Settings) -> ActivationCheckpointing:
    """Checkpointing of every layer or, by `ac_mode`, of each n-th layer, or of operators by torchtitan's policy (torchtune
    training/activations.py)."""
    mode, option = settings.text("ac_mode"), settings.text("ac_option")
    if settings.switch("enable_activation_checkpointing") or mode == "full":
        return ActivationCheckpointing(mode="full")
    if mode != "selective":
        return ActivationCheckpointing()
    if option.isdecimal() and 0 < int(option) < 10_000:
        return ActivationCheckpointing(mode="full", every_n_layers=int(option))
    return ActivationCheckpointing(mode="selective")


def _options(settings: Settings, *, sharded: bool, method: str) -> dict[str, Any]:
    """Differences from torchtune's conventions: how the loss is compiled, the units of FSDP2, and when they are resharded.
    Among torchtune's recipes only lora_finetune_single_device runs the loss that it compiles."""
    options: dict[str, Any] = {}
    if settings.text("loss._component_").endswith(f".{CHUNKED_LOSS}"):
        options |= {"loss_kernel": "chunked_logits", "logits_chunks": settings.integer("loss.num_output_chunks", 8) or 8}
    elif settings.switch("compile") and method != "full" and not sharded:
        options["compiles_loss"] = True
    layers = settings.words("custom_sharded_layers")
    if sharded and ({"tok_embeddings", "output"} <= set(layers) or settings.switch("memory_efficient_fsdp_wrap")):
        options["fsdp2_units"] = "ends"
    elif layers and sharded:
        sentence = f"custom_sharded_layers={' '.join(layers)} is not modelled; layers alone are FSDP's units."
        settings.notes.unsupported.append(sentence)
    if not settings.switch("fsdp_reshard_after_forward", True) and sharded:
        options["fsdp_reshard_after_forward"] = False
    if settings.switch("optimizer_in_bwd"):
        options["optimizer_in_backward"] = True
    if re.fullmatch(r"torchao\..*\.AdamW8bit", settings.text("optimizer._component_")):
        options["adamw_8bit_library"] = "torchao"
    return options


def _sequence_length(settings: Settings) -> int:
    length = settings.integer("tokenizer.max_seq_len")
    packed = settings.switch("dataset.packed")
    if length is None:
        settings.notes.warnings.append(
            "tokenizer.max_seq_len is not given: batches are as long as their longest sample; 2048 tokens are assumed. "
            "Give those of the longest: --sequence-length.",
            "tokenizer.max_seq_len",
            "more",
        )
        return 2048
    if not packed:
        settings.notes.assumptions.append("sequences are read as padded to tokenizer.max_seq_len; shorter ones need less.")
    return length


def _finetuning(settings: Settings, method: Literal["full", "lora", "qlora"], dtype: Dtype) -> Finetuning:
    rank, alpha = settings.integer("model.lora_rank"), settings.number("model.lora_alpha")
    modules = settings.words("model.lora_attn_modules")
    mlp, output = settings.switch("model.apply_lora_to_mlp"), settings.switch("model.apply_lora_to_output")
    dropout = settings.number("model.lora_dropout", 0.0) or 0.0
    if method == "full":
        return Finetuning()
    if rank is None:
        rank = 8
        settings.notes.assumptions.append("model.lora_rank is not given; the default of torchtune is 8.")
    unknown = [module for module in modules if module not in ATTENTION_MODULES]
    if unknown:
        raise settings.refuse("model.lora_attn_modules", f"must be of {', '.join(ATTENTION_MODULES)}")
    targets = [ATTENTION_MODULES[module] for module in modules]
    targets += [*(MLP_MODULES if mlp else ()), *(("lm_head",) if output else ())]
    return Finetuning(
        method="qlora" if method == "qlora" else "lora",
        rank=rank,
        alpha=alpha,
        targets=tuple(targets),
        dropout=dropout,
        adapter_dtype=dtype,
        quantization="nf4" if method == "qlora" else None,
        double_quantization=method == "qlora",  # torchao's NF4Tensor quantizes its scales to int8
    )


def _optimizer(settings: Settings) -> Optimizer:
    name = settings.text("optimizer._component_", "torch.optim.AdamW")
    if name not in OPTIMIZERS:
        settings.notes.unsupported.append(
            f"optimizer {name} is not modelled; {OPTIMIZERS.get(name, 'adamw')} is assumed instead.",
            "optimizer",
            states_direction(name),
        )
    kind = OPTIMIZERS.get(name, "adamw")
    fused = settings.switch("optimizer.fused") or not name.startswith("torch.")
    momentum = settings.number("optimizer.momentum", 0.0) or 0.0
    return Optimizer(
        name=kind,
        implementation="fused" if fused else "foreach",
        momentum=momentum if kind == "sgd" else 0.0,
        weight_decay=settings.number("optimizer.weight_decay", 0.0) or 0.0 if kind in DECAYING_GRADIENTS else 0.0,
    )


def _loss(settings: Settings) -> Loss:
    name = settings.text("loss._component_", "").rpartition(".")[2]
    if name == "LinearCrossEntropyLoss":
        settings.notes.unsupported.append(
            "torchtune's chunked LinearCrossEntropyLoss is treated as a fused linear cross entropy.", "loss", "less"
        )
        return Loss(fused_linear_cross_entropy=True)
    if name == CHUNKED_LOSS:
        return Loss()  # see `_options`
    if name and name not in ("CrossEntropyLoss", "DPOLoss"):
        settings.notes.unsupported.append(f"The loss {name} is not modelled; the cross entropy is assumed.", "loss")
    return Loss()
