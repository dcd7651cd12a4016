"""Networks of transformers that no row of `hf_families` describes: they can be traced, though not counted.

Only a door that traces asks for them (`for_tracing`). Everywhere else an unknown family is refused, so that no ledger is
ever asked about a network whose shapes it would have to guess.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from peakcast.architecture import Architecture
from peakcast.spec import canonical_json

_FOR_TRACING: ContextVar[bool] = ContextVar("for_tracing", default=False)
_SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim"),
    "vocab_size": ("vocab_size",),
}
"""What is shown of such a network, and its usual spellings; nothing is computed from it."""


@contextlib.contextmanager
def for_tracing() -> Iterator[None]:
    """In here a configuration of an unknown family is read as a network that is known by its configuration alone."""
    token = _FOR_TRACING.set(True)
    try:
        yield
    finally:
        _FOR_TRACING.reset(token)


def may_be_undescribed(model_type: object) -> bool:
    """Whether a network of `model_type` may be read without a row."""
    return _FOR_TRACING.get() and isinstance(model_type, str)


def undescribed(config: Mapping[str, Any], name: str | None) -> Architecture:
    """The network of `config`, which holds what transformers builds it from."""
    called = name or config.get("name") or config.get("_name_or_path") or config["model_type"]
    kept = {key: value for key, value in config.items() if key not in ("name", "_name_or_path", "torch_dtype", "dtype")}
    return Architecture(
        name=str(called),
        model_type=str(config["model_type"]),
        hidden_size=_size(config, "hidden_size"),
        num_hidden_layers=_size(config, "num_hidden_layers"),
        num_attention_heads=_size(config, "num_attention_heads"),
        intermediate_size=_size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
        num_key_value_heads=1,
        head_dim=1,
        configuration=canonical_json(kept),
        kind="undescribed",
    )


def _size(config: Mapping[str, Any], field: str) -> int:
    found = (config.get(key) for key in _SIZES[field])
    return next((value for value in found if isinstance(value, int) and value > 0), 1)
