"""Library workspaces that PyTorch takes from its own allocator and keeps: `memory_allocated` counts them, though they
belong to no tensor."""

from __future__ import annotations

from peakcast.catalog import Device
from peakcast.catalog.kernel_workspaces import CUBLASLT_BYTES, cublas_bytes, cublaslt_kept
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import torch_release
from peakcast.jobs.spec import TrainingJob

FORWARD_THREAD, AUTOGRAD_THREAD = "forward thread", "autograd thread"
"""Threads that multiply matrices. Each has a cuBLAS handle of its own, and each handle its workspaces."""


def cublas_workspace_bytes(device: Device, versions: FrozenMapping, config: str | None = None) -> int:
    """Bytes of one cuBLAS workspace on `device`; `config` is the value of CUBLAS_WORKSPACE_CONFIG, if it is set."""
    return cublas_bytes(device, torch_release(versions), config)


def training_workspaces(device: Device | None, job: TrainingJob) -> tuple[tuple[str, str, int], ...]:
    """(name, thread, bytes) of the workspaces that a training step keeps. Empty without a device, as in a trace.

    cuBLAS has one per handle and stream. cublasLt, which multiplies and adds a bias at once, has one of its own where torch
    keeps it: in the forward thread, and in the autograd thread where layers are recomputed there.
    """
    if device is None:
        return ()
    size = cublas_workspace_bytes(device, job.versions)
    found = [("cublas_workspace", thread, size) for thread in (FORWARD_THREAD, AUTOGRAD_THREAD)]
    if cublaslt_kept(torch_release(job.versions)) and _adds_biases(job.architecture):
        recomputes = job.task == "train" and job.activation_checkpointing.mode != "none"
        threads = (FORWARD_THREAD, AUTOGRAD_THREAD) if recomputes else (FORWARD_THREAD,)
        found += [("cublaslt_workspace", thread, CUBLASLT_BYTES) for thread in threads]
    return tuple(found)


def _adds_biases(architecture: Architecture) -> bool:
    """Whether some product of the network's forward has a bias."""
    return (
        architecture.attention_bias
        or architecture.attention_output_bias
        or architecture.mlp_bias
        or architecture.lm_head_bias
    )


def multiprocessors_of(device: Device | None) -> tuple[int, int] | None:
    """What a kernel's own memory depends on: the device's multiprocessors and the threads of each. None without a device.
    """
    return None if device is None else (device.num_sms, device.max_threads_per_sm)
