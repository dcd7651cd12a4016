"""NeMo AutoModel's YAML: networks of transformers under FSDP2, in AutoModel's own training loop.

Source: nemo_automodel 0.7.0 recipes/llm/train_ft.py, _transformers/auto_model.py (`use_liger_kernel` and `torch_dtype` of
`from_pretrained`), components/distributed/config.py FSDP2Config (bfloat16 parameters, float32 reduction),
components/_peft/lora.py PeftConfig (adapters in the dtype of their weight), components/loss.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.fields import flat
from peakcast.dialects.common.mesh import meshed
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, note_unsupported, states_direction
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.quantization import STORAGES
from peakcast.jobs.spec import Dtype, TrainingJob

PLACES = ("distributed.", "distributed_config.", "model.", "parallelizer.")
"""Sections that may say whether activations are checkpointed."""
STRATEGIES = ("fsdp2", "ddp", "megatron_fsdp")
MESH = {"tensor": "distributed.tp_size", "context": "distributed.cp_size"}
"""Axis -> the key for its size."""
UNSUPPORTED = {
    "distributed.tp_size": "tensor parallelism together with sharding", "distributed.cp_size": "context parallelism",
    "distributed.pp_size": "pipeline parallelism", "qat.enabled": "training for quantisation",
    "fp8.enabled": "FP8 training",
    "fp8.enable_fsdp_float8_all_gather": "FP8 training", "freeze_config": "frozen weights",
    "distributed.enable_fsdp2_prefetch": "units gathered ahead", "moe_metrics.enabled": "metrics of experts",
    "peft.lora_A_init.dora": "another start of LoRA", "neftune": "NEFTune", "distributed.multimodal": "a vision tower",
    "model.backend.te_fp8._target_": "FP8 training", "model.backend.te_fp8.recipe": "FP8 training",
}  # fmt: skip
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZERS = {"adamw": "adamw_torch", "adam": "adamw_torch", "sgd": "sgd", "fusedadam": "adamw_torch_fused"}
IGNORED = re.compile(
    r"(step_scheduler|dist_env|rng|checkpoint|dataset|validation_dataset|dataloader|validation_dataloader|lr_scheduler|wandb"
    r"|mlflow|comet|slurm|benchmark|ci|logger|profiling|nvtx|packed_sequence|clip_grad_norm|tool_call_eval|launcher|skypilot"
    r"|kubernetes|trainer|collate_fn|tokenizer|autonvtx|comet_ml|nsys|sdpa_method)(\..*|$)|recipe|seed|_target_|.*\._target_"
    r"|model\.(trust_remote_code|force_hf|cache_dir|revision|use_cache|backend\..*|output_hidden_states|is_meta_device)"
    r"|optimizer\.(betas|eps|lr|weight_decay|adam_w_mode|bias_correction|foreach|fused|min_lr|momentum|capturable)"
    r"|compile\.(mode|fullgraph|dynamic|backend|dynamo_cache_size_limit)|loss_fn\..*"
    r"|peft\.(match_all_linear|use_triton|lora_A_init|dropout_position|use_memory_efficient_lora|moe_rank_scaling|alpha)"
    r"|distributed(_config)?\.(dp_size|sequence_parallel|backend|use_hf_tp_plan|tp_plan|patch_is_packed_sequence|timeout.*"
    r"|defer_fsdp_grad_sync|autocast_dtype|mp_policy\..*|pipeline\..*|activation_checkpointing_scope|fsdp2_.*_prefetch_depth|moe\..*|strategy)"
    r"|autopipeline\..*|device_mesh\..*|temperature|enable_.*_logging|fp8\.(?!enabled|enable_fsdp).*"
)


def from_automodel(pasted: Pasted) -> Translation:
    """The job of an AutoModel recipe. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(flat(pasted.values), notes, "NeMo AutoModel")
    _check_network(settings)
    names = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path")
    model = settings.model(pasted.model, *names, what="the model's hub id or its folder")
    num_gpus = _gpus(settings, pasted)
    training = _training(settings, num_gpus // _ranks_of_a_sample(settings))
    adapter = _adapter(settings, training)
    fsdp = _sharding(settings)
    note_unsupported(settings, UNSUPPORTED)
    if (settings.integer("distributed.ep_size", 1) or 1) > 1:
        notes.unsupported.append(
            "Expert parallelism (distributed.ep_size) is not modelled: the answer is for ranks that gather all experts "
            "of a layer.",
            "distributed.ep_size",
            "less",
        )
    versions = pasted.versions.of("huggingface")
    job = notes.include(from_huggingface(model, training, adapter, None, fsdp, num_gpus, versions=versions))
    job = _with_optimizer(meshed(job, settings, MESH, fills="shard"), settings)
    notes.warnings.append(
        "NeMo AutoModel implements some families (Llama, Qwen, DeepSeek, ...) itself; the layers of transformers are "
        "counted instead.",
        "model._target_",
    )
    settings.note_left(IGNORED)
    return notes.finish(job)


def _check_network(settings: Settings) -> None:
    """Raises: SpecError for a network whose training step is not that of a language model."""
    target = settings.text("model._target_")
    kind = next((part for part in reversed(target.split(".")) if part.startswith("NeMoAuto")), "")
    if kind in ("", "NeMoAutoModelForCausalLM", "NeMoAutoModelForImageTextToText", "NeMoAutoModelForMultimodalLM"):
        return
    raise settings.refuse(
        "model._target_",
        "trains no language model (it encodes queries with their passages, classifies, or makes other outputs), which is "
        "not read here; ask about a job of the same network, with the sequences of one step as its batch: --model, "
        "--micro-batch-size, --sequence-length, --framework torch",
        kind,
    )


def _with_optimizer(job: TrainingJob, settings: Settings) -> TrainingJob:
    """`job` with the optimizer's own dtypes and implementation. Transformer Engine's FusedAdam keeps its moments in float32
    unless the recipe says otherwise, and with `master_weights` a float32 copy of what it updates (transformer_engine 2
    pytorch/optimizers/fused_adam.py)."""
    if settings.text("optimizer.foreach", "true").lower() == "false" and job.optimizer.implementation == "foreach":
        job = job.replace(optimizer=replace(job.optimizer, implementation="loop"))
    if settings.switch("optimizer.fused"):
        job = job.replace(optimizer=replace(job.optimizer, implementation="fused"))
    if "transformer_engine" not in settings.text("optimizer._target_"):
        return job
    moments = [settings.text(f"optimizer.{name}_dtype", "float32").removeprefix("torch.") for name in MOMENTS]
    states: Dtype = "bfloat16" if moments == ["bfloat16"] * 2 else "float16" if moments == ["float16"] * 2 else "float32"
    if set(moments) != {states}:
        settings.notes.unsupported.append(
            f"Moments in {' and '.join(moments)} are not modelled; {states} is assumed.", "optimizer.exp_avg_dtype", "less"
        )
    main_parameters_dtype: Dtype | None = "float32" if settings.switch("optimizer.master_weights") else None
    if settings.switch("optimizer.store_param_remainders") and main_parameters_dtype:
        settings.notes.unsupported.append(
            "store_param_remainders stores only the 16 bits of each float32 main weight that its bfloat16 weight lacks; "
            "whole float32 main weights are counted.",
            "optimizer.store_param_remainders",
            "less",
        )
    return job.replace(precision=replace(job.precision, optimizer_states=states, main_parameters=main_parameters_dtype))


def _ranks_of_a_sample(settings: Settings) -> int:
    """How many ranks work on the same samples: those of a pipeline, of a layer, and of a sequence."""
    return prod(settings.integer(f"distributed.{axis}_size", 1) or 1 for axis in ("tp", "cp", "pp"))


def _gpus(settings: Settings, pasted: Pasted) -> int:
    nodes, each = settings.integer("benchmark.num_nodes", 1) or 1, settings.integer("benchmark.num_gpus")
    if pasted.num_gpus is None and each:
        return nodes * each
    least, given = _ranks_of_a_sample(settings), settings.text("distributed.dp_size", "none")
    if not given.isdecimal() and given.lower() not in ("none", "auto", "-1"):
        raise settings.refuse("distributed.dp_size", "must be a number of ranks, or none for all there are")
    replicas = int(given) if given.isdecimal() else 0  # FSDP2Manager.dp_size
    if pasted.num_gpus is None and replicas:
        return replicas * least
    num_gpus = pasted.gpus(settings.notes, least, ", the fewest for these sizes" if least > 1 else "")
    if num_gpus % least or (replicas and num_gpus != replicas * least):
        rule = f"{replicas * least}, which is distributed.dp_size ×" if replicas else f"a multiple of {least}, which is"
        raise SpecError(
            f"num_gpus={num_gpus} must be {rule} distributed.tp_size × cp_size × pp_size.",
            parameter="num_gpus",
            value=num_gpus,
        )
    return num_gpus


def _training(settings: Settings, replicas: int) -> dict[str, Any]:
    """The training settings under the names of transformers' TrainingArguments. `replicas`: ranks with other samples."""
    notes = settings.notes
    micro = settings.size("step_scheduler.local_batch_size", settings.integer("step_scheduler.micro_batch_size", 1))
    total = settings.integer("step_scheduler.global_batch_size") or micro * replicas
    liger = settings.switch("model.use_liger_kernel")
    if not settings.given("model.use_liger_kernel"):
        notes.assumptions.append(
            "use_liger_kernel is not given; AutoModel uses Liger's kernels where they are installed and transformers "
            "implements the network; they are not counted."
        )
    dtype = settings.text("model.torch_dtype", settings.text("model.dtype", "bf16"))
    for key in ("model.torch_dtype", "model.dtype"):
        settings.given(key)
    kind = settings.text("optimizer._target_", "torch.optim.AdamW").rpartition(".")[2]
    if kind.lower() not in OPTIMIZERS:
        notes.unsupported.append(
            f"optimizer._target_={kind} is not modelled; AdamW is assumed instead.", "optimizer", states_direction(kind)
        )
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(1, total // (micro * replicas)),
        **_length(settings),
        "torch_dtype": "bfloat16" if dtype in ("auto", "bf16") else dtype.removeprefix("torch."),
        "attn_implementation": settings.text("model.attn_implementation", "sdpa"),
        "gradient_checkpointing": _checkpoints(settings),
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "liger_kernels": liger,
        "fused_linear_cross_entropy": _fuses_loss(settings),
        "torch_compile": settings.switch("compile.enabled"),
        "optim": OPTIMIZERS.get(kind.lower(), "adamw_torch"),
    }


def _length(settings: Settings) -> dict[str, Any]:
    """The length of a row, and whether samples are packed into it."""
    packed = settings.integer("packed_sequence.packed_sequence_size", 0, least=0) or 0
    length = packed or settings.integer("dataset.seq_length", settings.integer("dataset.seq_len"))
    if not length:
        length = 2048
        settings.notes.warnings.append(
            "The recipe does not say how long its samples are (dataset.seq_length, "
            "packed_sequence.packed_sequence_size); 2048 "
            "tokens are assumed. Give that of the longest: --sequence-length.",
            "sequence_length",
            "more",
        )
    return {"max_length": length, "packing": bool(packed)}


def _fuses_loss(settings: Settings) -> bool:
    """Whether the loss is computed together with the head; notes losses that are not modelled."""
    target, unsupported = settings.text("loss_fn._target_"), settings.notes.unsupported
    if target and not re.search(r"FusedLinear|linear_ce|Chunked|MaskedCrossEntropy|TEParallelCrossEntropy", target):
        unsupported.append(f"The loss {target} is not modelled; the cross entropy of whole logits is assumed.", "loss_fn")
    if "Chunked" in target:
        unsupported.append("The loss in chunks (loss_fn) is not modelled; whole logits are used.", "loss_fn", "less")
    return "FusedLinear" in target or "linear_ce" in target


def _checkpoints(settings: Settings) -> bool:
    asked = [
        settings.raw(f"{place}activation_checkpointing")
        for place in PLACES
    ]
    word = next((str(value).lower() for value in asked if value is not None), "false")
    if word not in ("true", "false", "full", "none"):
        settings.notes.unsupported.append(
            f"activation_checkpointing={word} is not modelled; every layer is assumed.",
            "distributed.activation_checkpointing",
        )
    return word not in ("false", "none")


def _adapter(settings: Settings, training: dict[str, Any]) -> dict[str, Any] | None:
    """The adapter settings under peft's names. AutoModel makes adapters in the dtype of the weight to which they are
    attached."""
    if not settings.given("peft._target_") and not settings.given("peft.dim"):
        return None
    kind = settings.text("peft._target_", "PeftConfig")
    if not kind.endswith("PeftConfig"):
        settings.notes.unsupported.append(
            f"peft._target_={kind} is not modelled; LoRA is assumed instead.", "peft._target_"
        )
    targets = settings.words("peft.target_modules")
    names = [target.rpartition(".")[2] for target in targets]
    if settings.switch("load_in_4bit") or settings.switch("quantization.load_in_4bit"):
        double = settings.switch("quantization.bnb_4bit_use_double_quant", True)
        computed = settings.raw("quantization.bnb_4bit_compute_dtype")
        quantised = {"load_in_4bit": True, "bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": computed}
        # 0.7.0 components/quantization/qlora.py `create_bnb_config`
        quantised["bnb_4bit_quant_storage"] = settings.one_of("quantization.bnb_4bit_quant_storage", "bfloat16", STORAGES)
        training["quantization_config"] = quantised
    elif settings.switch("quantization.load_in_8bit"):
        training["quantization_config"] = {"load_in_8bit": True}
    own = "load_in_8bit bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_use_double_quant"
    for key in own.split():
        settings.given(f"quantization.{key}")
    whole = settings.switch("peft.match_all_linear") or not names
    adapter = {
        "r": settings.size("peft.dim", 8, assume=True),
        "lora_alpha": settings.number("peft.alpha", 32),
        "lora_dropout": settings.number("peft.dropout", 0.0),
        "use_dora": settings.switch("peft.use_dora"),
        "target_modules": "all-linear" if whole else names,
    }
    if excluded := settings.words("peft.exclude_modules"):
        adapter["exclude_modules"] = list(excluded)
    if settings.text("peft.lora_dtype").removeprefix("torch.") not in ("float32", "fp32"):
        adapter["autocast_adapter_dtype"] = False
    return adapter


def _sharding(settings: Settings) -> dict[str, Any] | None:
    """FSDP2's settings under accelerate's names; None for plain data parallelism."""
    target = settings.text("distributed_config._target_", settings.text("distributed._target_")).rpartition(".")[2].lower()
    known = {
        "": "fsdp2",
        "fsdp2config": "fsdp2",
        "fsdp2manager": "fsdp2",
        "ddpconfig": "ddp",
        "megatronfsdpconfig": "megatron_fsdp",
        "megatronfsdpmanager": "megatron_fsdp",
        "ddpmanager": "ddp",
    }
    strategy = settings.text("distributed.strategy", known.get(target, target)).lower()
    if strategy not in STRATEGIES:
        raise settings.refuse("distributed.strategy", f"must be one of {', '.join(STRATEGIES)}", strategy)
    replicas = settings.text("distributed.dp_replicate_size", "1")
    if strategy == "megatron_fsdp":
        settings.notes.unsupported.append("Megatron-FSDP is not modelled here; FSDP2 is assumed.", "distributed.strategy")
    if strategy == "ddp":
        return None
    offloads = any(
        key.startswith(("distributed.offload_policy", "distributed_config.offload_policy")) for key in settings.left()
    )
    for key in [key for key in settings.left() if "offload_policy" in key]:
        settings.given(key)
    of_experts = settings.text("parallelizer.reshard_after_forward", "true")
    reshards = settings.text("distributed.reshard_after_forward", of_experts)
    return {
        "fsdp_version": 2,
        "fsdp_sharding_strategy": "hybrid_shard" if replicas.isdecimal() and int(replicas) > 1 else "full_shard",
        "fsdp_reshard_after_forward": reshards.lower() != "false",
        "fsdp_offload_params": offloads,
    }
