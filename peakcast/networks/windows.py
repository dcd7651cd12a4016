"""Which layers of a network have a sliding window in their attention, and which have none: from a list or a pattern in its
configuration, or from the default of its family's class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.jobs.architecture import Architecture
from peakcast.networks.rules import Row

FULL, SLIDING = "full_attention", "sliding_attention"

FULL_ATTENTION_EVERY: Mapping[str, int] = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "olmo3": 4,
    "exaone4": 4,
    "gpt_oss": 2,
    "cohere2": 4,
}
"""`model_type` -> one layer in this many has no window (transformers 5.17 configuration_*.py)."""
_READS_PATTERN = ("gemma3", "gemma3_text", "exaone4", "cohere2")
"""Families whose configuration class reads `sliding_window_pattern`."""
_WHERE_ASKED = ("qwen2", "qwen3", "smollm3")
"""Families in which a network without any windowed layer counts as one without a window."""
ALTERNATES = frozenset({*FULL_ATTENTION_EVERY, *_WHERE_ASKED, "qwen2_moe", "ministral"})
"""Families in which each layer has its kind (`layer_types`), and whose model makes a mask for each kind."""


def read_windows(config: Mapping[str, Any], values: Row) -> None:
    """Set `full_attention_layers` if `config` has another pattern than its family's default."""
    family, num_layers = str(config.get("model_type")), values["num_hidden_layers"]
    if family not in ALTERNATES or values.get("sliding_window") is None:
        return
    full = tuple(layer for layer in _said(config, family, num_layers) if layer < num_layers)
    if len(full) == num_layers and family in _WHERE_ASKED:
        values["sliding_window"] = None
    elif full != _usual(family, num_layers):
        values["full_attention_layers"] = full


def _said(config: Mapping[str, Any], family: str, num_layers: int) -> Iterable[int]:
    """The layers without a window: transformers 5.17 configuration_*.py, `__post_init__`."""
    kinds, layers = config.get("layer_types"), range(num_layers)
    if kinds is not None:
        return _listed(kinds, num_layers)
    if family in ("qwen2", "qwen3", "qwen2_moe"):
        first = config.get("max_window_layers")
        first = 28 if first is None else _whole("max_window_layers", first, 0)
        if family == "qwen2_moe":
            return [layer for layer in layers if layer % 2 or layer >= first]
        return range(first)
    if family == "smollm3":  # layers without rotary embedding have the window
        return _rotating(config, num_layers)
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if pattern is None or family not in _READS_PATTERN:
        return _usual(family, num_layers)
    written = isinstance(pattern, str)  # EXAONE's "LLLG"
    every = _whole("sliding_window_pattern", len(pattern) if written else pattern, 1)
    return range(every - 1, num_layers, every)


def _listed(kinds: Any, num_layers: int) -> list[int]:
    known = isinstance(kinds, (list, tuple)) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not known or len(kinds) < num_layers:
        raise SpecError(
            f"layer_types={kinds!r} must list {FULL} or {SLIDING} for each of {num_layers} layers; other patterns are not "
            "modelled; trace it instead.",
            parameter="layer_types",
            value=kinds,
        )
    return [layer for layer, kind in enumerate(kinds) if kind == FULL]


def _rotating(config: Mapping[str, Any], num_layers: int) -> list[int]:
    said = config.get("no_rope_layers")
    if said is None:
        every = _whole("no_rope_layer_interval", config.get("no_rope_layer_interval", 4), 1)
        return [layer for layer in range(num_layers) if (layer + 1) % every]
    if not isinstance(said, (list, tuple)) or len(said) < num_layers:
        raise SpecError(
            f"no_rope_layers={said!r} must list 1 (rotates) or 0 for each of {num_layers} layers; correct it.",
            parameter="no_rope_layers",
            value=said,
        )
    return [layer for layer in range(num_layers) if said[layer]]


def _whole(key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        rule = f"must be a whole number, at least {least}"
        raise SpecError(f"{key}={value!r} {rule}; correct it.", parameter=key, value=value)
    return value


def _usual(family: str, num_layers: int) -> tuple[int, ...]:
    every = FULL_ATTENTION_EVERY.get(family)
    return tuple(range(every - 1, num_layers, every)) if every else ()


def window_keys(architecture: Architecture) -> Row:
    """The keys of config.json from which `read_windows` reads the layers, with their values."""
    family, windowed = architecture.model_type, architecture.sliding_window is not None
    if family == "exaone4" and not windowed:  # its class would divide by a pattern of 0
        return {"layer_types": [FULL] * architecture.num_hidden_layers}
    said = windowed and (architecture.full_attention_layers is not None or family not in FULL_ATTENTION_EVERY)
    if family not in ALTERNATES or not said:
        return {}
    return {"layer_types": [FULL if full else SLIDING for full in attends_to_everything(architecture)]}


@lru_cache(maxsize=512)
def attends_to_everything(architecture: Architecture) -> tuple[bool, ...]:
    """For every layer, whether its attention has no window."""
    num_layers, said = architecture.num_hidden_layers, architecture.full_attention_layers
    if architecture.sliding_window is None and architecture.model_type not in FULL_ATTENTION_EVERY:
        return (True,) * num_layers
    full = frozenset(_usual(architecture.model_type, num_layers) if said is None else said)
    return tuple(layer in full for layer in range(num_layers))
