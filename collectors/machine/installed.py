"""What this machine has: installed packages and the GPUs that NVML sees. Imports neither torch nor any framework."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from typing import Any

from peakcast.collectors.machine.nvml import why
from peakcast.collectors.machine.probes import ALLOCATOR_VARIABLES

PACKAGES = (
    "torch",
    "numpy",
    "scikit-learn",
    "pandas",
    "mlflow",
    "nvidia-ml-py",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "flash-attn",
    "deepspeed",
)
SHIM = "pynvml"
"""The deprecated package of this name hides the module of `nvidia-ml-py`."""


def package_versions() -> dict[str, str | None]:
    """Version of each of `PACKAGES` from its metadata; None if it is not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def has_shim() -> bool:
    """Whether the deprecated `pynvml` package is installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(SHIM))
    return False


def allocator_variables() -> dict[str, str]:
    """The environment variables set here that change what PyTorch allocates."""
    return {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}


def nvml_gpus() -> tuple[str, list[dict[str, Any]]]:
    """(driver version, GPUs as mappings with name, memory_bytes, used_bytes), or (why NVML cannot be read, [])."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # pynvml raises a class per error code
        return f"NVML cannot be read: {why(error)}", []
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append(
                {
                    "name": _text(pynvml.nvmlDeviceGetName(handle)),
                    "memory_bytes": int(memory.total),
                    "used_bytes": int(memory.used),
                }
            )
        return _text(pynvml.nvmlSystemGetDriverVersion()), gpus
    except Exception as error:  # as above; a lost GPU must not end the report
        return f"NVML cannot be read: {why(error)}", []
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
