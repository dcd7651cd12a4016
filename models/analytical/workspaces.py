"""Library workspaces that PyTorch takes from its own allocator and keeps: counted in `memory_allocated`, of no tensor."""

from __future__ import annotations

from peakcast.catalog import Device
from peakcast.conventions import torch_release
from peakcast.fields import FrozenMapping
from peakcast.kernel_workspaces import cublas_bytes


def cublas_workspace_bytes(device: Device, versions: FrozenMapping, config: str | None = None) -> int:
    """Bytes of one cuBLAS workspace on `device`; `config` is CUBLAS_WORKSPACE_CONFIG where set."""
    return cublas_bytes(device, torch_release(versions), config)


def training_workspaces(
    device: Device | None, versions: FrozenMapping, config: str | None = None
) -> list[tuple[str, str, int]]:
    """(name, module, bytes) of the workspaces of a training step: one per cuBLAS handle and stream, and handles are per
    thread, so the forward thread and the autograd thread have one each. Empty without a device (a trace has none)."""
    if device is None:
        return []
    size = cublas_workspace_bytes(device, versions, config)
    return [("cublas_workspace", "forward thread", size), ("cublas_workspace", "autograd thread", size)]


def kernels_of(device: Device | None) -> tuple[int, int] | None:
    """What of a device decides what kernels take: multiprocessors and threads of each. None without a device."""
    return None if device is None else (device.num_sms, device.max_threads_per_sm)
