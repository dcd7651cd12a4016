"""A traced timeline by layers: the real network's module names are translated into the ledger's."""

from __future__ import annotations

import re
from dataclasses import replace

from peakcast.timelines.timeline import Category, Timeline

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)(?:\.|$)")
"""Names under which transformers' networks have their layers: `model.layers.3`, `transformer.h.3`."""
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embed_positions|wte|wpe|embeddings?|embed_in)(?:\.|$)")
_WHOLE = ("model", "transformer", "base_model", "state")
"""Names of the network as a whole, and the name of states whose parameter is not known."""
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|norm|ln_f|final_layer_?norm)(?:\.|$)")


def by_layer(timeline: Timeline) -> Timeline:
    """`timeline` with the ledger's module names; a module that the ledger does not have keeps the first part of its own
    name."""
    owners = [
        module or (name.rpartition(".")[0] if category == Category.OPTIMIZER_STATES else "")
        for module, name, category in zip(timeline.modules, timeline.names, timeline.categories.tolist(), strict=True)
    ]
    known = {owner: _place(owner) for owner in set(owners)}
    return replace(timeline, modules=[known[owner] for owner in owners])


def _place(module: str) -> str:
    layer = _LAYER.search(module)
    if layer is not None:
        return f"layers.{layer[1]}"
    if _EMBEDDING.search(module):
        return "embedding"
    if _HEAD.search(module):
        return "head"
    first = module.partition(".")[0]
    return "" if first in _WHOLE else first
