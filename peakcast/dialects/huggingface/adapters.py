"""Reads peft's configurations (`adapter_config.json`, LoraConfig and the like) as the adapters of a job.

Sources: peft 0.21 config.py, tuners/*/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from peakcast.core.fields import FrozenMapping
from peakcast.core.findings import Direction
from peakcast.dialects.common.translation import Notes, Settings
from peakcast.jobs.adapter_settings import ADAPTER_SETTINGS, RANKED, FinetuningMethod
from peakcast.jobs.spec import Dtype, Finetuning

UNSUPPORTED: Mapping[str, str] = {
    "layer_replication": "replicated layers",
    "layers_to_transform": "adapters on some layers only",
    "lora_bias": "adapters with biases",
    "rank_pattern": "adapter ranks that differ between modules",
    "target_parameters": "adapters on bare parameters",
    "trainable_token_indices": "trained token embeddings in addition to the adapters",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
    "exclude_modules": "modules left without adapters",
}
"""Keys of any method for features that no job can express."""
FEWER = ("exclude_modules", "layers_to_transform")
"""Those of `UNSUPPORTED` with which some layers get no adapter."""
RANK_KEYS = {"adalora": "init_r"}
"""Method -> its name for the initial rank, if that is not `r`."""
MICA = "mica"
"""A value of `init_lora_weights` with which only lora_A is trained."""


def adapter_of(
    adapter: Settings,
    kind: Literal["nf4", "gptq", "int8"] | None,
    dtype: Dtype | None,
    quantization: Mapping[str, Any],
    notes: Notes,
) -> Finetuning:
    """The adapters that `adapter` asks for, on weights quantised as `kind`. `dtype`: the adapters', None for peft's
    default.

    Raises: SpecError naming the key, its value and the rule.
    """
    named = adapter.text("peft_type", "LORA").rpartition(".")[2]
    method = _method(named.lower(), adapter, notes)
    if adapter.text("bias", "none") != "none":
        notes.unsupported.append(
            f"Trained biases (bias={adapter.text('bias')}) in addition to the adapters are not modelled.", "bias", "more"
        )
    for key, what in UNSUPPORTED.items():
        if adapter.raw(key) not in (None, False, [], {}, ()):
            direction: Direction = "less" if key in FEWER else "more"
            name = adapter.spell(key)
            notes.unsupported.append(f"{what[0].upper()}{what[1:]} ({name}) is not modelled.", name, direction)
    alpha = adapter.number("lora_alpha", adapter.number("alpha", 8))
    return Finetuning(
        method="qlora" if kind and method == "lora" else method,
        rank=_rank(method, adapter),
        alpha=None if alpha is None or method not in RANKED else float(alpha),
        targets=_targets(method, adapter, notes),
        dropout=float(adapter.number("lora_dropout", 0.0) or 0.0),
        adapter_dtype=dtype,
        quantization=kind,
        double_quantization=kind == "nf4" and bool(quantization.get("bnb_4bit_use_double_quant", False)),
        settings=_settings(method, adapter),
        modules_to_save=adapter.words("modules_to_save"),
    )


def _method(named: str, adapter: Settings, notes: Notes) -> FinetuningMethod:
    dora = adapter.switch("use_dora")
    if named == "lora" and adapter.raw("init_lora_weights") == MICA:
        sentence = "MiCA (init_lora_weights='mica') trains lora_A alone; LoRA is assumed instead."
        notes.unsupported.append(sentence, "init_lora_weights", "less")
    if named == "lora" and dora:
        return "dora"
    for method in get_args(FinetuningMethod):
        if named == method and method not in ("full", "qlora", "lora_fa"):
            chosen: FinetuningMethod = method
            return chosen
    notes.unsupported.append(f"peft_type={named.upper()} is not modelled; LoRA is assumed instead.", "peft_type")
    return "lora"


def _rank(method: FinetuningMethod, adapter: Settings) -> int | None:
    if method not in RANKED:
        return None
    key = RANK_KEYS.get(method, "r")
    if RANKED[method] == 0 and not adapter.raw(key):
        return None
    return adapter.size(key, RANKED[method], assume=True)


def _settings(method: FinetuningMethod, adapter: Settings) -> FrozenMapping:
    """The settings of the method's table that the configuration contains."""
    known = ADAPTER_SETTINGS.get(method, {})
    given = {key: adapter.raw(key) for key in known if adapter.raw(key) is not None}
    if method == "trainable_tokens":
        given = {"num_tokens": len(adapter.raw("token_indices") or ())}
    return FrozenMapping({key: value for key, value in given.items() if value != known[key]})


def _targets(method: FinetuningMethod, adapter: Settings, notes: Notes) -> tuple[str, ...]:
    targets = adapter.words("target_modules")
    if any(character in target for target in targets for character in "*|.$^\\"):
        pattern = adapter.text("target_modules")
        notes.unsupported.append(f"target_modules={pattern!r} is a pattern; the usual targets are used.", "target_modules")
        targets = ()
    if not targets and not method.endswith("tuning"):
        notes.assumptions.append("target_modules is not given; peft's usual targets of the family are assumed.")
    return targets
