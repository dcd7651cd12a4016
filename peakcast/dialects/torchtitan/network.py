"""torchtitan's networks: a model and its flavor by name, or the network's values in a Python configuration.

Source: torchtitan 0.3.0 trainer.py `Trainer.Config.to_dict`, protocols/model_spec.py, models/common/attention.py, moe.py,
models/llama3, qwen3, deepseek_v3, gpt_oss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from peakcast.core.errors import SpecError
from peakcast.dialects.common.job_file import resolve_architecture
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Settings
from peakcast.jobs.architecture import Architecture

FLAVORS: dict[tuple[str, str], str] = {
    ("llama3", "8b"): "llama-3.1-8b", ("llama3", "70b"): "llama-3.1-70b", ("llama3", "405b"): "llama-3.1-405b",
    ("llama3", "1b"): "llama-3.2-1b", ("llama3", "3b"): "llama-3.2-3b",
    ("qwen3", "0.6b"): "qwen3-0.6b", ("qwen3", "1.7b"): "qwen3-1.7b", ("qwen3", "4b"): "qwen3-4b",
    ("qwen3", "8b"): "qwen3-8b", ("qwen3", "14b"): "qwen3-14b", ("qwen3", "32b"): "qwen3-32b",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b", ("qwen3", "235b-a22b"): "qwen3-235b-a22b",
    ("deepseek_v3", "16b"): "deepseek-v2-lite", ("deepseek_v3", "671b"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b", ("gpt_oss", "120b"): "gpt-oss-120b",
}  # fmt: skip
"""(torchtitan's model, flavor), in lower case -> the catalog's name."""
DESCRIBED = "model_spec.model"
AttentionName = Literal["eager", "sdpa", "flash_attention_2", "flex"]


def torchtitan_network(settings: Settings, pasted: Pasted) -> Architecture:
    """The network that the configuration names or describes. Raises: SpecError naming the flavors that are known."""
    name = settings.text("model.name", settings.text("model_spec.name", "llama3")).lower()
    flavor = settings.text("model.flavor", settings.text("model_spec.flavor", _named(pasted))).lower()
    assets = settings.text("hf_assets_path", settings.text("model.hf_assets_path"))
    settings.notes.ignored += [key for key in ("hf_assets_path", "model.hf_assets_path") if settings.given(key)]
    settings.notes.ignored += [key for key in settings.left() if key.startswith(f"{DESCRIBED}.") and settings.given(key)]
    if pasted.model is not None:
        return resolve_architecture(pasted.model)
    described = _config(described_model(pasted), name)
    if described is not None:
        settings.notes.assumptions.append(f"the network is read from {DESCRIBED}, not by the name of flavor {flavor!r}.")
        return resolve_architecture({"name": f"torchtitan-{name}-{flavor or 'model'}", **described})
    if (name, flavor) in FLAVORS:
        known = FLAVORS[name, flavor]
        settings.notes.assumptions.append(f"model {name} {flavor.upper()} of torchtitan is treated as {known}.")
        return resolve_architecture(known)
    if not flavor and assets:
        return resolve_architecture(PurePath(assets).name)
    names = ", ".join(sorted({f"{family} {size.upper()}" for family, size in FLAVORS}))
    raise SpecError(
        f"model.flavor={flavor!r} of model.name={name!r} has no known shape here; known: {names}. --model names another, "
        "or the config.json with its shape. A flavor for debugging is followed by its own command, without a GPU: "
        "peakcast dryrun -- torchrun ... -m torchtitan.train ...",
        parameter="model.flavor",
        value=flavor,
    )


def described_model(pasted: Pasted) -> Mapping[str, Any]:
    """The values of the network; empty if the configuration has none."""
    spec = pasted.values.get("model_spec")
    model = spec.get("model") if isinstance(spec, Mapping) else None
    return model if isinstance(model, Mapping) and isinstance(model.get("layers"), Sequence) and model["layers"] else {}


def described_attention(pasted: Pasted) -> AttentionName | None:
    """The kernel of the first layer's `inner_attention`, recognised by the keys of its configuration; None without it."""
    model = described_model(pasted)
    if not model:
        return None
    inner = _at(model["layers"][0], "attention", "inner_attention")
    if not isinstance(inner, Mapping):
        return None
    return "flex" if "block_size" in inner else "flash_attention_2" if "window_size" in inner else "sdpa"


def _named(pasted: Pasted) -> str:
    spec = pasted.values.get("model_spec")
    return spec if isinstance(spec, str) else ""


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _config(model: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """`model` as the mapping of a config.json; None if it does not describe a network, or its family cannot be read
    here."""
    layers = [layer for layer in model.get("layers", ()) if isinstance(layer, Mapping)]
    if not layers or name not in ("llama3", "qwen3", "deepseek_v3", "gpt_oss"):
        return None
    attention, last = _at(layers[0], "attention"), layers[-1]
    heads, width = _at(attention, "n_heads"), model.get("dim")
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return None
    routed = [index for index, layer in enumerate(layers) if layer.get("moe")]
    dense = [index for index, layer in enumerate(layers) if not layer.get("moe")]
    config: dict[str, Any] = {
        "model_type": {"llama3": "llama"}.get(name, name),
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "vocab_size": model.get("vocab_size"),
        "tie_word_embeddings": bool(model.get("enable_weight_tying")),
        "max_position_embeddings": _at(attention, "rope", "max_seq_len") or 0,
    }
    if dense:
        config["intermediate_size"] = _at(layers[dense[0]], "feed_forward", "w1", "out_features")
    if name == "deepseek_v3":
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        config |= {key: _at(attention, key) for key in names}
        config |= {"q_lora_rank": _at(attention, "q_lora_rank") or None, "num_key_value_heads": heads}
        config["num_nextn_predict_layers"] = len(model.get("mtp_layers") or ())
    else:
        config["num_key_value_heads"] = _at(attention, "n_kv_heads") or heads
        config["head_dim"] = _at(attention, "head_dim") or width // heads
        config["attention_bias"] = bool(_at(attention, "wo", "bias"))
    if name == "gpt_oss":
        windows = [_at(layer, "attention", "sliding_window_size") for layer in layers]
        config["sliding_window"] = next((size for size in windows if size), None)
    return config | (_experts(last["moe"], name, dense) if routed else {})


def _experts(moe: Mapping[str, Any], name: str, dense: list[int]) -> dict[str, Any]:
    """The experts' keys in the family's config.json."""
    inner = _at(moe, "routed_experts", "inner_experts", "hidden_dim")
    shared = _at(moe, "shared_experts", "w1", "out_features") or 0
    num, per_token = _at(moe, "num_experts"), _at(moe, "router", "top_k")
    if name == "deepseek_v3":
        sigmoid = _at(moe, "router", "score_func") == "sigmoid"
        return {
            "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
            "n_routed_experts": num,
            "num_experts_per_tok": per_token,
            "moe_intermediate_size": inner,
            "n_shared_experts": shared // inner if isinstance(inner, int) and inner else 0,
            "first_k_dense_replace": len(dense),
        }
    if name == "gpt_oss":
        return {"num_local_experts": num, "num_experts_per_tok": per_token, "intermediate_size": inner}
    return {
        "model_type": "qwen3_moe",
        "num_experts": num,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": inner,
        "mlp_only_layers": dense,
    }
