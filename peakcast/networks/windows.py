"""Which layers of a network have a sliding window in their attention, and which have none: from a list or a pattern in its
configuration, or from the default of its family's class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.jobs.architecture import Architecture
from peakcast.networks.families import counted_as, family_of
from peakcast.networks.family import WindowTraits
from peakcast.networks.rules import TomlTable

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(config: Mapping[str, Any], values: TomlTable) -> None:
    """Set `full_attention_layers` if `config` has another pattern than its family's default."""
    windows, num_layers = counted_as(str(config.get("model_type"))).windows, values["num_hidden_layers"]
    if windows.layers == "alike" or values.get("sliding_window") is None:
        return
    full = tuple(layer for layer in _said(config, windows, num_layers) if layer < num_layers)
    if len(full) == num_layers and windows.unused_is_none:
        values["sliding_window"] = None
    elif full != _usual(windows, num_layers):
        values["full_attention_layers"] = full


def _said(config: Mapping[str, Any], windows: WindowTraits, num_layers: int) -> Iterable[int]:
    """The layers without a window: transformers 5.17 configuration_*.py, `__post_init__`."""
    kinds, layers = config.get("layer_types"), range(num_layers)
    if kinds is not None:
        return _listed(kinds, num_layers)
    if windows.layers in ("max_window_layers", "even_max_window_layers"):
        first = config.get("max_window_layers")
        first = 28 if first is None else _whole("max_window_layers", first, 0)
        if windows.layers == "even_max_window_layers":
            return [layer for layer in layers if layer % 2 or layer >= first]
        return range(first)
    if windows.layers == "unrotated":
        return _rotating(config, num_layers)
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if pattern is None or windows.layers != "pattern":
        return _usual(windows, num_layers)
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


def _usual(windows: WindowTraits, num_layers: int) -> tuple[int, ...]:
    every = windows.full_attention_every
    return tuple(range(every - 1, num_layers, every)) if every else ()


def window_keys(architecture: Architecture) -> TomlTable:
    """The keys of config.json from which `read_windows` reads the layers, with their values."""
    windows, windowed = family_of(architecture).windows, architecture.sliding_window is not None
    if windows.always_lists and not windowed:
        return {"layer_types": [FULL] * architecture.num_hidden_layers}
    said = windowed and (architecture.full_attention_layers is not None or not windows.full_attention_every)
    if windows.layers == "alike" or not said:
        return {}
    return {"layer_types": [FULL if full else SLIDING for full in attends_to_everything(architecture)]}


@lru_cache(maxsize=512)
def attends_to_everything(architecture: Architecture) -> tuple[bool, ...]:
    """For every layer, whether its attention has no window."""
    num_layers, said = architecture.num_hidden_layers, architecture.full_attention_layers
    windows = family_of(architecture).windows
    if architecture.sliding_window is None and not windows.full_attention_every:
        return (True,) * num_layers
    full = frozenset(_usual(windows, num_layers) if said is None else said)
    return tuple(layer in full for layer in range(num_layers))
