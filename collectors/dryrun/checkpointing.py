"""Which networks of transformers recompute their layers, as far as their attributes say so at the moment."""

from __future__ import annotations

import functools
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
