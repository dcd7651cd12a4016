"""Networks of transformers that no family's rules describe. Only their configuration is known; the installed
library builds them from it, so that they can be recorded or traced."""

from __future__ import annotations

import contextlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from peakcast.core.fields import flat
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.images import IMAGE_CLASSIFIER, classifies_images, compares_images
from peakcast.jobs.spec import canonical_json

_FOR_TRACING: ContextVar[bool] = ContextVar("for_tracing", default=False)
_LEFT_OUT = ("name", "_name_or_path", "torch_dtype", "dtype", "transformers_version", "architectures")
"""Keys that do not change the network."""
_LABELS = ("id2label", "label2id", "num_labels")
DEFAULT_LABELS = 2
"""Classes of a classifier whose configuration does not say them (transformers 5.17 `configuration_utils.py`)."""
_SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim"),
    "vocab_size": ("vocab_size",),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "attention_head_dim", "d_kv"),
}
"""Size of such a network -> its usual keys. It is shown to the user and compared with what was measured; no tensor follows
from it."""
_FLOAT = "__float__"
"""The key under which transformers writes numbers that JSON cannot express (5.17 `configuration_utils.py`
`_FLOAT_TAG_KEY`)."""
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where configurations of vision-language models have their language model."""


@contextlib.contextmanager
def for_tracing() -> Iterator[None]:
    """A context in which a configuration of an unknown family is never treated like Llama's."""
    token = _FOR_TRACING.set(True)
    try:
        yield
    finally:
        _FOR_TRACING.reset(token)


def is_traced() -> bool:
    """Whether the network that is read will be traced, so that its shapes need not be guessed."""
    return _FOR_TRACING.get()


def kept_configuration(config: Mapping[str, Any]) -> str:
    """The part of `config` from which transformers builds the network, as JSON."""
    kept = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    if classifies_images(config.get("model_type")):  # their number alone counts, and the names are a thousand
        kept = {key: value for key, value in kept.items() if key not in _LABELS} | {"num_labels": _num_labels(config)}
    named = str((config.get("architectures") or [""])[0])
    if compares_images(config.get("model_type")) and named.endswith(IMAGE_CLASSIFIER):
        kept |= {"architectures": [named]}
    return canonical_json(_tagged(kept))


def classifier_of_images(architecture: Architecture) -> Architecture:
    """A network that compares images with captions, trained to put images into classes."""
    config = {**configuration_of(architecture), "architectures": [f"AutoModel{IMAGE_CLASSIFIER}"]}
    return replace(
        architecture, configuration=kept_configuration(config), max_position_embeddings=0, position_embedding="rope"
    )


def given_labels(config: Mapping[str, Any]) -> Any:
    """The number of classes that a configuration gives, unchecked; transformers' default if it gives none."""
    return config.get("num_labels") or len(config.get("id2label") or ()) or DEFAULT_LABELS


def _num_labels(config: Mapping[str, Any]) -> int:
    """Classes of a classifier; transformers' default if the configuration gives no whole number."""
    count = given_labels(config)
    return count if isinstance(count, int) else DEFAULT_LABELS


def configuration_of(architecture: Architecture) -> dict[str, Any]:
    """The configuration that `architecture` contains, in the form that transformers' classes accept; empty if it contains
    none."""
    found: dict[str, Any] = _untagged(json.loads(architecture.configuration or "{}"))
    return found


def _tagged(value: Any) -> Any:
    """`value` as JSON values: an infinite number (in Mamba's `time_step_limit`) is written as by transformers."""
    if isinstance(value, Mapping):
        return {key: _tagged(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tagged(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    return value


def _untagged(value: Any) -> Any:
    if isinstance(value, Mapping):
        return float(value[_FLOAT]) if set(value) == {_FLOAT} else {key: _untagged(one) for key, one in value.items()}
    return [_untagged(one) for one in value] if isinstance(value, list) else value


def undescribed(config: Mapping[str, Any], name: str | None) -> Architecture:
    """The network of `config`, as an `Architecture` that contains the configuration."""
    called = name or config.get("name") or config.get("_name_or_path") or config["model_type"]
    hidden, heads = _size(config, "hidden_size", 1), _size(config, "num_attention_heads", 1)
    groups = _size(config, "num_key_value_heads", heads)
    return Architecture(
        name=str(called),
        model_type=str(config["model_type"]),
        hidden_size=hidden,
        num_hidden_layers=_size(config, "num_hidden_layers", 1),
        num_attention_heads=heads,
        intermediate_size=_size(config, "intermediate_size", 1),
        vocab_size=_size(config, "vocab_size", 1),
        num_key_value_heads=groups if heads % groups == 0 else heads,
        head_dim=_size(config, "head_dim", max(1, hidden // heads)),
        configuration=kept_configuration(config),
        num_labels=_num_labels(config),
        kind="undescribed",
        **_positions(config),
    )


def _positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """The table of positions of a family in which it ends, so that a longer sequence is known to fail."""
    table = _position_tables().get(str(config["model_type"]))
    rows = flat(config).get(table["key"]) if table is not None else None
    before = int(table.get("before", 0)) if table is not None else 0
    if not isinstance(rows, int) or rows <= before:
        return {}
    return {
        "position_embedding": "learned",
        "max_position_embeddings": rows - before,
        "position_embedding_offset": before,
    }


@cache
def _position_tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("peakcast.catalog").joinpath("position_tables.toml").read_text(encoding="utf-8"))


def _size(config: Mapping[str, Any], field: str, otherwise: int) -> int:
    inner = (config.get(part) for part in _TEXT_PARTS)
    places = [config, *(part for part in inner if isinstance(part, Mapping))]
    found = (place.get(key) for place in places for key in _SIZES[field])
    return next((value for value in found if isinstance(value, int) and value > 0), otherwise)
