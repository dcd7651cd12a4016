"""What FSDP gathers together of a recorded network outside of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.fsdp_units import OutsideLayers
from peakcast.models.ledger.layouts.module_tree import BlockKind, block_of
from peakcast.models.recipes.depth import Deep, deep_names
from peakcast.models.recipes.walk import GatheredGroup, Walk


def ends_of(walk: Walk, deep: Deep, names: Sequence[str], tensors: Sequence[StoredTensor]) -> OutsideLayers | None:
    """The ends as they were recorded; None if they were not. `names`: those of the deep network's blocks."""
    if not walk.groups:
        return None
    by_name = {(tensor.module, tensor.name): tensor for tensor in tensors if tensor.sharded}
    there = deep_names(walk, deep)

    def tensors_of(group: GatheredGroup | None) -> tuple[StoredTensor, ...]:
        pairs = ((there.get(module, module), name) for module, name in (group.weights if group else ()))
        return tuple(by_name[pair] for pair in pairs if pair in by_name)

    roles = {group.role: group for group in walk.groups}
    tail = roles.get("tail")
    begins = names.index(there[tail.begins]) if tail else len(names) - 1
    begins += begins % 2 == 0 and begins < len(names) - 1  # what comes before a layer begins with something else
    return OutsideLayers(
        table=tensors_of(roles.get("table")),
        tail=tensors_of(tail),
        shares_table="table" not in roles,
        tail_begins=names[begins],
        root=tuple(name for name in names if not walk.wrapped or block_of(name) is not BlockKind.LAYER),
        classes=tuple((there[group.begins], tensors_of(group)) for group in walk.groups if group.role == "class"),
    )


def overlap(walk: Walk) -> bool:
    """Whether groups share a weight with each other or with modules outside of them."""
    weights = [pair for group in walk.groups for pair in group.weights]
    return len(weights) > len(set(weights))
