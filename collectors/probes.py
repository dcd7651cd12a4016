"""Readings of the machine: the CUDA allocator's statistics, versions, host memory. Bytes are ints.

Everything degrades to None where a driver or a permission is missing; a measurement then says less, never something wrong.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
from typing import Any

PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "bitsandbytes", "flash-attn", "triton"),
    *("megatron_core", "transformer_engine"),
)
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING")
FUSED_ATTENTION = {"Cudnn": "cudnn", "Flash": "flash", "Efficient": "efficient"}
"""Part of the name of the autograd node -> attention kernel."""
BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
ALLOCATOR_PEAKS = {
    "allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
    "active": "active_bytes.all.peak",
    "requested": "requested_bytes.all.peak",
}
"""Our name -> key of `torch.cuda.memory_stats()`."""


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


def allocator_setting(expandable_segments: bool, current: str) -> str:
    """`current` (the value of PYTORCH_CUDA_ALLOC_CONF) with the job's choice in it; to be set before torch is imported."""
    others = [item for item in current.split(",") if item and not item.strip().startswith("expandable_segments")]
    return ",".join([*others, f"expandable_segments:{expandable_segments}"])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU's memory was used up: PyTorch's own error, or that of a library beside its allocator."""
    return type(error).__name__ == "OutOfMemoryError" or any(
        sign in str(error)
        for sign in ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    )


def requested_bytes(message: str) -> int | None:
    """What an out-of-memory message says was asked for, bytes as exact as it was printed (two decimals)."""
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
    """The uuid of the GPU that CUDA uses, "" where this torch does not tell."""
    import torch

    with contextlib.suppress(AssertionError, RuntimeError):
        return str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    return ""


def attention_in_graph(loss: Any) -> str | None:
    """The attention kernel that forward really took, read from the autograd graph that leads to `loss`; None where it has
    no fused attention (the math path, or blocks hidden by reentrant checkpointing). Allocates nothing on the GPU."""
    nodes, seen = [getattr(loss, "grad_fn", None)], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        if name.startswith("ScaledDotProduct"):
            return next((backend for mark, backend in FUSED_ATTENTION.items() if mark in name), name)
        nodes += [following for following, _ in node.next_functions]
    return None


def attention_backend(model: Any, dtype: Any) -> str:
    """The kernel that scaled dot product attention would take on this GPU for the model's heads, as PyTorch chooses it.

    Allocates on the GPU: only for after the last step.
    """
    import torch

    config = model.config
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    query = torch.empty((1, heads, 128, dim), dtype=dtype, device="cuda")
    key = torch.empty((1, key_heads, 128, dim), dtype=dtype, device="cuda")
    with contextlib.suppress(Exception):
        code = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=key_heads != heads)
        return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(int(code), str(code))
    return "unknown"


def host_peak_bytes() -> int:
    """Largest resident set of this process so far (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pinned_peak_bytes() -> int | None:
    """Most host memory that PyTorch had pinned (its allocator rounds to powers of two); None where torch does not tell."""
    import torch

    with contextlib.suppress(AttributeError, AssertionError, RuntimeError):
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    return None
