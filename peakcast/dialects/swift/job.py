"""ms-swift's command lines and YAML (`swift pt`, `swift sft`, `swift rlhf`): a Hugging Face Trainer run with other
defaults.

Source: modelscope/ms-swift 3.0 to 4 docs/source_en/Instruction/Command-line-parameters.md, swift/arguments (sft_args.py,
rlhf_args.py), swift/config/zero*.json and fsdp2.json, to which values such as "zero2" and "fsdp2" refer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from peakcast.dialects.common.frozen_parts import frozen_parts, with_frozen_parts
from peakcast.dialects.common.generation import generation_of
from peakcast.dialects.common.mesh import with_shared_sequences
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.required_releases import as_required
from peakcast.dialects.common.translation import (
    Notes,
    Settings,
    Translation,
    note_numbers,
    note_unsupported,
    refuse_teacher,
    speller,
)
from peakcast.dialects.huggingface.accelerate import Launcher, launcher_beside
from peakcast.dialects.huggingface.balancing import KEY as BALANCING
from peakcast.dialects.huggingface.evaluation import STRATEGIES, strategy_of
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.post_training import with_method
from peakcast.dialects.huggingface.quantization import STORAGES
from peakcast.dialects.swift.sharding import engine_of, put_fsdp

TUNERS = (
    "lora", "full", "adalora", "vera", "boft", "fourierft", "bone", "longlora", "llamapro", "adapter", "reft", "lora_llm",
)  # fmt: skip
ADAPTERS: Mapping[str, Mapping[str, str]] = {
    "lora": {
        "lora_dropout": "lora_dropout", "lora_bias": "bias", "use_dora": "use_dora", "use_rslora": "use_rslora",
        "modules_to_save": "modules_to_save", "target_parameters": "target_parameters", "init_weights": "init_lora_weights",
    },
    "adalora": {"adalora_init_r": "init_r", "adalora_target_r": "target_r", "modules_to_save": "modules_to_save"},
    "vera": {"vera_rank": "r", "modules_to_save": "modules_to_save"},
    "boft": {"boft_block_size": "boft_block_size", "boft_block_num": "boft_block_num",
    "modules_to_save": "modules_to_save"},
    "fourierft": {"fourier_n_frequency": "n_frequency", "modules_to_save": "modules_to_save"},
    "bone": {"modules_to_save": "modules_to_save"},
}  # fmt: skip
"""Tuner that peft has -> (ms-swift's key -> peft's key)."""
ADAPTER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"lora_dropout": 0.05}, "adalora": {"init_r": 12, "target_r": 8}, "vera": {"r": 256},
    "boft": {"boft_block_size": 4}, "fourierft": {"n_frequency": 2000},
}  # fmt: skip
UNSUPPORTED = {
    "deepspeed_autotp_size": "DeepSpeed's tensor parallelism",
    "zero_hpz_partition_size": "ZeRO++", "lorap_lr_ratio": "LoRA+",
    "new_special_tokens": "added tokens", "enable_dft_loss": "the DFT loss",
    "target_regex": "adapters by a pattern of names", "device_map": "layers spread over GPUs",
    "optimizer": "an own optimizer", "enable_channel_loss": "the loss by channels", "use_ray": "Ray's groups of GPUs",
    "reward_model": "a reward model",
    "experts_impl": "another implementation of experts", "packing_length": "rows of another length than max_length",
}  # fmt: skip
UNSUPPORTED_LESS = {
    "use_galore": "GaLore", "galore_quantization": "Q-GaLore", "use_cce": "cut cross entropy",
    "lisa_activated_layers": "LISA", "freeze_parameters": "frozen weights", "freeze_parameters_regex": "frozen weights",
    "freeze_parameters_ratio": "frozen weights", "trainable_parameters_regex": "frozen weights",
}  # fmt: skip
"""Features that reduce memory and are not modelled; the answer is for a run without them."""
LEAVING = ("offload_model", "offload_optimizer")
"""Settings that move weights and states off the GPU while vLLM generates, and back for the update
(docs/source_en/Instruction/GRPO, "Colocate")."""
OWN = re.compile(
    r"(eval|val|cached|custom|split|shuffle|data|logging|save|hub|swanlab|wandb|sglang|lmdeploy|stream|fourier|galore|lisa|reft"
    r"|lora_ga|adalora|boft|vera|llamapro|metric|report|train_dataloader|template|agent|max_new|infer|merge)_?\w*|acc_strategy|norm_bbox"
    r"|adapters|external_plugins|seed|model_(kwargs|type|revision|name|author)|load_(args|data_args|from_cache_file)|use_hf"
    r"|ignore_args_error|task_type|num_labels|problem_type|rope_scaling|max_model_len|local_repo_path|init_strategy"
    r"|dataset\S*|interleave_prob|stopping_strategy|download_mode|columns|strict|system|truncation_strategy|max_pixels"
    r"|use_chat_template|padding_side|loss_scale|response_prefix|temperature|top_\w+|repetition_penalty|num_beams"
    r"|stop_words|logprobs|hqq_axis|bnb_4bit_quant_storage|vit_(lr|gradient_checkpointing)|aligner_lr"
    r"|max_epochs|resume_only_model|average_tokens\w*|trainable_parameters|add_version|check_model"
    r"|create_checkpoint_symlink|packing_num_proc|lazy_tokenize|loss_type|use_flash_ckpt|early_stop_interval|callbacks"
    r"|safe_serialization|max_shard_size|add_non_thinking_prefix|ref_(adapters|model_type|model_revision)|label_smoothing"
    r"|loss_weights|cpo_alpha|simpo_gamma|desirable_weight|undesirable_weight|center_rewards_coefficient|ld_alpha|discopop_tau"
    r"|predict_with_generate|greater_is_better|warmup_\w+|nproc_per_node|nnodes|deepspeed_elastic|use_logits_to_keep"
    r"|vllm_\w+|use_vllm|num_generations\w*|reward_\w+|cosine_\w+|repetition_\w+|soft_\w+|sleep_level|num_iterations|epsilon\w*"
    r"|scale_rewards|log_\w+|dynamic_sample|overlong_filter|multi_turn\w*|async_generate|sync_ref_model|beta|delta|steps_per_generation"
    r"|generation_batch_size|move_model_batches|top_entropy_quantile|importance_sampling_level|completion_length_limit_scope"
    r"|enable_npu_model_patch|use_swift_lora|disable_\w+|decision_\w+|structured_outputs_regex|max_memory|is_binary_loss_scale"
    r"|enable_thinking|preserve_thinking|ref_(model|adapter_name)|max_completion_length|reference_free|mrl_dims|extra_eval_args"
    r"|ds3_gather_for_generation|adapter_(act|length)|rlhf_type|tuner_backend|quant_method|experts_\w+"
)
"""Keys that do not affect a step's memory."""
HEADLESS = {
    "seq_cls": "AutoModelForSequenceClassification", "reranker": "AutoModelForSequenceClassification",
    "embedding": "AutoModel",
}  # fmt: skip
"""`task_type` -> the class of its network, which makes no logits of the vocabulary."""
COUNTED = {"rpo_alpha": "RPO's likelihood term"}
"""Settings that any number except 0 switches on -> the feature."""
FREEZING = {"vision": "freeze_vit", "projector": "freeze_aligner", "language": "freeze_llm"}
"""Part of a vision-language model -> the key that freezes it (ms-swift's tuner arguments)."""


def from_swift(pasted: Pasted) -> Translation:
    """The job of an ms-swift command or file. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(_values(pasted), notes, "ms-swift")
    model = settings.model(
        pasted.model,
        "model",
        "model_id_or_path",
        what="the model's id, its folder, or its config.json (before ms-swift 3 model_id_or_path)",
    )
    refuse_teacher(settings, "teacher_model", "teacher_model_server")
    method = _method(settings, pasted.program)
    launcher = launcher_beside(pasted, notes)  # `accelerate launch swift/cli/sft.py`
    num_gpus = _gpus(settings, pasted, launcher)
    training = _training(settings, pasted, num_gpus, launcher)
    adapter = _adapter(settings, training)
    generation = None
    if leaving := [key for key in LEAVING if settings.switch(key)]:
        what = "what leaves the GPU while vLLM generates is back for the update."
        notes.assumptions.append(f"{' and '.join(leaving)}: {what}")
    if method == "grpo":
        generation = generation_of(Settings(_generation(settings), notes, "ms-swift"), "per_device_train_batch_size")
        training["max_length"] = generation.sequence_length
    note_unsupported(settings, UNSUPPORTED)
    note_unsupported(settings, UNSUPPORTED_LESS, "less")
    note_numbers(settings, COUNTED, "more")
    _task(settings, training)
    _say_logits(settings, method)
    if pasted.env.get("CELOSS_PARALLEL_SIZE"):
        sentence = "ms-swift's loss on chunks of tokens (CELOSS_PARALLEL_SIZE) is not modelled; whole logits are counted."
        notes.unsupported.append(sentence, "CELOSS_PARALLEL_SIZE", "less")
    training |= {BALANCING: bool(settings.number("router_aux_loss_coef")), **_evaluation(settings)}
    frozen = frozen_parts(settings, FREEZING)
    settings.given("sequence_parallel_size")
    for key in settings.left():  # the Trainer's keys; its reader notes unknown ones
        if OWN.fullmatch(key):
            notes.ignored.append(key)
        else:
            training[key] = settings.raw(key)
    translation = from_huggingface(
        model,
        training,
        adapter,
        training.pop("deepspeed", launcher.deepspeed),
        launcher.fsdp,
        num_gpus,
        versions=pasted.versions.of("huggingface"),
        spell=speller({"router_aux_loss_coef": BALANCING}),
    )
    limits = _image_limits(pasted, settings)
    job = as_required(notes.include(translation), "ms-swift", pasted.versions, notes)
    job = with_shared_sequences(job, settings, "sequence_parallel_size")
    who = "ms-swift (rlhf_trainers)" if method not in ("sft", "pt") else ""
    job = with_method(job, method, "rlhf_type", notes, generation=generation, whole_logits=who)
    return notes.finish(with_frozen_parts(job, frozen, settings, FREEZING, limits))


def _image_limits(pasted: Pasted, settings: Settings) -> dict[str, int | None]:
    """The setting that limits the size of images -> most pixels."""
    if named := pasted.env.get("MAX_PIXELS"):
        return {"MAX_PIXELS": int(named) if named.isdecimal() else None}
    return {"max_pixels": settings.integer("max_pixels")} if settings.given("max_pixels") else {}


def _values(pasted: Pasted) -> dict[str, Any]:
    """The settings: keys with underscores, texts in JSON parsed, and without `ENV` (of newer files), which is part of the
    environment."""
    values = {str(key).replace("-", "_"): value for key, value in pasted.values.items() if key != "ENV"}
    return {key: _unpacked(value) for key, value in values.items()}


def _unpacked(value: Any) -> Any:
    if isinstance(value, str) and value[:1] == "{":
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _method(settings: Settings, program: str) -> str:
    """The training method: sft for the commands `pt` and `sft`; else `rlhf_type`, by default dpo for the command `rlhf`."""
    kind = settings.text("rlhf_type", "dpo" if program.endswith("rlhf") else "sft")
    return "sft" if program.endswith((" sft", " pt")) else kind


def _gpus(settings: Settings, pasted: Pasted, launcher: Launcher) -> int:
    """Number of processes that `accelerate launch` starts, or ms-swift's own launcher: `NPROC_PER_NODE` × `NNODES`; without
    the first, a single process uses all visible GPUs."""
    env = {**pasted.env, **{key: str(value) for key, value in (pasted.values.get("ENV") or {}).items()}}
    seen = len(env.get("CUDA_VISIBLE_DEVICES", "0").split(","))
    if pasted.num_gpus is not None:
        return pasted.num_gpus
    if launcher.num_gpus is not None:
        return launcher.num_gpus
    sizes = [str(settings.raw(name.lower()) or env.get(name, "")) for name in ("NPROC_PER_NODE", "NNODES")]
    processes = int(sizes[0]) if sizes[0].isdecimal() else 1
    if processes < seen:
        settings.notes.unsupported.append(
            f"With NPROC_PER_NODE={processes} ms-swift spreads each network's layers over {seen // processes} of the "
            f"{seen} GPUs of CUDA_VISIBLE_DEVICES, which is not modelled: all of them are counted on one.",
            "CUDA_VISIBLE_DEVICES",
            "less",
        )
    if not sizes[0].isdecimal():
        return pasted.gpus(settings.notes) if "NPROC_PER_NODE" not in env and seen == 1 else 1
    return processes * (int(sizes[1]) if sizes[1].isdecimal() else 1)


def _training(settings: Settings, pasted: Pasted, num_gpus: int, launcher: Launcher) -> dict[str, Any]:
    """The training settings under the names of transformers' TrainingArguments."""
    notes = settings.notes
    batch = settings.size("per_device_train_batch_size", settings.integer("batch_size", 1), assume=True)
    steps = settings.integer("gradient_accumulation_steps", settings.integer("gradient_accumulation_steps", None))
    if steps is None:
        steps = -(-16 // (batch * num_gpus))
        notes.assumptions.append(
            f"gradient_accumulation_steps is not given; ms-swift computes {steps}, for 16 samples in all."
        )
    training: dict[str, Any] = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": steps,
        "max_length": _length(settings),
        "packing": settings.switch("packing"),
        "padding_free": settings.switch("padding_free"),
        **_precision(settings),
    }
    attention = settings.text("attn_impl")
    if attention:
        training["attn_implementation"] = "flash_attention_2" if attention == "flash_attn" else attention
    checkpoints = settings.switch("gradient_checkpointing", True)
    training["gradient_checkpointing"] = checkpoints
    if checkpoints and not settings.given("gradient_checkpointing"):
        notes.assumptions.append("gradient checkpointing is on (ms-swift's default).")
    engine = settings.raw("deepspeed")
    if engine:
        training["deepspeed"] = engine_of(engine, pasted)
    put_fsdp(settings, training, pasted)
    said = settings.raw("gradient_checkpointing_kwargs")
    training["gradient_checkpointing_kwargs"] = said
    if checkpoints and not said:
        others = (engine, training.get("fsdp"), launcher.deepspeed, launcher.fsdp)
        reentrant = num_gpus == 1 or any(others)  # ms-swift 4.6 trainers/mixin.py `_fix_gradient_checkpointing`
        training["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
        notes.assumptions.append(f"use_reentrant is not given; the default of ms-swift is {reentrant} here.")
    return training


def _evaluation(settings: Settings) -> dict[str, Any]:
    """When and with how many sequences at once it evaluates: as often as it saves, if there is something to evaluate on
    (ms-swift 4.6 arguments/sft_args.py `_init_eval_strategy`, trainers/arguments.py)."""
    share = settings.number("split_dataset_ratio", 0.0)
    held_out = any([share, settings.raw("val_dataset"), settings.raw("cached_val_dataset")])
    saves = settings.text("save_strategy", "steps").lower()
    strategy = strategy_of(settings, "eval_strategy", saves if saves in STRATEGIES else "steps")
    sequences = settings.integer("per_device_eval_batch_size", 1)
    return {"eval_strategy": strategy if held_out else "no", "per_device_eval_batch_size": sequences}


def _length(settings: Settings) -> int:
    """Tokens of the longest sample; 2048 if nothing says how long it is, with a warning."""
    length = settings.integer("max_length")
    if length is None and settings.raw("max_completion_length") is None:
        settings.notes.warnings.append(
            "max_length is not given; ms-swift then only cuts samples at the model's maximum. 2048 tokens are assumed. "
            "Give the length of the longest sample: --sequence-length.",
            "sequence_length",
            "more",
        )
    return 2048 if length is None else length


def _precision(settings: Settings) -> dict[str, Any]:
    """The dtype in which weights are loaded, and that of the products."""
    dtype = settings.text("torch_dtype", settings.text("dtype"))
    # without one, the configuration's, else bfloat16 (get_default_torch_dtype)
    training: dict[str, Any] = {"torch_dtype": dtype} if dtype else {"dtype_if_unsaid": "bfloat16"}
    given = {key: settings.switch(key) for key in ("bf16", "fp16") if settings.raw(key) is not None}
    # without either: base_args.py `_init_mixed_precision`
    return training | (given or {"fp16" if dtype in ("float16", "float32") else "bf16": True})


def _adapter(settings: Settings, training: dict[str, Any]) -> dict[str, Any] | None:
    """The adapter settings under peft's names; None for full training."""
    tuner = settings.one_of("train_type", settings.text("tuner_type", settings.text("sft_type", "lora")), TUNERS)
    rank, alpha = settings.integer("lora_rank", 8), settings.number("lora_alpha", 32)
    targets = settings.words("target_modules") or settings.words("lora_target_modules") or ("all-linear",)
    if settings.text("tuner_backend", "peft") == "unsloth":
        settings.notes.unsupported.append("Unsloth (tuner_backend) is not modelled here; peft is.", "tuner_backend", "less")
    for keys in ADAPTERS.values():
        for key in keys:
            settings.given(key)
    if tuner == "full":
        _refuse_bits(settings)
        return None
    if tuner not in ADAPTERS:
        raise settings.refuse("train_type", f"is not modelled; {', '.join(ADAPTERS)} and full are", tuner)
    adapter: dict[str, Any] = {"peft_type": tuner.upper(), "target_modules": list(targets)}
    if targets in (("all-linear",), ("ALL",)):
        adapter["target_modules"] = "all-linear"
    adapter |= {"r": rank, "lora_alpha": alpha} if tuner in ("lora", "bone") else {}
    names = ADAPTERS[tuner]
    adapter |= ADAPTER_DEFAULTS.get(tuner, {})
    adapter |= {name: settings.raw(key) for key, name in names.items() if settings.raw(key) not in (None, [], "")}
    if tuner == "lora" and not settings.given("lora_rank"):
        settings.notes.assumptions.append("lora_rank is not given; the default of ms-swift is 8.")
    dtype = settings.text("lora_dtype")
    if dtype and dtype != "float32":
        adapter["autocast_adapter_dtype"] = False
    _quantization(settings, training)
    return adapter


def _quantization(settings: Settings, training: dict[str, Any]) -> None:
    bits = settings.integer("quant_bits", settings.integer("quantization_bit"))
    method = settings.text("quant_method", settings.text("quantization_method", "bnb"))
    double, kind = settings.switch("bnb_4bit_use_double_quant", True), settings.text("bnb_4bit_quant_type", "nf4")
    wide = settings.raw("torch_dtype") in ("float16", "float32")  # quant_args.py QuantizeArguments.__post_init__
    computed = settings.text("bnb_4bit_compute_dtype", "float32" if wide else "")
    if not bits:
        return
    if method != "bnb" or bits not in (4, 8):
        settings.notes.unsupported.append(
            f"quant_method={method} with {bits} bits is not modelled; bitsandbytes' 4 bits are assumed.",
            "quant_method",
            "more",
        )
    if bits == 8 and method == "bnb":
        training["quantization_config"] = {"load_in_8bit": True}
        return
    quantised = {"load_in_4bit": True, "bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": computed}
    quantised["bnb_4bit_quant_storage"] = settings.one_of("bnb_4bit_quant_storage", STORAGES[0], STORAGES)
    training["quantization_config"] = quantised
    if kind != "nf4":
        settings.notes.unsupported.append(
            "bnb_4bit_quant_type=fp4 is not modelled; nf4 is assumed, of the same size.", "bnb_4bit_quant_type"
        )


def _refuse_bits(settings: Settings) -> None:
    for key in ("quant_bits", "quantization_bit"):
        if settings.raw(key):
            raise settings.refuse(key, "needs adapters; add train_type lora")
    settings.given("bnb_4bit_compute_dtype")
    for key in ("quant_method", "quantization_method", "bnb_4bit_use_double_quant", "bnb_4bit_quant_type"):
        settings.given(key)


def _generation(settings: Settings) -> dict[str, Any]:
    """GRPO's settings under trl's names. ms-swift's max_length is the length of the prompt, and its default of beta is
    0.04."""
    names = (
        "max_completion_length", "num_generations", "use_vllm", "vllm_mode", "vllm_tensor_parallel_size",
        "vllm_max_model_len",
    )  # fmt: skip
    given = {name: settings.raw(name) for name in names if settings.raw(name) is not None}
    share = settings.number("vllm_gpu_memory_utilization", settings.number("gpu_memory_utilization", 0.9))
    sleeps = bool(settings.integer("sleep_level", 0, least=0))
    return given | {
        "max_prompt_length": settings.integer("max_length") or 512,
        "beta": settings.number("beta", 0.04),
        "vllm_gpu_memory_utilization": share,
        "vllm_enable_sleep_mode": sleeps,
    }


def _task(settings: Settings, training: dict[str, Any]) -> None:
    """Put into `training` the class of a network that makes no logits of the vocabulary, and the sequences of a sample."""
    task = settings.text("task_type", "causal_lm")
    if task in HEADLESS:
        training["model_class"] = HEADLESS[task]
    elif task != "causal_lm":
        settings.notes.unsupported.append(f"task_type={task} is not modelled; causal_lm is.", "task_type", "less")
    if task in ("embedding", "reranker", "generative_reranker") and not settings.switch("packing"):
        training["per_device_train_batch_size"] = 2 * int(training["per_device_train_batch_size"])
        settings.notes.assumptions.append(
            f"a sample of task_type={task} is treated as two sequences, such as a query with a document: micro_batch_size "
            f"is {training['per_device_train_batch_size']}; each further document is one more."
        )


def _say_logits(settings: Settings, method: str) -> None:
    makes_logits = settings.text("task_type", "causal_lm") not in HEADLESS
    if makes_logits and method in ("sft", "pt") and settings.raw("use_logits_to_keep") is None:
        settings.notes.warnings.append(
            "ms-swift computes logits of the tokens with labels alone where it can (use_logits_to_keep); those of all "
            "tokens "
            "are counted.",
            "use_logits_to_keep",
            "less",
        )
