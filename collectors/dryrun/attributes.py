"""What attributes of transformers' networks and of their outputs say at the moment: that layers are recomputed, and which
keys and values are kept."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch


def checkpointing_of(network: torch.nn.Module) -> dict[str, Any]:
    """A job's activation checkpointing of `network`; empty if it has none. Mode "none" if it is switched on, and the
    network in evaluation mode (transformers modeling_layers.py: `if self.gradient_checkpointing and self.training`)."""
    parts = [part for part in network.modules() if getattr(part, "gradient_checkpointing", False) is True]
    if not parts:
        return _wrapped_in_checkpoints(network)
    if not any(part.training for part in parts):
        return {"mode": "none"}
    calls = (getattr(part, "_gradient_checkpointing_func", None) for part in network.modules())
    settings = next((call.keywords for call in calls if isinstance(call, functools.partial)), {})
    return {"mode": "full", "use_reentrant": bool(settings.get("use_reentrant", False))}


def _wrapped_in_checkpoints(network: torch.nn.Module) -> dict[str, Any]:
    """The checkpointing of a network whose layers torch's `checkpoint_wrapper` has wrapped, all or every n-th of them, and
    that keeps nothing by a policy of its own (`context_fn`)."""
    configs = (part.config for part in network.modules() if hasattr(getattr(part, "config", None), "num_hidden_layers"))
    layers = getattr(next(configs, None), "num_hidden_layers", 0)
    names = [(part, {base.__name__ for base in type(part).__mro__}) for part in network.modules()]  # FSDP2 makes subclasses
    calls = [part.checkpoint_fn for part, classes in names if "CheckpointWrapper" in classes]
    if not calls or not layers or layers % len(calls) or any("context_fn" in call.keywords for call in calls):
        return {}
    reentrant = bool(calls[0].keywords.get("use_reentrant"))
    return {"mode": "full", "use_reentrant": reentrant, "every_n_layers": layers // len(calls)}


def cached_tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """The keys and values in the cache of `outputs` (`past_key_values`, a `transformers.Cache` with a layer for each of the
    network's, from 4.54 on)."""
    cache = outputs.get("past_key_values") if isinstance(outputs, dict) else None
    for layer in getattr(cache, "layers", ()):
        held = (getattr(layer, name, None) for name in ("keys", "values"))
        yield from (one for one in held if isinstance(one, torch.Tensor))
