"""Oumi's training configurations, `oumi train -c FILE`: TRL's trainers, transformers' own, or Oumi's loop, by
`training.trainer_type`.

Source: oumi-ai/oumi, release 0.9: core/configs/training_config.py and core/configs/params/*.py (`TrainingParams.to_hf`,
`PeftParams.to_lora` and `to_bits_and_bytes`), builders/models.py (`build_peft_model`), builders/optimizers.py, train.py
(`coerce_model_to_dtype`), core/trainers/oumi_trainer.py; the versions of packages that it accepts: its metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from peakcast.core.fields import FrozenMapping, flat
from peakcast.dialects.common.generation import READ, SAMPLING, Generation, generation_of
from peakcast.dialects.common.pasted import Pasted, nested
from peakcast.dialects.common.translation import (
    Notes,
    Settings,
    Translation,
    note_numbers,
    note_unsupported,
    refuse_teacher,
    renamed,
    speller,
)
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.post_training import with_method
from peakcast.dialects.huggingface.quantization import STORAGES
from peakcast.dialects.huggingface.trl_adapters import with_casts_of_trl
from peakcast.dialects.huggingface.trl_checkpoints import has_stage_3, take_checkpoints
from peakcast.dialects.huggingface.trl_loss import take_sft_loss, with_sft_loss
from peakcast.dialects.oumi_sharding import (
    OF_DEEPSPEED,
    OF_FSDP,
    OF_OFFLOAD,
    Sharded,
    mixed_in_fsdp,
    sharding_of,
)
from peakcast.jobs.spec import TrainingJob

TRL = {
    "TRL_SFT": "sft", "TRL_DPO": "dpo", "TRL_KTO": "kto", "TRL_GRPO": "grpo", "TRL_GKD": "gkd", "TRL_GOLD": "gold",
}  # fmt: skip
"""Values of `training.trainer_type` for TRL's trainers -> the training method."""
OTHERS = ("HF", "OUMI", "VERL_GRPO")
NEWEST_TRL = "1.6"
"""The newest release of trl that Oumi 0.9 accepts (`trl>=0.24,<1.7`)."""
TRAINING = {
    "training.gradient_accumulation_steps": "gradient_accumulation_steps", "training.weight_decay": "weight_decay",
    "training.compile": "torch_compile", "training.eval_strategy": "eval_strategy", "training.eval_steps": "eval_steps",
    "training.per_device_eval_batch_size": "per_device_eval_batch_size",
    "model.attn_implementation": "attn_implementation",
}  # fmt: skip
"""Keys that reach TrainingArguments or the network unchanged -> their names there."""
SPELLED = {
    "training.per_device_train_batch_size": "per_device_train_batch_size", "training.optimizer": "optim",
    "training.enable_gradient_checkpointing": "gradient_checkpointing", "model.model_max_length": "max_length",
    "training.gradient_checkpointing_kwargs": "gradient_checkpointing_kwargs", "model.torch_dtype_str": "torch_dtype",
    "model.enable_liger_kernel": "use_liger_kernel", "data.train.pack": "packing", "fsdp.enable_fsdp": "fsdp",
    "peft.q_lora": "quantization_config", "training.mixed_precision_dtype": "bf16",
}  # fmt: skip
"""Keys that are read here -> their names in transformers and TRL."""
ADAPTER = {
    "peft.lora_r": "r", "peft.lora_alpha": "lora_alpha", "peft.lora_dropout": "lora_dropout", "peft.lora_bias": "bias",
    "peft.lora_target_modules": "target_modules", "peft.lora_modules_to_save": "modules_to_save",
    "peft.lora_target_parameters": "target_parameters", "peft.lora_exclude_modules": "exclude_modules",
    "peft.lora_init_weights": "init_lora_weights", "peft.lora_task_type": "task_type",
}  # fmt: skip
OF_PEFT = (
    "lora_target_modules_regex", "q_lora", "q_lora_bits", "bnb_4bit_quant_type", "llm_int8_skip_modules",
    "use_bnb_nested_quant", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype", "peft_save_mode",
)  # fmt: skip
"""The keys of `peft` beside those of `ADAPTER`; one of a later commit than the release (0a5176b7)."""
DTYPES = {"f32": "float32", "float": "float32", "bf16": "bfloat16", "f16": "float16", "half": "float16"}
"""Oumi's other names of dtypes (utils/torch_utils.py `get_torch_dtype`)."""
FUSED = {"adam": "adamw_torch_fused", "adamw": "adamw_torch_fused", "adamw_torch": "adamw_torch_fused"}
"""Optimizers that Oumi's own loop fuses wherever there is a GPU."""
UNSUPPORTED = {
    "model.freeze_layers": "layers that are not trained", "model.adapter_model": "an adapter that is loaded before",
    "model.text_only": "the text part alone of a network with images",
    "peft.llm_int8_skip_modules": "modules that are not quantised",
}  # fmt: skip
KWARGS = "training.trainer_kwargs."
OF_LOSS = re.compile(
    r"training\.trainer_kwargs\.(beta|loss_type|loss_weights|label_smoothing|f_\w+|rpo_alpha|ld_alpha|discopop_tau|use_weighting"
    r"|(un)?desirable_weight|max_(prompt|completion)_length|truncation_mode|disable_dropout|precompute_ref_log_probs"
    r"|precompute_ref_batch_size|reference_free|generate_during_eval|dataset_kwargs\..*|padding_value|label_pad_token_id)"
)
"""Arguments of TRL's preference trainers that do not change what their steps hold, or that are read here."""
IGNORED = re.compile(
    r"data\..*|model\.(tokenizer_\w+|processor_kwargs|chat_template|chat_template_kwargs)(\..*)?"
    r"|model\.(load_pretrained_weights|trust_remote_code|device_map|shard_for_eval|model_revision|tool_call_parser"
    r"|adapter_trainable|model_kwargs\.(disable_dropout|revision))"
    r"|training\.(output_dir|max_steps|num_train_epochs|save_\w+|seed|data_seed|full_determinism|run_name|metrics_function"
    r"|reward_functions|log_level|dep_log_level|log_examples|enable_(wandb|mlflow|tensorboard)|logging_\w+|learning_rate"
    r"|lr_scheduler_type|warmup_(ratio|steps)|adam_(beta1|beta2|epsilon)|sgd_momentum|include_\w+_metrics|log_model_summary"
    r"|resume_from_checkpoint|try_resume_from_last_checkpoint|dataloader_\w+|ddp_find_unused_parameters|max_grad_norm"
    r"|nccl_default_timeout_minutes|label_ignore_index|use_async_dataset)"
    r"|training\.(reward_function_kwargs|lr_scheduler_kwargs|profiler|telemetry|gkd|gold|verl_config_overrides)\..*"
    r"|training\.grpo\.(temperature|remove_unused_columns|repetition_penalty|epsilon|log_completions|rollout_function"
    r"|vllm_dtype|model_init_kwargs\..*)|log-level|log|level|verbose|v"
    rf"|fsdp\.({'|'.join(sorted(OF_FSDP))})|deepspeed\.({'|'.join(sorted(OF_DEEPSPEED))})"
    rf"|deepspeed\.offload_(optimizer|param)\.({'|'.join(sorted(OF_OFFLOAD))})|deepspeed\.activation_checkpointing\..*"
    rf"|({'|'.join(sorted(map(re.escape, ADAPTER)))}|peft\.({'|'.join(OF_PEFT)}))"
)


def from_oumi(pasted: Pasted) -> Translation:
    """The job of such a configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    values = flat(pasted.values)
    settings = Settings(values, notes, "Oumi")
    trainer = settings.one_of("training.trainer_type", "HF", (*TRL, *OTHERS))
    if trainer == "VERL_GRPO":
        raise settings.refuse("training.trainer_type", "runs verl, of whose settings Oumi's are a part; give verl's own")
    refuse_teacher(settings, "training.gkd.teacher_model_name_or_path", "training.gold.teacher_model_name_or_path")
    if settings.switch("model.compile"):
        raise settings.refuse("model.compile", "must be false, since training.compile compiles")
    model = settings.model(pasted.model, "model.model_name")
    sharded = sharding_of(pasted, settings)
    adapter = _adapter(settings, sharded)
    training = _training(settings, trainer, adapter, sharded)
    generation = _generation(settings, training) if trainer == "TRL_GRPO" else None
    versions = _versions(pasted, trainer, notes)
    loss_options = take_sft_loss(training, TRL[trainer], versions, notes) if trainer in TRL else {}
    if trainer in TRL:
        adapts_in_stage_3 = adapter is not None and has_stage_3(sharded.deepspeed)
        take_checkpoints(training, TRL[trainer], adapts_in_stage_3, versions, notes)
    translation = from_huggingface(
        model,
        training,
        adapter,
        sharded.deepspeed,
        sharded.fsdp,
        sharded.num_gpus,
        versions=versions,
        spell=_spell(values),
    )
    job = with_sft_loss(notes.include(translation), loss_options, notes)
    options = {**job.framework_options, **_four_bit_products(settings, job)}
    if trainer == "OUMI" and job.framework == "huggingface":
        options["outputs_dropped"] = False  # the loop's variable `outputs` keeps them until its next assignment
    job = job.replace(framework_options=FrozenMapping(options))
    if trainer in TRL:
        job = _as_trl_trains(job, settings, TRL[trainer], versions, generation)
    note_unsupported(settings, UNSUPPORTED)
    settings.note_left(IGNORED, OF_LOSS)
    return notes.finish(job)


def _versions(pasted: Pasted, trainer: str, notes: Notes) -> dict[str, Any]:
    """The versions of the run. If trl's is not given, it is the newest that Oumi accepts."""
    asked = pasted.versions
    if trainer not in TRL or asked.here or "trl" in asked.given:
        return asked.of("huggingface")
    notes.assumptions.append(f"the release of trl is not given; {NEWEST_TRL} is assumed, the newest that Oumi 0.9 accepts.")
    return asked.of("huggingface", {"trl": NEWEST_TRL})


def _as_trl_trains(
    job: TrainingJob, settings: Settings, method: str, versions: Mapping[str, Any], generation: Generation | None
) -> TrainingJob:
    """`job` with the casts and the loss of TRL's trainer for `method`."""
    notes = settings.notes
    job = with_casts_of_trl(job, versions, notes)
    precomputed = settings.switch(f"{KWARGS}precompute_ref_log_probs")
    return with_method(job, method, "training.trainer_type", notes, precomputed=precomputed, generation=generation)


def _spell(values: Mapping[str, Any]) -> Callable[[str], str]:
    """A function that turns a name of transformers, TRL or peft into the key that the user wrote in `values`."""
    direct = {key.removeprefix(KWARGS).partition(".")[0] for key in values if key.startswith(KWARGS)}
    written = speller(TRAINING, SPELLED, ADAPTER)
    return lambda name: f"{KWARGS}{name}" if name in direct else written(name)


def _training(settings: Settings, trainer: str, adapter: Mapping[str, Any] | None, sharded: Sharded) -> dict[str, Any]:
    """The step in the words of transformers' training arguments."""
    training: dict[str, Any] = {
        "per_device_train_batch_size": settings.size("training.per_device_train_batch_size", 8, assume=True),
        "optim": _optimizer(settings, trainer),
        **renamed(settings, TRAINING),
        **_precision(settings, trainer),
        **_checkpoints(settings, trainer, sharded),
        **_samples(settings, trainer),
    }
    if steps := settings.integer("training.empty_device_cache_steps"):
        training["torch_empty_cache_steps"] = steps
    if settings.switch("model.enable_liger_kernel"):
        training["use_liger_kernel"] = True
    if adapter is not None and settings.switch("peft.q_lora"):
        _quantise(settings, training, sharded)
    elif adapter is None and ADAPTER.keys() & set(settings.left()):
        settings.notes.assumptions.append(
            "training.use_peft is not true, so the section peft has no effect: full training."
        )
    if trainer != "OUMI":
        training |= _kwargs(settings)
    return training


def _kwargs(settings: Settings) -> dict[str, Any]:
    """The arguments that Oumi passes to the trainer unchanged, without those of a preference loss."""
    keys = [key for key in settings.left() if key.startswith(KWARGS) and not OF_LOSS.fullmatch(key)]
    return nested({key.removeprefix(KWARGS): settings.raw(key) for key in keys})


def _optimizer(settings: Settings, trainer: str) -> str:
    if not settings.given("training.optimizer"):
        settings.notes.assumptions.append("training.optimizer is not given; the default of Oumi is adamw_torch.")
    name = settings.text("training.optimizer", "adamw_torch")
    if trainer != "OUMI":
        return name
    note_numbers(settings, {"training.sgd_momentum": "The momentum of SGD"}, "more")
    return FUSED.get(name.lower(), name.lower())


def _precision(settings: Settings, trainer: str) -> dict[str, Any]:
    """The dtype in which weights are loaded, and that of mixed precision. Oumi always sets bf16, so TRL's default for it
    never applies."""
    written = settings.text("model.torch_dtype_str", "auto").lower()
    dtype = DTYPES.get(written, written)
    if dtype not in ("auto", *DTYPES.values()):
        raise settings.refuse("model.torch_dtype_str", f"must be auto or one of {', '.join(sorted(set(DTYPES.values())))}")
    training: dict[str, Any] = {"torch_dtype": dtype}
    mixed = settings.text("training.mixed_precision_dtype", "NONE").upper()
    if mixed not in ("NONE", "BF16", "FP16"):
        raise settings.refuse("training.mixed_precision_dtype", "must be NONE, BF16 or FP16")
    if mixed != "NONE" and dtype != "float32":
        raise settings.refuse(
            "training.mixed_precision_dtype", "needs model.torch_dtype_str: float32 (Oumi refuses others)"
        )
    inside = mixed_in_fsdp(settings)
    if inside and trainer == "OUMI":
        settings.notes.unsupported.append(
            "FSDP's mixed precision without autocast (fsdp.mixed_precision in Oumi's own loop) is not modelled; that of "
            "accelerate is assumed.",
            "fsdp.mixed_precision",
            "less",
        )
    return training | {key: key == inside or mixed == key.upper() for key in ("bf16", "fp16")}


def _checkpoints(settings: Settings, trainer: str, sharded: Sharded) -> dict[str, Any]:
    """The settings of activation checkpointing. With `fsdp.enable_fsdp` Oumi leaves checkpointing to accelerate's FSDP and
    switches the Trainer's off, even on one GPU, where FSDP is not used (`prepare_accelerate_fsdp_run`). Otherwise it passes
    the Trainer an empty mapping, so that torch's default use_reentrant=True applies (torch 2.13 utils/checkpoint.py)."""
    asked = settings.switch("training.enable_gradient_checkpointing")
    given = settings.raw("training.gradient_checkpointing_kwargs.use_reentrant")
    asked_for_reentrant = settings.switch("training.gradient_checkpointing_kwargs.use_reentrant", True)
    if sharded.of_oumi and trainer != "OUMI":
        if asked and sharded.num_gpus == 1:
            settings.notes.warnings.append(
                "On one GPU nothing checkpoints activations: with fsdp.enable_fsdp Oumi leaves checkpointing to FSDP, "
                "which is not used on one GPU.",
                "training.enable_gradient_checkpointing",
                "less",
            )
            return {"gradient_checkpointing": False}
        return {"gradient_checkpointing": asked, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if settings.switch("training.use_deterministic") and trainer != "OUMI" and asked:
        settings.notes.assumptions.append("training.use_deterministic switches gradient checkpointing off.")
        return {"gradient_checkpointing": False}
    if asked and given is None:
        settings.notes.assumptions.append("use_reentrant is not given; Oumi leaves it to torch, whose default is true.")
    return {"gradient_checkpointing": asked, "gradient_checkpointing_kwargs": {"use_reentrant": asked_for_reentrant}}


def _samples(settings: Settings, trainer: str) -> dict[str, Any]:
    """The length of sequences and whether they are packed, by Oumi's own data sets: in rows of that length."""
    notes = settings.notes
    collator = settings.text("data.train.collator_name")
    if "vision" in collator:
        notes.unsupported.append(
            f"Images (data.train.collator_name={collator}) and their tokens are not in the number.",
            "data.train.collator_name",
            "more",
        )
    length = settings.integer("model.model_max_length")
    if trainer == "TRL_KTO":  # __post_init__ of TrainingConfig: "Ignored model.model_max_length"
        length = settings.integer(f"{KWARGS}max_length", 1024)
        notes.assumptions.append(f"model.model_max_length has no effect on KTO; TRL's max_length applies, {length} tokens.")
    elif length is None:
        length = settings.integer(f"{KWARGS}max_length")
    if length is None and trainer != "TRL_GRPO":
        length = 2048
        notes.warnings.append(
            "model.model_max_length is not given, so samples are not cut; 2048 tokens are assumed. Give the length of "
            "the longest sample: --sequence-length.",
            "sequence_length",
            "more",
        )
    samples: dict[str, Any] = {} if length is None else {"max_length": length}
    if settings.switch("data.train.pack"):
        samples |= {"packing": True, "packing_strategy": "wrapped"}
    return samples


def _adapter(settings: Settings, sharded: Sharded) -> dict[str, Any] | None:
    """peft's LoraConfig; None for full training."""
    if not settings.switch("training.use_peft"):
        return None
    adapter = renamed(settings, ADAPTER)
    adapter["r"] = settings.size("peft.lora_r", 8, assume=True)
    adapter["lora_alpha"] = settings.number("peft.lora_alpha", 8)
    targets = list(settings.words("peft.lora_target_modules"))
    adapter.pop("target_modules", None)
    if targets == ["all-linear"]:
        adapter["target_modules"] = "all-linear"
    elif targets and settings.switch("peft.lora_target_modules_regex"):
        adapter["target_modules"] = "|".join(f"({each})" for each in targets)
    elif targets:
        adapter["target_modules"] = targets
    if settings.switch("peft.q_lora") and sharded.fsdp is not None:
        adapter["autocast_adapter_dtype"] = False
    return adapter


def _quantise(settings: Settings, training: dict[str, Any], sharded: Sharded) -> None:
    """Quantise the weights in `training`, and note the dtype of all others. Under FSDP Oumi casts them, adapters too, to
    the network's dtype. Without FSDP and DeepSpeed they are float32; unless precision is mixed, every operation but
    bitsandbytes' products then computes in float32."""
    notes, bits = settings.notes, settings.integer("peft.q_lora_bits", 4)
    if bits not in (4, 8):
        raise settings.refuse("peft.q_lora_bits", "must be 4 or 8")
    kind = settings.one_of("peft.bnb_4bit_quant_type", "fp4", ("fp4", "nf4"))
    nests = settings.switch("peft.use_bnb_nested_quant")
    quantised = {"load_in_4bit": True, "bnb_4bit_use_double_quant": nests, "bnb_4bit_quant_type": kind}
    quantised["bnb_4bit_quant_storage"] = settings.one_of("peft.bnb_4bit_quant_storage", STORAGES[0], STORAGES)
    training["quantization_config"] = quantised if bits == 4 else {"load_in_8bit": True}
    if bits == 4 and kind == "fp4":
        notes.unsupported.append(
            "peft.bnb_4bit_quant_type=fp4 (Oumi's default) is not modelled; nf4 is assumed, of the same size.",
            "peft.bnb_4bit_quant_type",
        )
    if sharded.fsdp is not None:
        notes.assumptions.append("Oumi casts all that is not quantised, adapters too, to the network's dtype under FSDP.")
        return
    if settings.switch("deepspeed.enable_deepspeed") and settings.text("deepspeed.precision"):
        notes.assumptions.append("DeepSpeed casts all that is not quantised, adapters too, to deepspeed.precision.")
        return
    training["torch_dtype"] = "float32"
    notes.assumptions.append("peft's prepare_model_for_kbit_training widens norms, embedding and head to float32.")


def _four_bit_products(settings: Settings, job: TrainingJob) -> dict[str, str]:
    """The framework option for the dtype in which 4-bit layers multiply. It does not depend on Oumi's casts: float32 unless
    the configuration sets another."""
    written = settings.text("peft.bnb_4bit_compute_dtype", "float32")
    dtype = DTYPES.get(written, written)
    if dtype not in DTYPES.values():
        raise settings.refuse("peft.bnb_4bit_compute_dtype", f"must be one of {', '.join(sorted(set(DTYPES.values())))}")
    return {"quantized_compute_dtype": dtype} if job.finetuning.quantization == "nf4" else {}


def _generation(settings: Settings, training: dict[str, Any]) -> Generation:
    """GRPO's completions, of `training.grpo`, whose names are trl's. Sets the length of sequences in `training`."""
    places = ("training.grpo.", KWARGS)
    given = {key: settings.raw(f"{at}{key}") for at in places for key in READ if settings.given(f"{at}{key}")}
    if settings.switch("training.grpo.use_vllm"):
        given.setdefault("vllm_gpu_memory_utilization", 0.9)
    for key in [key for key in training if SAMPLING.fullmatch(key)]:
        settings.notes.ignored.append(f"{KWARGS}{key}")
        del training[key]
    generation = generation_of(Settings(given, settings.notes, "Oumi"), "training.per_device_train_batch_size")
    training["max_length"] = generation.sequence_length
    return generation
