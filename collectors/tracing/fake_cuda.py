"""Lets fake `cuda` tensors run forward and backward on a machine without a GPU, also on a CPU-only build of torch.

Needed because torch's dispatcher and autograd engine ask the CUDA hooks and device guard even for tensors without memory
(pytorch #92627, #122109). Only ever installed in a process of its own; where a GPU is available nothing is changed.
The slot numbers below are those of the virtual table of `AcceleratorHooksInterface.h` (two destructors, isBuilt,
isAvailable, hasPrimaryContext); read and tried on torch 2.11 and 2.13, so other versions are refused.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from math import prod
from typing import Any

import torch

from peakcast.core.errors import CollectorError

KNOWN_TORCH = ("2.11", "2.13")
"""Releases whose virtual table and registry were read and tried."""
IS_BUILT_SLOT, HAS_PRIMARY_CONTEXT_SLOT = 4, 6
CUDA_DEVICE_TYPE, LAZY_DEVICE_TYPE = 1, 17
"""c10::DeviceType values; the Lazy guard answers deviceCount() == 0."""
COMPUTE_CAPABILITY = (8, 0)
"""The compute capability of a trace, of an A100; newer GPUs take the same paths wherever only this is asked."""

MOST_NUMBERS = 1024
"""A tensor that a script writes as a list of numbers has at most this many."""

_keep_alive: list[Any] = []


def install() -> None:
    """Make fake cuda tensors usable in this process. Raises: CollectorError for a release of torch that was never tried."""
    if torch.cuda.is_available() or _keep_alive:
        return
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in KNOWN_TORCH:
        raise CollectorError(
            f"torch={torch.__version__} cannot be traced without a GPU: its internal layout was only tried on "
            f"{' and '.join(KNOWN_TORCH)}; install one of those (torch==2.13.0) or trace on a machine with a GPU.",
            parameter="torch",
            value=torch.__version__,
        )
    libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
    if not torch.backends.cuda.is_built():
        _register_device_guard(libraries)
    _replace_hooks(libraries)
    _allow_fake_tensors()


def _register_device_guard(libraries: str) -> None:
    """A CPU-only build has no CUDA device guard; torch installs a no-op one once any is registered."""
    name = "_ZN3c104impl26device_guard_impl_registryE"
    registry = (ctypes.c_void_p * 21).in_dll(ctypes.CDLL(os.path.join(libraries, "libc10.so")), name)
    registry[CUDA_DEVICE_TYPE] = registry[LAZY_DEVICE_TYPE]
    torch._C._ensureCUDADeviceGuardSet()
    library = torch.library.Library("aten", "IMPL")
    # the only three operators with a CUDA kernel and a composite one: without this they would be decomposed
    for operator in ("silu_backward", "mish_backward", "_fused_rms_norm"):
        library.impl(operator, lambda *arguments, **keywords: None, "CUDA")
    # numbers in a script (`x.new_tensor(1.0)`) are really moved while torch.compile folds known values
    library.impl("empty_strided", _on_the_cpu, "CUDA")
    # compiled code passes it the memory for its output; without a rule it would be run on real tensors
    library.impl("_scaled_mm.out", lambda *arguments, out, **keywords: out, "Meta")
    _keep_alive.append(library)


def _on_the_cpu(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    if prod(size) > MOST_NUMBERS:
        raise NotImplementedError(f"a tensor of shape {tuple(size)} was to be made on a GPU that is not here")
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _replace_hooks(libraries: str) -> None:
    """Install CUDA hooks that answer "built" and "no context yet", in a copy of their virtual table."""
    get_hooks = ctypes.CDLL(os.path.join(libraries, "libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    size = 60
    header = 16  # offset-to-top and type information precede the first slot
    original = ctypes.cast((hooks[0] or 0) - header, ctypes.POINTER(ctypes.c_void_p * size)).contents
    table = (ctypes.c_void_p * size)(*original)
    predicate = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)
    yes, no = predicate(lambda _self, _device: True), predicate(lambda _self, _device: False)
    table[IS_BUILT_SLOT] = ctypes.cast(yes, ctypes.c_void_p).value
    table[HAS_PRIMARY_CONTEXT_SLOT] = ctypes.cast(no, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(table) + header
    _keep_alive.extend([table, yes, no])


def _allow_fake_tensors() -> None:
    """Change checks in Python that test the exact type of a tensor, or for a real GPU."""
    from torch._subclasses.fake_tensor import FakeTensor

    for module in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        supported = importlib.import_module(module)._foreach_supported_types
        supported.append(FakeTensor)  # else AdamW silently becomes a for-loop
    amp = importlib.import_module("torch.cuda.amp.common")
    amp.amp_definitely_not_available = lambda: False  # type: ignore[attr-defined]  # else autocast("cuda") disables itself
    # permanently: torch would ask NVML for the number of devices, of which a trace pretends to have one (`fake_streams`,
    # `inductor`)
    torch.cuda.is_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *arguments, **keywords: True
    torch.cuda.get_device_capability = lambda device=None: COMPUTE_CAPABILITY  # chooses the experts' grouped matmul
