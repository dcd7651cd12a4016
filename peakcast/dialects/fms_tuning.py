"""Commands of fms-hf-tuning, `tuning/sft_trainer.py`: supervised fine-tuning with transformers' Trainer, and
fms-acceleration's kernels and quantised weights by switches that take several values (`--fused_lora auto_gptq True`).

Source: foundation-model-stack/fms-hf-tuning (its page on tuning techniques), tuning/config/configs.py (ModelArguments,
TrainingArguments), peft_config.py, acceleration_configs/*.py; fms-acceleration framework_plugin_bnb.py (double
quantization, computed in torch_dtype).
"""

from __future__ import annotations

import re
from typing import Any

from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, note_unsupported, renamed, speller
from peakcast.dialects.huggingface.accelerate import launcher_with_engine
from peakcast.dialects.huggingface.evaluation import EVALUATION
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.keys import IGNORED_TRAINING
from peakcast.dialects.huggingface.quantization import AS_PARAMETERS
from peakcast.jobs.spec import TrainingJob

TRAINING = {
    key: key
    for key in (
        "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "optim", "optim_args",
        "gradient_checkpointing_kwargs", "bf16", "fp16", "packing", "torch_compile", "use_liger_kernel",
        "neftune_noise_alpha", "ddp_bucket_cap_mb", "label_smoothing_factor", "max_seq_length", "fsdp", "fsdp_config",
        *EVALUATION,
    )
}  # fmt: skip
ADAPTER = {"r": 8, "lora_alpha": 32, "lora_dropout": 0.05}
"""Keys of an adapter and their defaults (peft_config.py LoraConfig)."""
UNSUPPORTED = {"fast_moe": "ScatterMoE's kernels for experts"}
IGNORED = re.compile(
    r"tokenizer_name_or_path|(training|validation|data_config)_(data_)?path|dataset_\w+|data_formatter_template|chat_template"
    r"|response_template|instruction_template|add_special_tokens|save_model_dir|tracker\w*|aim_\w+|trainer_controller_\w+"
    r"|multipack|embedding_size_multiple_of|bias|invocation_string|exp_metadata|log_level|cache_dir|max_prompt_length"
)


def from_fms_tuning(pasted: Pasted) -> Translation:
    """The job of such a command. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "fms-hf-tuning")
    model = settings.model(pasted.model, "model_name_or_path")
    training = _training(settings)
    if quantization := _quantization(settings):
        training["quantization_config"] = quantization
    launcher = launcher_with_engine(pasted, settings)
    translation = from_huggingface(
        model,
        training,
        _adapter(settings),
        launcher.deepspeed,
        launcher.fsdp,
        launcher.gpus(pasted, notes),
        versions=pasted.versions.of("huggingface"),
        spell=speller({"use_flash_attn": "attn_implementation"}, {}),
    )
    job = _with_kernels(notes.include(translation), settings)
    note_unsupported(settings, UNSUPPORTED)
    settings.note_left(IGNORED, IGNORED_TRAINING)
    return notes.finish(job)


def _training(settings: Settings) -> dict[str, Any]:
    """The step in the words of transformers' training arguments."""
    training = renamed(settings, TRAINING)
    training["torch_dtype"] = settings.text("torch_dtype", "bfloat16")
    if settings.switch("use_flash_attn", True):
        training["attn_implementation"] = "flash_attention_2"
    if "max_seq_length" not in training:
        training["max_seq_length"] = 4096
        settings.notes.assumptions.append("max_seq_length is not given; the default of fms-hf-tuning is 4096.")
    if "optim" not in training:
        training["optim"] = "adamw_torch"
        settings.notes.assumptions.append("optim is not given; the default of fms-hf-tuning is adamw_torch.")
    if settings.words("padding_free"):
        training["padding_free"] = True
    return training


def _quantization(settings: Settings) -> dict[str, Any]:
    """How the weights are quantised: `--auto_gptq triton_v2`, `--bnb_qlora nf4` (older: `--bitsandbytes nf4`)."""
    if settings.words("auto_gptq"):
        _first(settings, "auto_gptq", ("triton_v2",))
        return {"quant_method": "gptq", AS_PARAMETERS: True}  # fms-acceleration framework_plugin_autogptq.py
    key = "bnb_qlora" if settings.words("bnb_qlora") else "bitsandbytes"
    if not settings.words(key):
        return {}
    kind = _first(settings, key, ("nf4", "fp4"))
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": True}
    return {**four, "bnb_4bit_quant_storage": "bfloat16"}  # the dtype of the network


def _first(settings: Settings, key: str, known: tuple[str, ...]) -> str:
    """The first of the values of `key`. Raises: SpecError for one that is not `known`."""
    first = settings.words(key)[0]
    if first not in known:
        raise settings.refuse(key, f"must begin with {' or '.join(known)}", settings.raw(key))
    return first


def _adapter(settings: Settings) -> dict[str, Any] | None:
    """peft's LoraConfig; None for full training (`--peft_method None`)."""
    method = settings.text("peft_method", "none").lower()
    if method in ("none", "fft", ""):
        return None
    adapter: dict[str, Any] = {"peft_type": "PROMPT_TUNING"} if method == "pt" else {}
    if method == "pt":
        adapter["num_virtual_tokens"] = settings.size("num_virtual_tokens", 8, assume=True)
        return adapter
    settings.one_of("peft_method", "lora", ("lora", "alora"))
    for key, default in ADAPTER.items():
        value = settings.number(key, None)
        adapter[key] = default if value is None else value
    adapter["r"] = settings.size("r", 8, assume=True)
    if targets := settings.words("target_modules"):
        adapter["target_modules"] = list(targets)
    if saved := settings.words("modules_to_save"):
        adapter["modules_to_save"] = list(saved)
    return adapter


def _with_kernels(job: TrainingJob, settings: Settings) -> TrainingJob:
    """`job` with the kernels of fms-acceleration that the command asks for: those of loss, norms and rotary embedding,
    which come together, and those of adapters on quantised weights."""
    fast = [word.lower() in ("true", "1") for word in settings.words("fast_kernels")]
    fused = bool(settings.words("fused_lora"))
    if fused:
        _first(settings, "fused_lora", ("auto_gptq", "bitsandbytes"))
    if not any(fast):
        return job
    options: dict[str, Any] = {**job.framework_options, "fused_kernels": True}
    if job.finetuning.quantization and not fused:
        options["lora_kernel"] = "eager"
    return job.replace(framework_options=FrozenMapping(options))
