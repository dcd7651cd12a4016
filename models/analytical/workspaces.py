"""Library workspaces that PyTorch takes from its own allocator and keeps: `memory_allocated` counts them, though they
belong to no tensor."""

from __future__ import annotations

from peakcast.catalog import Device
from peakcast.conventions import torch_release
from peakcast.fields import FrozenMapping
from peakcast.kernel_workspaces import cublas_bytes


def cublas_workspace_bytes(device: Device, versions: FrozenMapping, config: str | None = None) -> int:
    """Bytes of one cuBLAS workspace on `device`; `config` is the value of CUBLAS_WORKSPACE_CONFIG, if it is set."""
    return cublas_bytes(device, torch_release(versions), config)


def training_workspaces(
    device: Device | None, versions: FrozenMapping, config: str | None = None
) -> list[tuple[str, str, int]]:
    """(name, module, bytes) of the workspaces of a training step. There is one per cuBLAS handle and stream; each thread
    has its own handle, so the forward thread and the autograd thread have one each. Empty without a device, as in a trace.
    """
    if device is None:
        return []
    size = cublas_workspace_bytes(device, versions, config)
    return [("cublas_workspace", "forward thread", size), ("cublas_workspace", "autograd thread", size)]


def kernels_of(device: Device | None) -> tuple[int, int] | None:
    """What a kernel's own memory depends on: the device's multiprocessors and the threads of each. None without a device.
    """
    return None if device is None else (device.num_sms, device.max_threads_per_sm)
