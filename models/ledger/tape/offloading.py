"""Offloads saved tensors to the host group by group: the saved tensors of a group's operations are copied to the host when
the group has run forward, and copied back when the next group begins backward.

Source: megatron-core 0.16.1 `pipeline_parallel/fine_grained_activation_offload.py` (`on_group_commit_forward`,
`on_group_start_backward`). Copies take no time here: a tensor is freed when the last operation that reads it in forward has
run, and allocated again when the next group's backward begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peakcast.models.ledger.tape.operations import Operation, Storage


@dataclass(frozen=True, slots=True)
class Offload:
    """What is offloaded. `groups`: operation -> its group. Tensors smaller than `least_bytes` stay on the GPU."""

    groups: Mapping[str, str] = field(default_factory=dict)
    least_bytes: int = 0

    def let_go(
        self, operations: Sequence[Operation], storages: Sequence[Storage], savers: Mapping[int, Sequence[int]]
    ) -> None:
        """Mark the storages that only operations of groups save: they are freed after forward and made again in the
        backward of the next group or, if there is none, of the last operation. `savers`: `id` of a storage -> the indices
        of the operations that save it."""
        if not self.groups:
            return
        group_of = [self.groups.get(one.name, "") if one.has_backward else "" for one in operations]
        last = max((place for place, one in enumerate(operations) if one.has_backward), default=0)
        for storage in storages:
            places = savers.get(id(storage), ())
            offloaded = bool(places) and all(group_of[place] for place in places)
            if not offloaded or storage.made_again is not None or storage.num_bytes < self.least_bytes:
                continue
            own = max(places)
            after = (i for i in range(own + 1, len(operations)) if group_of[i] not in ("", group_of[own]))
            storage.made_again = next(after, last)


NO_OFFLOAD = Offload()
