"""Scripts that train a network of transformers with DeepSpeed's engine and without the Trainer, like DeepSpeed's own
examples.

Source: deepspeedai/DeepSpeedExamples training/DeepSpeed-SuperOffload, finetune_*.sh for finetune_zero3.py. Layout,
precision and offloading are those of the file that deepspeed_config names.
"""

from __future__ import annotations

import re
from typing import Any

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, speller
from peakcast.dialects.huggingface.job import from_huggingface

TRAINING = {"max_length": "max_length", "attn_implementation": "attn_implementation"}
IGNORED = re.compile(
    r"num_train_epochs|lr|weight_decay|output_dir|seed|log_interval|dataset_(name|percentage)|bench_steps|warmup(_steps)?"
    r"|use_wandb|wandb_.*|deterministic|save_checkpoint|local_rank|gradient_clipping"
)


def from_deepspeed_script(pasted: Pasted) -> Translation:
    """The job of a script that trains with DeepSpeed's engine. Raises: SpecError naming the key, its value, the rule and
    the way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "the script")
    engine = pasted.file(settings.raw("deepspeed_config"), "deepspeed", "deepspeed_config")
    num_gpus = pasted.gpus(notes)
    training: dict[str, Any] = {key: settings.raw(key) for key in TRAINING if settings.given(key)}
    training["per_device_train_batch_size"] = _micro_batch_size(settings, engine, num_gpus)
    training["gradient_checkpointing"] = settings.switch("activation_checkpointing")
    if settings.switch("use_liger") or settings.switch("use_liger_kernel"):
        training["use_liger_kernel"] = True
    if "packing" in pasted.values:
        training["packing"] = settings.switch("packing")
    model = pasted.model or settings.text("model_name")
    settings.given("model_name")
    settings.note_left(IGNORED)
    translation = from_huggingface(
        model,
        training,
        None,
        engine,
        None,
        num_gpus,
        versions=pasted.versions.of("huggingface"),
        spell=speller({"batch_size": "per_device_train_batch_size", "activation_checkpointing": "gradient_checkpointing"}),
    )
    return notes.finish(notes.include(translation))


def _micro_batch_size(settings: Settings, engine: Any, num_gpus: int) -> int:
    """Sequences per rank and forward: computed from train_batch_size as in DeepSpeed (runtime/config.py
    `_set_batch_related_parameters`), else the script's batch_size."""
    size = settings.size("batch_size")
    total, steps = engine.get("train_batch_size"), engine.get("gradient_accumulation_steps", 1)
    given = str(engine.get("train_micro_batch_size_per_gpu", ""))
    if given.isdecimal() and len(given) < 7 and int(given):
        return int(given)
    if not (isinstance(total, int) and isinstance(steps, int) and steps > 0 and total > 0) or total % (num_gpus * steps):
        return size
    micro = total // (num_gpus * steps)
    if micro != size:
        settings.notes.assumptions.append(
            f"micro_batch_size is train_batch_size={total} / ({num_gpus} GPUs × {steps} accumulation steps) = {micro}, "
            f"as DeepSpeed computes it; batch_size={size} of the script is ignored."
        )
    return micro
