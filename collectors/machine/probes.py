"""Readings of the machine: the CUDA allocator's statistics, versions, host memory. Bytes are ints.

A reading is None if a driver or a permission is missing; the measurement then says less, but nothing wrong.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from peakcast.core.errors import NO_GPU, CollectorError
from peakcast.core.units import GIB, KIB, MIB
from peakcast.jobs.allocator_settings import Allocator, moves_nothing

if TYPE_CHECKING:
    from peakcast.jobs.spec import TrainingJob

PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "bitsandbytes", "flash-attn", "triton", "fla-core"),
    *("megatron_core", "transformer_engine", "litgpt", "lightning", "torchtune", "torchao"),
)
ALLOCATOR_VARIABLES = (
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),  # the first is read first
    *("PYTORCH_NO_CUDA_MEMORY_CACHING", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"),
    *("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "TORCH_CUDNN_SDPA_DEPRIORITIZED", "CUDA_MODULE_LOADING"),
    *("TORCH_NCCL_AVOID_RECORD_STREAMS", "NCCL_BUFFSIZE", "NCCL_NVLS_ENABLE", "NCCL_MAX_P2P_NCHANNELS"),
)
"""Environment variables that change what is allocated (docs/where-memory-goes.md, sections A to C and G)."""
FUSED_ATTENTION = {"Cudnn": "cudnn", "Flash": "flash", "Efficient": "efficient"}
"""A part of the autograd node's name -> attention kernel."""
BYTES = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
ALLOCATOR_PEAKS = {
    "allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
    "active": "active_bytes.all.peak",
    "requested": "requested_bytes.all.peak",
}
"""peakcast's name -> key of `torch.cuda.memory_stats()`."""


def require_gpu() -> None:
    """Raises: CollectorError if CUDA has no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise CollectorError(f"{NO_GPU}; trace instead (--trace), or run on a machine with a GPU.")


def open_context() -> None:
    """Create the CUDA context by allocating one element on the GPU, for which the allocator makes its smallest segment."""
    import torch

    torch.cuda.init()
    torch.empty(1, device="cuda")


def allocator_peaks() -> dict[str, int]:
    """Peaks since the last reset, by `ALLOCATOR_PEAKS`' names."""
    import torch

    stats = torch.cuda.memory_stats()
    return {name: int(stats.get(key, 0)) for name, key in ALLOCATOR_PEAKS.items()}


def allocator_counts() -> dict[str, int]:
    """Retries and out-of-memory events so far: a run with retries is spoiled."""
    import torch

    stats = torch.cuda.memory_stats()
    return {"num_alloc_retries": int(stats.get("num_alloc_retries", 0)), "num_ooms": int(stats.get("num_ooms", 0))}


def allocator_settings(allocator: Allocator, current: str = "") -> str:
    """`current`, a value of PYTORCH_CUDA_ALLOC_CONF, in which the job's settings replace those that a job can have."""
    chosen = [(each.name, getattr(allocator, each.name)) for each in fields(allocator)]
    said = [f"{name}:{value}" for name, value in chosen if value not in (None, False)]
    return ",".join([*filter(moves_nothing, re.split(r",(?![^\[]*\])", "".join(current.split()))), *said])


def forget_allocator_settings() -> None:
    """Drop the allocator settings of this process's environment: only the row's job may say them. To be called before torch
    is imported, because torch reads the variables then."""
    said = [os.environ.pop(name, "") for name in ALLOCATOR_VARIABLES[:2]]
    if kept := allocator_settings(Allocator(), ",".join(said)):
        os.environ[ALLOCATOR_VARIABLES[0]] = kept


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that GPU memory ran out: PyTorch's own error, or one of a library that allocates outside its
    allocator."""
    return type(error).__name__ == "OutOfMemoryError" or any(
        sign in str(error)
        for sign in ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    )


def requested_bytes(message: str) -> int | None:
    """The size of the request that an out-of-memory message names, in bytes, as exact as it was printed (two decimals)."""
    found = re.search(r"Tried to allocate ([\d.]+) (\w+)", message)
    return int(float(found[1]) * BYTES[found[2]]) if found and found[2] in BYTES else None


def versions() -> dict[str, str]:
    """Installed versions of `PACKAGES`, and Python's."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def cuda_environment() -> dict[str, Any]:
    """GPU name, compute capability, CUDA and cuDNN versions, what CUDA can use, allocator settings."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu_name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda_memory_bytes": int(properties.total_memory),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "variables": {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ},
    }


def cuda_uuid() -> str:
    """The uuid of the GPU that CUDA uses; "" if this torch does not tell it."""
    import torch

    with contextlib.suppress(AssertionError, RuntimeError):
        return str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    return ""


def attention_in_graph(loss: Any) -> str | None:
    """The attention kernel that forward really used, from the autograd graph that leads to `loss`. None if the graph has no
    fused attention: with the math path, or if reentrant checkpointing hides the blocks. Allocates nothing on the GPU."""
    nodes, seen = [getattr(loss, "grad_fn", None)], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        if name.startswith("FlashAttn"):  # the package flash-attn's own functions
            return "flash_attn_varlen" if "Varlen" in name else "flash_attn"
        if name.startswith("ScaledDotProduct"):
            return next((backend for mark, backend in FUSED_ATTENTION.items() if mark in name), name)
        nodes += [following for following, _ in node.next_functions]
    return None


def attention_backend(job: TrainingJob) -> str:
    """The kernel that scaled dot product attention would use on this GPU for the job's heads, as PyTorch chooses it.

    Allocates on the GPU, so it must be called after the last step.
    """
    import torch

    architecture, dtype = job.architecture, getattr(torch, job.precision.compute, torch.bfloat16)  # float8 attends in bf16
    heads, key_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    with contextlib.suppress(Exception):  # the run is over; a failure here must not cost its row
        query = torch.empty((1, heads, 128, architecture.head_dim), dtype=dtype, device="cuda")
        key = torch.empty((1, key_heads, 128, architecture.head_dim), dtype=dtype, device="cuda")
        code = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=key_heads != heads)
        return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(int(code), str(code))
    return "unknown"


def host_peak_bytes() -> int:
    """Largest resident set of this process so far (Linux counts it in KiB), its libraries included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pageable_bytes() -> int | None:
    """Host memory that belongs to this process: resident pages of no file. Memory pinned by CUDA is not included, because
    the driver maps it (proc(5) statm: resident minus shared). None if there is no /proc."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as file:
        fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * resource.getpagesize()
    return None


def registers_pinned() -> bool:
    """Whether PyTorch pins pages of the process (cudaHostRegister) instead of asking CUDA for pinned ones (cudaHostAlloc,
    the default). Registered memory is pageable at first, and is counted as pageable."""
    settings = ",".join(os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
    return "pinned_use_cuda_host_register:True" in settings


def has_skipped(scaler: Any) -> bool:
    """Whether a loss scaler (None without one) has skipped a step because gradients overflowed. It halves its scale then,
    and doubles it only after 2000 steps (torch 2.13 amp/grad_scaler.py)."""
    return scaler is not None and scaler.is_enabled() and scaler.get_scale() < scaler._init_scale


def managed_bytes(optimizer: Any) -> int:
    """Bytes of optimizer states in managed memory, which the driver moves between host and GPU and no counter includes:
    those that bitsandbytes has marked (0.50 functional.py `get_paged`)."""
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(each.nbytes for each in tensors if getattr(each, "is_paged", False))


def pinned_peak_bytes() -> int | None:
    """The most host memory that PyTorch had pinned (its allocator rounds up to powers of two and keeps what is freed); None
    if this torch does not tell it."""
    import torch

    with contextlib.suppress(AttributeError, AssertionError, RuntimeError):
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    return None
