"""What a configuration says of state-space layers: Mamba by itself, or together with attention (hybrids). These are the
functions that such families name in `adjust` and `restore` (`catalog/families/`).

Defaults are those of the family's config class in transformers 5.17. Each family has its own function that reads the parts
of a layer; configurations that share blocks between layers (Zamba) are not described.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.fields import int_like
from peakcast.jobs.architecture import MOST_ELEMENTS, Architecture, StateSpace
from peakcast.networks.rules import TomlTable

_NAMES = {
    "mamba": "mamba", "linear_attention": "mamba", "M": "mamba",
    "attention": "attention", "full_attention": "attention", "*": "attention",
    "mlp": "mlp", "-": "mlp",
    "moe": "moe", "E": "moe",
}  # fmt: skip
"""Nemotron-H's names of a layer's kind, in words or as a letter of `hybrid_override_pattern`."""


def _number(config: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    """The whole number of a key; `default` if the key is absent, null or a word such as "auto"."""
    value = config.get(key, default)
    if value is None or isinstance(value, str):
        return default
    if isinstance(value, bool) or int_like(value) is None or not least <= value <= MOST_ELEMENTS:
        rule = f"must be a whole number from {least} to {MOST_ELEMENTS:,}"
        raise SpecError(f"{key}={value!r} {rule}; correct it.", parameter=key, value=value)
    return int(value)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise SpecError(f"{key}={value!r} must be true or false; write it without quotes.", parameter=key, value=value)
    return default if value is None else value


def _first_mamba(prefix: str) -> Any:
    """The rules for the mixer of the first Mamba; in Jamba, keys begin with `mamba_`."""

    def read(config: Mapping[str, Any], values: TomlTable) -> StateSpace:
        names = ("d_state", "d_conv", "dt_rank") if prefix else ("state_size", "conv_kernel", "time_step_rank")
        hidden = values["hidden_size"]
        return StateSpace(
            version=1,
            inner_size=_number(config, f"{prefix}expand", 2) * hidden,
            state_size=_number(config, prefix + names[0], 16),
            conv_kernel=_number(config, prefix + names[1], 4),
            time_step_rank=_number(config, prefix + names[2], -(-hidden // 16)),
            projection_bias=_flag(config, "mamba_proj_bias" if prefix else "use_bias", False),
            conv_bias=_flag(config, "mamba_conv_bias" if prefix else "use_conv_bias", True),
            norm="time_step_and_states" if prefix else "none",
        )

    return read


def mamba(config: Mapping[str, Any], values: TomlTable) -> None:
    values["ssm"] = _first_mamba("")(config, values)
    _without_attention(values)


def mamba2(config: Mapping[str, Any], values: TomlTable) -> None:
    values["ssm"] = StateSpace(
        version=2,
        inner_size=_number(config, "expand", 2) * values["hidden_size"],
        state_size=_number(config, "state_size", 128),
        conv_kernel=_number(config, "conv_kernel", 4),
        num_heads=_number(config, "num_heads", 128),
        num_groups=_number(config, "n_groups", 8),
        projection_bias=_flag(config, "use_bias", False),
        conv_bias=_flag(config, "use_conv_bias", True),
        norm="gated",
    )
    _without_attention(values)


def _without_attention(values: TomlTable) -> None:
    """Set the shapes of parts that no layer has."""
    values |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    values["intermediate_size"] = values["ssm"].inner_size
    values["layer_types"] = ("mamba",) * values["num_hidden_layers"]


def _bamba_mixer(config: Mapping[str, Any], inner: int, norm: Any, bias: bool) -> StateSpace:
    return StateSpace(
        version=2,
        inner_size=inner,
        state_size=_number(config, "mamba_d_state", 256),
        conv_kernel=_number(config, "mamba_d_conv", 4),
        num_heads=_number(config, "mamba_n_heads", 128),
        num_groups=_number(config, "mamba_n_groups", 1),
        projection_bias=bias,
        conv_bias=_flag(config, "mamba_conv_bias", True),
        norm=norm,
    )


def bamba(config: Mapping[str, Any], values: TomlTable) -> None:
    inner = _number(config, "mamba_expand", 2) * values["hidden_size"]
    values["ssm"] = _bamba_mixer(config, inner, "gated", _flag(config, "mamba_proj_bias", False))
    attends = config.get("attn_layer_indices") or ()
    if not isinstance(attends, Sequence) or isinstance(attends, str):
        raise SpecError(
            f"attn_layer_indices={attends!r} must be a list of layers; correct it.",
            parameter="attn_layer_indices",
            value=attends,
        )
    values["layer_types"] = tuple(
        f"{'attention' if layer in attends else 'mamba'}+mlp" for layer in range(values["num_hidden_layers"])
    )


def falcon_h1(config: Mapping[str, Any], values: TomlTable) -> None:
    wide = _number(config, "mamba_expand", 2) * values["hidden_size"]
    inner = wide if "mamba_d_ssm" in config and config["mamba_d_ssm"] is None else _number(config, "mamba_d_ssm", 1024)
    norm = "gated" if _flag(config, "mamba_rms_norm", False) else "none"
    values["ssm"] = _bamba_mixer(config, inner, norm, _flag(config, "mamba_proj_bias", False))
    values["layer_types"] = ("mamba|attention+mlp",) * values["num_hidden_layers"]
    if _flag(config, "projectors_bias", False) != values["ssm"].projection_bias:
        values["refusal"] = ("projectors_bias", config.get("projectors_bias"), "as mamba_proj_bias")


def jamba(config: Mapping[str, Any], values: TomlTable) -> None:
    values["ssm"] = _first_mamba("mamba_")(config, values)
    period, offset = _number(config, "attn_layer_period", 8), _number(config, "attn_layer_offset", 4, 0)
    every, first = _number(config, "expert_layer_period", 2), _number(config, "expert_layer_offset", 1, 0)
    several = values["moe"]["num_experts"] > 1
    values["layer_types"] = tuple(
        f"{'attention' if layer % period == offset else 'mamba'}+{'moe' if several and layer % every == first else 'mlp'}"
        for layer in range(values["num_hidden_layers"])
    )


def nemotron_h(config: Mapping[str, Any], values: TomlTable) -> None:
    layers: Any = config.get("hybrid_override_pattern") or config.get("layers_block_type") or ()
    if not isinstance(layers, (str, list, tuple)) or not layers or any(str(layer) not in _NAMES for layer in layers):
        rule = f"a list of {', '.join(name for name in _NAMES if len(name) > 1)}, or their letters"
        values["refusal"] = ("layers_block_type", layers, rule)
        return
    values["layer_types"] = tuple(_NAMES[layer] for layer in layers)
    values["num_hidden_layers"] = len(layers)
    heads = _number(config, "mamba_num_heads", 128)
    values["ssm"] = StateSpace(
        version=2,
        inner_size=heads * _number(config, "mamba_head_dim", 64),
        state_size=_number(config, "ssm_state_size", 128),
        conv_kernel=_number(config, "conv_kernel", _number(config, "mamba_d_conv", 4)),
        num_heads=heads,
        num_groups=_number(config, "n_groups", _number(config, "mamba_n_groups", 8)),
        projection_bias=_flag(config, "use_bias", False),
        conv_bias=_flag(config, "use_conv_bias", True),
        norm="gated",
    )
    if "moe" not in values["layer_types"]:
        values["moe"] = None


# -- and back -----------------------------------------------------------------------------------------------------------


def mamba_keys(architecture: Architecture) -> TomlTable:
    ssm = architecture.ssm
    assert ssm is not None
    keys: TomlTable = {
        "expand": ssm.inner_size // architecture.hidden_size,
        "state_size": ssm.state_size,
        "conv_kernel": ssm.conv_kernel,
        "use_bias": ssm.projection_bias,
        "use_conv_bias": ssm.conv_bias,
    }
    if ssm.version == 1:
        return keys | {"time_step_rank": ssm.time_step_rank}
    return keys | {"num_heads": ssm.num_heads, "n_groups": ssm.num_groups, "head_dim": ssm.inner_size // ssm.num_heads}


def bamba_keys(architecture: Architecture) -> TomlTable:
    ssm = architecture.ssm
    assert ssm is not None
    keys: TomlTable = {
        "mamba_expand": ssm.inner_size // architecture.hidden_size,
        "mamba_d_state": ssm.state_size,
        "mamba_d_conv": ssm.conv_kernel,
        "mamba_conv_bias": ssm.conv_bias,
        "mamba_proj_bias": ssm.projection_bias,
    }
    types = architecture.layer_types
    attends = [layer for layer, parts in enumerate(types) if "attention" in parts]
    if ssm.version == 1:
        rest: TomlTable = {"mamba_dt_rank": ssm.time_step_rank}
        for key, part in (("attn_layer", "attention"), ("expert_layer", "moe")):
            places = [layer for layer, parts in enumerate(types) if part in parts] or [len(types)]
            rest |= {f"{key}_offset": places[0], f"{key}_period": [*places, places[0] + len(types)][1] - places[0]}
        return keys | rest
    keys |= {"mamba_n_heads": ssm.num_heads, "mamba_n_groups": ssm.num_groups}
    if any("|" in parts for parts in types):
        return keys | {
            "mamba_d_ssm": ssm.inner_size,
            "mamba_rms_norm": ssm.norm == "gated",
            "projectors_bias": ssm.projection_bias,
        }
    return keys | {"attn_layer_indices": attends}


def nemotron_h_keys(architecture: Architecture) -> TomlTable:
    ssm = architecture.ssm
    assert ssm is not None
    return {
        "layers_block_type": list(architecture.layer_types),
        "mamba_num_heads": ssm.num_heads,
        "mamba_head_dim": ssm.inner_size // ssm.num_heads,
        "ssm_state_size": ssm.state_size,
        "conv_kernel": ssm.conv_kernel,
        "n_groups": ssm.num_groups,
        "use_bias": ssm.projection_bias,
        "use_conv_bias": ssm.conv_bias,
    }
