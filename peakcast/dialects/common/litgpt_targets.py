"""Translates LitGPT's switches for adapters into names of projections. LitGPT has one matrix for queries, keys and values
in every family.

Source: litgpt 0.5.13 lora.py LoRAQKVLinear (`enable_lora`: a part for each of query, key and value), finetune/lora.py
(`lora_query`, ..., `lora_head`).
"""

from __future__ import annotations

from collections.abc import Iterable

from peakcast.jobs.architecture import Architecture

PROJECTIONS = {
    "lora_query": ("q_proj",), "lora_key": ("k_proj",), "lora_value": ("v_proj",), "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"), "lora_head": ("lm_head",),
}  # fmt: skip
"""LitGPT's switch -> the projections, by Llama's names."""
_NEOX = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "query_key_value"), "o_proj": "dense", "gate_proj": "",
    "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h",
}  # fmt: skip
OTHER_NAMES: dict[str, dict[str, str]] = {
    "gpt_neox": _NEOX,
    "falcon": _NEOX,
    "phi": {"o_proj": "dense", "gate_proj": "", "up_proj": "fc1", "down_proj": "fc2"},
    "phi3": {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    },
}  # fmt: skip
"""Families whose projections have other names in transformers -> Llama's name -> theirs; "" if they do not have it."""


OF_QKV = {"lora_query": "q", "lora_key": "k", "lora_value": "v"}
"""LitGPT's switch -> the letter of the part of a joined query, key and value matrix that gets an adapter. In transformers
such a matrix gets one adapter as a whole."""


def adapted_of_qkv(names: Iterable[str], network: Architecture) -> str:
    """Which of queries, keys and values `names` adapt, as letters; "" if the family has a matrix for each."""
    other = OTHER_NAMES.get(network.model_type, {})
    joined = other.get("q_proj") is not None and other.get("q_proj") == other.get("v_proj")
    chosen = set(names)
    return "".join(letter for name, letter in OF_QKV.items() if joined and name in chosen)


def litgpt_targets(names: Iterable[str], network: Architecture) -> tuple[str, ...]:
    """`names`, in which LitGPT's switches are replaced by the family's projections. If the family has one matrix for
    several of them, the whole matrix gets an adapter, which is a little more than LitGPT's parts of it. Other names are
    unchanged."""
    other_names = OTHER_NAMES.get(network.model_type, {})
    found: list[str] = []
    for name in names:
        projections = [other_names.get(projection, projection) for projection in PROJECTIONS.get(name, ())]
        found += projections or [name]
    return tuple(dict.fromkeys(name for name in found if name))
