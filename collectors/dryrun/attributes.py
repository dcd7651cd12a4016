"""What attributes of networks and of their outputs say at the moment: that layers are recomputed, which keys and values are
kept, and how many bytes of gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
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
    that keeps nothing by a policy of its own (`context_fn`). Layers are those of the class that is wrapped most often: an
    embedding may be wrapped beside them."""
    configs = (part.config for part in network.modules() if hasattr(getattr(part, "config", None), "num_hidden_layers"))
    layers = getattr(next(configs, None), "num_hidden_layers", 0)
    calls: dict[str, list[Any]] = {}
    for part in network.modules():
        if "CheckpointWrapper" in {base.__name__ for base in type(part).__mro__}:  # FSDP2 makes subclasses
            calls.setdefault(type(part._checkpoint_wrapped_module).__name__, []).append(part.checkpoint_fn)
    most: list[Any] = max(calls.values(), key=len, default=[])
    if not most or not layers or layers % len(most) or any("context_fn" in call.keywords for call in most):
        return {}
    reentrant = bool(most[0].keywords.get("use_reentrant"))
    return {"mode": "full", "use_reentrant": reentrant, "every_n_layers": layers // len(most)}


def gradient_bytes(networks: Iterable[torch.nn.Module]) -> int:
    """Bytes on the GPU of the gradients that `networks` hold; those of FSDP's offloaded parameters are on the host."""
    held = {id(one): one.grad for part in networks for one in part.parameters()}
    return sum(one.nbytes for one in held.values() if one is not None and one.is_cuda)


def cached_tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """The keys and values in the cache of `outputs` (`past_key_values`, a `transformers.Cache` with a layer for each of the
    network's, from 4.54 on)."""
    cache = outputs.get("past_key_values") if isinstance(outputs, dict) else None
    for layer in getattr(cache, "layers", ()):
        held = (getattr(layer, name, None) for name in ("keys", "values"))
        yield from (one for one in held if isinstance(one, torch.Tensor))
