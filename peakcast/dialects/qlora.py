"""Commands of QLoRA's own program, `qlora.py`: transformers' Seq2SeqTrainer with adapters on every quantised projection.

Source: artidoro/qlora qlora.py (00e5ad2a): DataArguments, TrainingArguments, get_accelerate_model, find_all_linear_names.
"""

from __future__ import annotations

import re
from typing import Any

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, renamed, speller
from peakcast.dialects.huggingface.accelerate import launcher_beside
from peakcast.dialects.huggingface.evaluation import EVALUATION
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.keys import IGNORED_TRAINING

TRAINING = {
    key: key
    for key in (
        "bf16", "fp16", "torch_compile", "ddp_bucket_cap_mb", "auto_find_batch_size", "label_smoothing_factor", *EVALUATION,
    )
}  # fmt: skip
"""Keys of transformers' training arguments with defaults of their own there."""
IGNORED = re.compile(
    r"dataset(_format)?|(eval|max_train|max_eval|max_mmlu)_\w*samples|eval_dataset_size|(do_)?mmlu_\w+|train_on_source|cache_dir"
    r"|max_memory_MB|trust_remote_code|use_auth_token|lora_modules|data_seed|use_cache|do_sample|num_beam\w*|penalty_alpha"
    r"|(max|min)_new_tokens|temperature|top_[kp]|typical_p|\w+_penalty|no_repeat_ngram_size|predict_with_generate|group_by_length"
)


def from_qlora(pasted: Pasted) -> Translation:
    """The job of such a command. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "QLoRA")
    model = settings.model(pasted.model, "model_name_or_path")
    bits = settings.integer("bits", 4, assume=True)
    if bits not in (4, 8, 16, 32):
        raise settings.refuse("bits", "must be 4, 8, 16 or 32")
    full = settings.switch("full_finetune")
    if full and bits < 16:
        raise settings.refuse("full_finetune", f"needs bits=16 or 32, and bits is {bits}")
    training = _training(settings, bits)
    launcher = launcher_beside(pasted, notes)
    translation = from_huggingface(
        model,
        training,
        None if full else _adapter(settings),
        launcher.deepspeed,
        launcher.fsdp,
        launcher.gpus(pasted, notes),
        versions=pasted.versions.of("huggingface"),
        spell=speller(TRAINING, {"lora_r": "r"}),
    )
    job = notes.include(translation)
    if not full:
        more = "norms" if bits < 16 else "norms, and at first every weight,"
        notes.unsupported.append(f"qlora.py widens {more} to float32, which is not modelled.", "bits", "more")
    settings.note_left(IGNORED, IGNORED_TRAINING)
    return notes.finish(job)


def _training(settings: Settings, bits: int) -> dict[str, Any]:
    """The step in the words of transformers' training arguments, with qlora.py's defaults."""
    training = renamed(settings, TRAINING)
    source, target = settings.size("source_max_len", 1024, assume=True), settings.size("target_max_len", 256, assume=True)
    training |= {
        "per_device_train_batch_size": settings.size("per_device_train_batch_size", 1, assume=True),
        "gradient_accumulation_steps": settings.size("gradient_accumulation_steps", 16, assume=True),
        "max_length": source + target,
        "gradient_checkpointing": settings.switch("gradient_checkpointing", True),
        "gradient_checkpointing_kwargs": {"use_reentrant": True},  # the default of transformers then
        "optim": settings.text("optim", "paged_adamw_32bit"),
        "torch_dtype": "bfloat16" if training.get("bf16") else "float32",
    }
    kind, double = settings.one_of("quant_type", "nf4", ("nf4", "fp4")), settings.switch("double_quant", True)
    if bits == 4:
        quantised = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
        training["quantization_config"] = quantised
    elif bits == 8:
        training["quantization_config"] = {"load_in_8bit": True}
    settings.notes.assumptions.append(f"a sample is source_max_len + target_max_len = {source + target} tokens long.")
    return training


def _adapter(settings: Settings) -> dict[str, Any]:
    """peft's settings: adapters on every projection, in bfloat16 with bf16."""
    return {
        "r": settings.size("lora_r", 64, assume=True),
        "lora_alpha": settings.number("lora_alpha", 16),
        "lora_dropout": settings.number("lora_dropout", 0.0),
        "target_modules": "all-linear",
        "autocast_adapter_dtype": False,
    }
