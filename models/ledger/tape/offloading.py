"""Offloads saved tensors to the host group by group: what a group's operations save is copied to the host when the group
has run forward, and copied back when the group after it has run backward.

Source: megatron-core 0.16.1 `pipeline_parallel/fine_grained_activation_offload.py` (`on_save_for_backward`,
`on_group_commit_forward`, `on_group_start_backward`). Copies take no time here. Each operation that saves a tensor has a
copy of its own, which comes back as a tensor of its own, even if several save the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peakcast.models.ledger.tape.operations import HostCopy
from peakcast.models.ledger.tape.storages import TapedBlock
from peakcast.models.ledger.tape.template import Reload


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What is offloaded. `groups`: operation -> its group. Tensors smaller than `least_bytes` stay on the GPU."""

    groups: Mapping[str, str] = field(default_factory=dict)
    least_bytes: int = 0

    def let_go(self, block: TapedBlock) -> tuple[Reload, ...]:
        """Note the copies of each storage that operations of groups save; what only they save is freed in forward. Returns
        what each group brings back, in the order of backward."""
        if not self.groups:
            return ()
        ran = {operation: instant + 1 for instant, operation in enumerate(block.order)}
        operations = [place for place in sorted(ran) if block.operations[place].name in self.groups]
        group_of = {place: self.groups[block.operations[place].name] for place in operations}
        back = {
            place: next((ran[after] for after in operations if after > place and group_of[after] != group_of[place]), 0)
            for place in operations
        }
        sizes: dict[str, list[int]] = {group_of[place]: [] for place in reversed(operations)}
        for storage in block.storages:
            savers = set(block.savers.get(id(storage), ()))
            leaf = set() if storage.leaf_for is None else {storage.leaf_for}
            copied = sorted((savers - leaf) & group_of.keys())
            if not copied or storage.made_again is not None or storage.num_bytes < self.least_bytes:
                continue
            storage.on_host = tuple(HostCopy(back[place], ran[place]) for place in copied)
            storage.stays_for = min((savers - group_of.keys()) | leaf, default=None)
            for place in copied:
                sizes[group_of[place]].append(storage.num_bytes)
        first = {group: min(place for place in operations if group_of[place] == group) for group in sizes}
        return tuple(
            Reload(tuple(sizes[group]), back[place], block.operations[place].name) for group, place in first.items()
        )


NO_OFFLOAD = OffloadPlan()
