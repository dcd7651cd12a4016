"""Which projections peft adapts in each family if `finetuning.targets` names none."""

from __future__ import annotations

from peakcast.jobs.architecture import Architecture
from peakcast.models.ledger.parameters.inventory import leaf_names

_QUERY_AND_VALUE = ("q_proj", "v_proj")
DEFAULT_TARGETS: dict[str, tuple[str, ...]] = {
    "bert": ("query", "value"),
    "bloom": ("query_key_value",),
    "codegen": ("qkv_proj",),
    "falcon": ("query_key_value",),
    "gemma": _QUERY_AND_VALUE,
    "gemma2": _QUERY_AND_VALUE,
    "gemma3_text": _QUERY_AND_VALUE,
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "gpt_neo": _QUERY_AND_VALUE,
    "gpt_neox": ("query_key_value",),
    "gptj": _QUERY_AND_VALUE,
    "llama": _QUERY_AND_VALUE,
    "mistral": _QUERY_AND_VALUE,
    "mixtral": _QUERY_AND_VALUE,
    "mpt": ("Wqkv",),
    "mt5": ("q", "v"),
    "opt": _QUERY_AND_VALUE,
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "qwen2": _QUERY_AND_VALUE,
    "qwen3": _QUERY_AND_VALUE,
    "roberta": ("query", "value"),
    "stablelm": _QUERY_AND_VALUE,
    "t5": ("q", "v"),
}
"""`model_type` -> the last parts of the projections' names. For any other family peft demands `target_modules` and raises
an error. Source: peft 0.21 `utils/constants.py` TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING."""


OTHER_DEFAULTS: dict[str, tuple[str, ...]] = {
    "beft": ("v_proj",),
    "ia3": ("k_proj", "v_proj", "down_proj"),
}
"""Method -> its defaults, where they differ, in the families that have Llama's names. Source: each method's mapping
there."""


def has_default_targets(architecture: Architecture) -> bool:
    """Whether peft has default targets for this family."""
    return architecture.model_type in DEFAULT_TARGETS


def default_adapter_targets(architecture: Architecture, method: str = "lora") -> tuple[str, ...]:
    """The last parts of the names of the projections that get an adapter if none are named; where peft has no default, q
    and v, or the fused qkv."""
    if method in OTHER_DEFAULTS and DEFAULT_TARGETS.get(architecture.model_type) == _QUERY_AND_VALUE:
        return OTHER_DEFAULTS[method]
    usual = (leaf_names(architecture).qkv,) if architecture.fused_qkv else _QUERY_AND_VALUE
    return DEFAULT_TARGETS.get(architecture.model_type, usual)
