"""What peft gives an adapter in each family when `finetuning.targets` names nothing."""

from __future__ import annotations

from functools import lru_cache

from peakcast.architecture import Architecture
from peakcast.models.analytical.parameters import leaf_names

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
"""`model_type` -> the last parts of the names of its projections. Of any other family peft asks for `target_modules` and
raises an error. Source: peft 0.21 `utils/constants.py` TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING."""


STACK_NAMES: dict[str, tuple[str, ...]] = {
    "lora_query": ("q",), "lora_key": ("k",), "lora_value": ("v",), "lora_projection": ("out",),
    "lora_mlp": ("gate", "up", "down"), "lora_head": ("lm_head",), "output_proj": ("out",),
}  # fmt: skip
"""What stacks with networks of their own call what they adapt, by the fields of `LeafNames`. Source: litgpt 0.5
finetune/lora.py, torchtune 0.6 modules/peft/_utils.py LORA_ATTN_MODULES."""


@lru_cache(maxsize=512)
def resolved_targets(targets: tuple[str, ...], architecture: Architecture) -> frozenset[str]:
    """`targets` with the names that this family's projections have in place of those of another stack; a part of a fused
    projection stands for all of it."""
    leaves, found = leaf_names(architecture), set[str]()
    joined = dict.fromkeys("qkv", "qkv") if architecture.fused_qkv else {}
    joined |= dict.fromkeys(("gate", "up"), "gate_up") if architecture.fused_gate_up else {}
    for target in targets:
        found.update(getattr(leaves, joined.get(part, part), part) for part in STACK_NAMES.get(target, ()))
        found.update(() if target in STACK_NAMES else (target,))
    return frozenset(found)


OTHER_DEFAULTS: dict[str, tuple[str, ...]] = {
    "beft": ("v_proj",),
    "ia3": ("k_proj", "v_proj", "down_proj"),
}
"""Of methods whose defaults are others, in the families that have Llama's names. Source: each method's mapping there."""


def has_default_targets(architecture: Architecture) -> bool:
    """Whether peft knows what to adapt in this family."""
    return architecture.model_type in DEFAULT_TARGETS


def default_adapter_targets(architecture: Architecture, method: str = "lora") -> tuple[str, ...]:
    """The last parts of the names of the projections that get an adapter when none are named; where peft knows none, q and
    v, or the fused qkv."""
    if method in OTHER_DEFAULTS and DEFAULT_TARGETS.get(architecture.model_type) == _QUERY_AND_VALUE:
        return OTHER_DEFAULTS[method]
    usual = (leaf_names(architecture).qkv,) if architecture.fused_qkv else _QUERY_AND_VALUE
    return DEFAULT_TARGETS.get(architecture.model_type, usual)
