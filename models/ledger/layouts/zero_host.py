"""What a rank of ZeRO keeps in host memory when it offloads, tensor by tensor.

Source: DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py` and `stage3.py` (`_create_fp32_partitions`,
`initialize_optimizer_states`, `_create_param_groups_fp16_flat_cpu_memory`), `partition_parameters.py` (`_partition_param`).
Compared with what its engine makes on fake tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peakcast.core.units import power_of_two
from peakcast.models.ledger.layouts.zero import MAIN_BYTES
from peakcast.models.ledger.layouts.zero3 import Zero3
from peakcast.models.ledger.layouts.zero12 import Zero12


@dataclass(slots=True)
class HostMemory:
    """Sizes, in bytes, of the tensors on the host."""

    pinnable: list[int] = field(default_factory=list)
    """Pinned if the configuration says so (`pin_memory`); each is then rounded up to a power of two."""
    pageable: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    """Pinned memory that nothing uses any more but PyTorch's allocator keeps (CachingHostAllocator)."""

    def num_bytes(self, *, pinned: bool) -> int:
        """Bytes in total."""
        if not pinned:
            return sum(self.pinnable) + sum(self.pageable)
        return sum(power_of_two(size) for size in (*self.pinnable, *self.freed)) + sum(self.pageable)


def host_memory(layout: Zero12 | Zero3, *, accumulates: bool) -> HostMemory:
    """What is on the host after the first step. `accumulates`: the step has several micro-batches."""
    return _stage_3(layout) if isinstance(layout, Zero3) else _stages_1_and_2(layout, accumulates)


def _stages_1_and_2(layout: Zero12, accumulates: bool) -> HostMemory:
    """What a rank of ZeRO-1 or -2 keeps on the host: nothing, unless the optimizer is offloaded."""
    found = HostMemory()
    if not layout.offloads:
        return found
    for group in layout.groups:
        part = layout.partition(group)
        found.pinnable += [part * MAIN_BYTES, part * MAIN_BYTES, part * layout.element_bytes]  # copy, gradient, new weights
        found.pageable += [part * MAIN_BYTES] * 2  # AdamW's states
    found.pinnable.append(max(t.numel for t in layout.trained) * layout.element_bytes)  # temp_grad_buffer_for_cpu_offload
    if accumulates:  # a whole gradient of every tensor that this rank updates in part (`accumulated_grads_in_cpu`)
        found.pinnable += [t.numel * layout.element_bytes for t in layout.trained if layout.division.is_mine(t)]
    return found


def _stage_3(layout: Zero3) -> HostMemory:
    """What a rank of ZeRO-3 keeps on the host: offloaded optimizer states and offloaded parameters."""
    found = HostMemory()
    if layout.offloads:
        found.pinnable.append(layout.partition(layout.trained) * layout.element_bytes)  # grad_partitions_flat_buffer
        for part in layout.sub_groups():
            found.pinnable.append(part.num_bytes)  # its gradient
            found.pageable += [part.num_bytes] * 3  # the main copy and AdamW's states
    if layout.offloads_parameters:
        for group in layout.groups:
            found.pinnable.append(sum(layout.partition([t]) * t.element_bytes for t in group))
        for tensor in layout.tensors:  # each made apart; those that train have moved to the flat buffer
            if not layout.persists(tensor):
                size = layout.partition([tensor]) * tensor.element_bytes
                (found.freed if tensor.trains else found.pinnable).append(size)
    return found
