"""Checks values that a DeepSpeed configuration and TrainingArguments both contain and that must agree; reads DeepSpeed's
own optimizer.

Source: transformers 5.17 integrations/deepspeed.py, HfTrainerDeepSpeedConfig.trainer_config_process and
deepspeed_optim_sched; DeepSpeed 0.19 runtime/engine.py `_configure_basic_optimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.dialects.common.translation import Notes, Settings, note_inner, states_direction
from peakcast.dialects.huggingface.keys import ENGINE_OPTIMIZER
from peakcast.jobs.spec import Optimizer, OptimizerName

OPTIMIZERS: dict[str, OptimizerName] = {
    "adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw", "torch_adam": "adamw",
    "lion": "lion", "fusedlion": "lion", "sgd": "sgd", "muon": "muon",
}  # fmt: skip
_AGREE = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def check_agreement(engine: Settings, training: Settings, num_gpus: int) -> None:
    """Refuse a DeepSpeed value that contradicts TrainingArguments, as transformers does ("auto" agrees with everything)."""
    for key in ("bf16", "fp16"):
        block = engine.raw(key)
        if (
            isinstance(block, Mapping)
            and block.get("enabled") == "auto"
            and not (training.given("bf16") or training.given("fp16"))
        ):
            training.notes.assumptions.append(
                f"{key}.enabled='auto' follows TrainingArguments, where {key} is not given: off."
            )
    sizes: dict[str, Any] = {}
    for key, name in _AGREE.items():
        sizes[key] = training.integer(name) if training.given(name) else engine.integer(key) if engine.given(key) else None
        if engine.given(key) and training.given(name) and engine.integer(key) != training.integer(name):
            raise _mismatch(engine, key, f"{training.spell(name)}={training.raw(name)!r}")
    micro, steps = sizes["train_micro_batch_size_per_gpu"], sizes["gradient_accumulation_steps"]
    total = engine.integer("train_batch_size")
    if total is not None and micro and steps and total != num_gpus * micro * steps:
        raise _mismatch(
            engine,
            "train_batch_size",
            f"{num_gpus} GPUs × {micro} per GPU × {steps} accumulation steps = {num_gpus * micro * steps}",
        )


def engine_optimizer(engine: Settings | None, notes: Notes) -> Optimizer | None:
    """The optimizer that the DeepSpeed configuration names; None if it names none, and TrainingArguments' is used."""
    given = engine.raw("optimizer") if engine is not None else None
    if engine is None or given is None:
        return None
    kind = str(given.get("type", "")).lower() if isinstance(given, Mapping) else ""
    if not kind:
        raise engine.refuse("optimizer", 'must be a mapping with a type, such as {"type": "AdamW"}')
    if kind not in OPTIMIZERS:
        notes.unsupported.append(
            f"DeepSpeed's optimizer {given['type']} is not modelled; AdamW is assumed instead.",
            "optimizer.type",
            states_direction(str(given["type"])),
        )
    params = given.get("params") if isinstance(given, Mapping) else None
    momentum = params.get("momentum", 0.0) if isinstance(params, Mapping) else 0.0
    name = OPTIMIZERS.get(kind, "adamw")
    if name == "sgd" and isinstance(momentum, (int, float)):
        return Optimizer(name=name, implementation="fused", momentum=float(momentum))
    return Optimizer(name=name, implementation="fused")


def note_engine_optimizer(engine: Settings) -> None:
    """Note the settings of the DeepSpeed configuration's optimizer that are not read."""
    note_inner(engine, "optimizer", ("type", "params"), ("legacy_fusion",))
    optimizer = engine.raw("optimizer")
    if isinstance(optimizer, Mapping):
        inside = Settings(optimizer, engine.notes, "DeepSpeed", lambda key: f"optimizer.{key}")
        note_inner(inside, "params", ("momentum",), ENGINE_OPTIMIZER)


def _mismatch(engine: Settings, key: str, other: str) -> SpecError:
    return SpecError(
        f'DeepSpeed\'s {key}={engine.raw(key)!r} contradicts {other}; make them equal, or write "auto" there.',
        parameter=key,
        value=engine.raw(key),
    )
