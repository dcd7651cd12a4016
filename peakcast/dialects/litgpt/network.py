"""LitGPT's networks, given by a name, by the folder of a checkpoint, or by the fields of its `Config`.

Source: litgpt 0.5.13 config.py (Config and its defaults), pretrain.py (`model_config` replaces `model_name`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.units import round_up
from peakcast.dialects.common.job_file import resolve_architecture
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Settings
from peakcast.jobs.architecture import Architecture

SECTIONS = ("model_config", "model")
"""Names of the network's section; the second is from configurations of 2024."""
DEFAULTS: dict[str, Any] = {
    "block_size": 4096, "n_layer": 16, "n_embd": 4096, "vocab_size": 50254, "padding_multiple": 512, "n_head": 32,
    "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "parallel_residual": True, "bias": True,
    "n_expert": 0, "n_expert_per_token": 0,
}  # fmt: skip
DEMANDS = {
    "llama": {"norm_class_name": "RMSNorm", "parallel_residual": False, "bias": False},
    "gpt_neox": {"norm_class_name": "LayerNorm", "parallel_residual": True, "bias": True, "n_query_groups": None},
}
"""Values of `Config` that a family requires, because its config.json cannot express others; None: as many as heads."""
FAMILIES = {"LLaMAMLP": "llama", "LLaMAMoE": "llama", "GptNeoxMLP": "gpt_neox"}


def litgpt_network(settings: Settings, pasted: Pasted) -> Architecture:
    """The network of the configuration. Embedding and lm_head are two tables unless `train.tie_embeddings` ties them, even
    if the checkpoint has one: LitGPT then copies it for the lm_head (litgpt 0.4.0, 0.5.13 scripts/convert_hf_checkpoint.py,
    model.py GPT). Raises: SpecError."""
    sections = [name for name in SECTIONS if isinstance(pasted.values.get(name), Mapping) and pasted.values[name]]
    for name in sections:
        settings.notes.ignored += [key for key in settings.left() if key.startswith(f"{name}.") and settings.given(key)]
    folder, name = settings.text("checkpoint_dir"), settings.text("model_name")
    if pasted.model is not None:
        network = resolve_architecture(pasted.model)
    elif sections:
        network = resolve_architecture(_config(pasted.values[sections[0]], sections[0]))
    elif not name and not folder:
        raise settings.refuse("checkpoint_dir", "or model_name is required: it says which model is trained", None)
    else:
        network = resolve_architecture(name or "/".join(PurePath(folder).parts[-2:]))  # checkpoints/<owner>/<name>
    return replace(network, tie_word_embeddings=settings.switch("train.tie_embeddings"))


def _config(given: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The fields of `Config` as a config.json. Raises: SpecError for a network that is neither like Llama nor like NeoX."""
    config = DEFAULTS | {key: value for key, value in given.items() if value is not None}
    family = FAMILIES.get(config["mlp_class_name"])
    heads = config.get("n_query_groups", config["n_head"])
    demands = DEMANDS.get(family or "", {})
    other = [key for key, value in demands.items() if value is not None and config[key] != value]
    if family is None or other or (family == "gpt_neox" and heads != config["n_head"]):
        what = other[0] if other else "mlp_class_name" if family is None else "n_query_groups"
        raise SpecError(
            f"{section}.{what}={config.get(what)!r} makes a network that is neither Llama's nor GPT-NeoX's, which are read "
            "here; give its config.json by --model.",
            parameter=f"{section}.{what}",
            value=config.get(what),
        )
    width = config["n_embd"]
    found = {
        "name": config.get("name") or "litgpt-model",
        "model_type": family,
        "hidden_size": width,
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "num_key_value_heads": heads,
        "intermediate_size": config.get("intermediate_size") or 4 * width,
        "vocab_size": config.get("padded_vocab_size") or round_up(config["vocab_size"], config["padding_multiple"]),
        "max_position_embeddings": config["block_size"],
        "tie_word_embeddings": False,
        **({"head_dim": config["head_size"]} if config.get("head_size") else {}),
    }
    if config["n_expert"]:
        experts = {"num_local_experts": config["n_expert"], "num_experts_per_tok": config["n_expert_per_token"]}
        found |= {"model_type": "mixtral", **experts}
        found["intermediate_size"] = config.get("moe_intermediate_size") or found["intermediate_size"]
    return found
