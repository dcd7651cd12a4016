"""LMFlow's launch commands: `examples/finetune.py`, `reward_modeling.py` and `dpo_train.py`, which run transformers'
Trainer and TRL's DPOTrainer with LMFlow's own arguments of the model.

Source: OptimalScale/LMFlow at commit 003f9e8c: src/lmflow/args.py (ModelArguments, DatasetArguments, FinetunerArguments,
DPOAlignerArguments), models/hf_model_mixin.py, pipeline/finetuner.py; pipeline/dpo_aligner.py at 34f33fcd.
"""

from __future__ import annotations

import re
from typing import Any

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import (
    Notes,
    Settings,
    Translation,
    note_unsupported,
    note_widened_ends,
    renamed,
    speller,
)
from peakcast.dialects.huggingface.accelerate import launcher_with_engine
from peakcast.dialects.huggingface.evaluation import EVALUATION
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.keys import IGNORED_TRAINING
from peakcast.dialects.huggingface.post_training import with_method

METHODS = {"finetune": "sft", "reward_modeling": "rm", "dpo_train": "dpo"}
"""A program of LMFlow -> its training method."""
DPO = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "gradient_checkpointing": True,
    "optim": "paged_adamw_32bit", "max_length": 1024, "bf16": True,
}  # fmt: skip
"""Defaults of `dpo_train.py` (DPOAlignerArguments; bfloat16 is fixed in dpo_aligner.py)."""
ADAPTER = {"lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_dora": "use_dora"}
TRAINING = {
    key: key
    for key in (
        "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "optim", "optim_args",
        "gradient_checkpointing_kwargs", "bf16", "fp16", "torch_compile", "fsdp", "fsdp_config", "use_liger_kernel",
        "neftune_noise_alpha", "ddp_bucket_cap_mb", "auto_find_batch_size", "label_smoothing_factor", *EVALUATION,
    )
}  # fmt: skip
"""LMFlow's key -> the key of transformers' training arguments."""
UNSUPPORTED = {
    "use_customized_optim": "LMFlow's own optimizer",
    "do_rope_scaling": "LMFlow's own rotary embedding",
    "lora_model_path": "an adapter that is loaded, whose rank is not read",
}
IGNORED = re.compile(
    r"dataset_.*|conversation_template|train_on_prompt|validation_.*|eval_.*|max_(train|eval)_samples|streaming|train_file"
    r"|overwrite_cache|preprocessing_num_workers|group_texts_batch_size|keep_linebreaks|test_file|is_custom_dataset"
    r"|customized_.*|save_aggregated_lora|lisa_.*|optim_\w*beta\d|optim_(momentum|weight_decay)|rope_.*|model_revision"
    r"|tokenizer_name|use_fast_tokenizer|cache_dir|truncat.*|padding_side|eos_padding|ignore_bias_buffers|trust_remote_code"
    r"|use_ram_optimized_load|use_int8|load_in_4bit|finetune_part|save_language_projection|arch_type|sanity_check"
    r"|max_prompt_length|beta|run_name|log_freq"
)


def from_lmflow(pasted: Pasted) -> Translation:
    """The job of such a command. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "LMFlow")
    model = settings.model(pasted.model, "model_name_or_path")
    method = _method(settings, pasted)
    settings.one_of("arch_type", "decoder_only", ("decoder_only", "text_regression"))
    quantised = settings.switch("use_qlora")
    adapters = any([settings.switch("use_lora"), settings.switch("use_dora"), quantised])
    training = _training(settings, quantised=quantised, packs=method == "sft")
    if method == "dpo":
        _follow_dpo(settings, training)
    else:
        training["max_length"] = settings.size("block_size", 1024, assume=True)
    launcher = launcher_with_engine(pasted, settings)
    if "optim" not in training and "optimizer" not in (launcher.deepspeed or {}):
        training["optim"] = "adamw_torch"
        notes.assumptions.append("optim is not given; the default of transformers 4, which LMFlow needs, is adamw_torch.")
    if isinstance(training.get("fsdp_config"), str):
        training["fsdp_config"] = pasted.file(training["fsdp_config"], "fsdp", "fsdp_config")
    translation = from_huggingface(
        model,
        training,
        _adapter(settings) if adapters else None,
        launcher.deepspeed,
        launcher.fsdp,
        launcher.gpus(pasted, notes),
        versions=pasted.versions.of("huggingface"),
        spell=speller(TRAINING | {"block_size": "max_length"}, {"lora_r": "r", "lora_target_modules": "target_modules"}),
    )
    job = notes.include(translation)
    whole = "TRL before 1.15, with which LMFlow's DPOAligner runs," if method == "dpo" else ""
    job = with_method(job, method, "the program", notes, whole_logits=whole, log_softmax=True)
    note_unsupported(settings, UNSUPPORTED)
    if settings.switch("use_lisa"):
        sentence = "LISA (use_lisa) trains a few layers at a time, which is not modelled; full training is assumed."
        notes.unsupported.append(sentence, "use_lisa", "less")
    settings.note_left(IGNORED, IGNORED_TRAINING)
    return notes.finish(job)


def _method(settings: Settings, pasted: Pasted) -> str:
    """The training method, by the program. Raises: SpecError for a program that does more than one kind of step."""
    name = pasted.program.rsplit("/", 1)[-1].removesuffix(".py") or "finetune"
    if name not in METHODS:
        raise settings.refuse("program", f"of LMFlow is not read here; {', '.join(METHODS)} are", f"{name}.py")
    return METHODS[name]


def _follow_dpo(settings: Settings, training: dict[str, Any]) -> None:
    """Put into `training` the settings that `dpo_train.py` fixes itself, whatever FinetunerArguments say."""
    for key, value in DPO.items():
        given = settings.raw("optimizer_type" if key == "optim" else key)
        training[key] = value if given is None else given
    settings.notes.assumptions.append("settings that are not given have the defaults of LMFlow's DPOAligner: " + ", ".join(
        f"{key} {value}" for key, value in DPO.items() if settings.raw(key) is None
    ) + ".")  # fmt: skip


def _adapter(settings: Settings) -> dict[str, Any]:
    """peft's LoraConfig (`__prepare_peft_config`); without targets, peft's own for the network."""
    adapter = renamed(settings, ADAPTER)
    adapter["r"] = settings.size("lora_r", 8, assume=True)
    adapter.setdefault("lora_dropout", 0.1)
    if targets := settings.words("lora_target_modules"):
        adapter["target_modules"] = list(targets)
    return adapter


def _training(settings: Settings, *, quantised: bool, packs: bool) -> dict[str, Any]:
    """The step in the words of transformers' training arguments, without its length."""
    training = renamed(settings, TRAINING)
    training["packing"] = not settings.switch("disable_group_texts", True) and packs
    training["torch_dtype"] = settings.text("torch_dtype", "float16" if quantised else "float32")
    if not settings.given("torch_dtype"):
        settings.notes.assumptions.append(f"torch_dtype is not given; LMFlow loads weights in {training['torch_dtype']}.")
    training.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": True})  # the default of transformers 4
    if settings.switch("use_flash_attention"):
        training["attn_implementation"] = "flash_attention_2"
    if quantised:
        bits = settings.integer("bits", 4)
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": settings.one_of("quant_type", "nf4", ("nf4", "fp4"))}
        four["bnb_4bit_use_double_quant"] = settings.switch("double_quant", True)
        training["quantization_config"] = {"load_in_8bit": True} if bits == 8 else four
        training |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
        settings.notes.assumptions.append("LMFlow prepares quantised weights by peft, which checkpoints every layer.")
        note_widened_ends(settings.notes)
    return training
