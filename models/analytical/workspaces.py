"""Library workspaces that PyTorch takes from its own allocator: counted in `memory_allocated`, seen by no trace.

Source: torch 2.11 / 2.13 shipped binaries, `getChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp
(where-memory-goes C). Confirmed on published runs: an A100 with torch 2.4.1 holds 17,039,360 B after the step beyond
its tensors, which is 2 × 8,519,680.
"""

from __future__ import annotations

import re

from peakcast.catalog import Device
from peakcast.conventions import torch_release
from peakcast.fields import FrozenMapping

DEFAULT_WORKSPACE_BYTES = 8_519_680
"""":4096:2:16:8": 2 × 4096 KiB + 8 × 16 KiB."""
HOPPER_WORKSPACE_BYTES = 32 * 2**20
"""":4096:8" worth, chosen by torch where the compute capability asks for it."""


def cublas_workspace_bytes(device: Device, versions: FrozenMapping, config: str | None = None) -> int:
    """Bytes of one cuBLAS workspace on `device`; `config` is CUBLAS_WORKSPACE_CONFIG where set."""
    if config:
        pairs = re.findall(r":(\d+):(\d+)", config)
        return sum(int(kib) * 1024 * int(count) for kib, count in pairs)
    large = {9} if torch_release(versions) < (2, 12) else {9, 10, 12}
    return HOPPER_WORKSPACE_BYTES if device.compute_capability[0] in large else DEFAULT_WORKSPACE_BYTES


def training_workspaces(
    device: Device | None, versions: FrozenMapping, config: str | None = None
) -> list[tuple[str, str, int]]:
    """(name, module, bytes) of the workspaces of a training step: one per cuBLAS handle and stream, and handles are per
    thread, so the forward thread and the autograd thread have one each. Empty without a device (a trace has none)."""
    if device is None:
        return []
    size = cublas_workspace_bytes(device, versions, config)
    return [("cublas_workspace", "forward thread", size), ("cublas_workspace", "autograd thread", size)]
