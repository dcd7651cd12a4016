"""What attributes of transformers' networks and of their outputs say at the moment: that layers are recomputed, and which
keys and values are kept."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch


def checkpointing_of(network: torch.nn.Module) -> dict[str, Any]:
    """A job's activation checkpointing of `network`; empty if it has none."""
    parts = [part for part in network.modules() if getattr(part, "gradient_checkpointing", False) is True]
    if not parts:
        return {}
    calls = (getattr(part, "_gradient_checkpointing_func", None) for part in network.modules())
    settings = next((call.keywords for call in calls if isinstance(call, functools.partial)), {})
    return {"mode": "full", "use_reentrant": bool(settings.get("use_reentrant", False))}


def cached_tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """The keys and values in the cache of `outputs` (`past_key_values`, a `transformers.Cache` with a layer for each of the
    network's, from 4.54 on)."""
    cache = outputs.get("past_key_values") if isinstance(outputs, dict) else None
    for layer in getattr(cache, "layers", ()):
        held = (getattr(layer, name, None) for name in ("keys", "values"))
        yield from (one for one in held if isinstance(one, torch.Tensor))
