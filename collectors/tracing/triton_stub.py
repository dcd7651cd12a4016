"""A stub of `triton` whose kernels do nothing, for tracing code that launches kernels: a trace sees the tensors that this
code allocates.

Only for the process that traces, and only if the real package is missing or there is no GPU on which to launch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from peakcast.collectors.tracing.fake_cuda import COMPUTE_CAPABILITY

SHARED_MEMORY_BYTES = 163 * 1024
"""Shared memory of a multiprocessor of that compute capability, for one block of threads (CUDA C++ programming guide, table
of capabilities)."""


VERSION = "3.4.0"


class _Anything:
    """Replaces any object of Triton: its attributes, calls, types and launches all return it."""

    __name__ = "kernel"

    def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __contains__(self, name: object) -> bool:
        return False  # else Python would ask for one item after the other, without end

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (_Anything,)


class _NoKernel(_Anything):
    """A class of kernels that no stub belongs to; packages derive their own from it (fla-core 0.6 ops/utils/cache.py
    `CachedAutotuner`). Torch asks such an object for what it wraps until that is none (torch 2.13 _library/triton.py)."""

    def __init__(self, fn: Any = None, *arguments: Any, **keywords: Any) -> None:
        super().__init__()
        self.fn = fn


class _Number(_Anything):
    """Replaces a dtype of Triton, whose size Inductor reads when it splits a scan."""

    def __init__(self, num_bits: int) -> None:
        super().__init__()
        self.primitive_bitwidth = num_bits


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a package, so that submodules are asked for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        number = re.fullmatch(r"u?int(\d+)|b?float(\d+)", name)
        if number is not None:
            return _Number(int(number[1] or number[2]))
        # torch 2.13 utils/flop_counter.py and _library/triton.py test whether a kernel is one of these
        return {"JITFunction": _Anything, "Autotuner": _NoKernel, "Heuristics": _NoKernel}.get(name, _Anything())


def driver() -> Any:
    """Triton's driver, which code asks about the GPU for which kernels are compiled; answers for the GPU of the trace."""
    target = types.SimpleNamespace(backend="cuda", arch=10 * COMPUTE_CAPABILITY[0] + COMPUTE_CAPABILITY[1], warp_size=32)
    properties = {"multiprocessor_count": 1, "max_shared_mem": SHARED_MEMORY_BYTES}
    utilities = types.SimpleNamespace(get_device_properties=lambda device: properties)
    active = {"get_current_target": lambda: target, "get_current_device": lambda: 0, "utils": utilities}
    return types.SimpleNamespace(active=types.SimpleNamespace(**active))


class Installed(importlib.metadata.Distribution):
    """Says that the stub is installed, in the version that it has."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: triton\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes stubs of `packages` and of all modules in them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.split(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        if spec.name == "triton":
            module.__version__ = VERSION  # type: ignore[attr-defined]
            module.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
            module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
            module.jit = lambda function=None, **keywords: _Anything()  # type: ignore[attr-defined]
            module.runtime = types.SimpleNamespace(driver=driver())  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def install(*packages: str) -> None:
    """Make `import triton` (and imports of `packages`) give the stub in this process, and answer what code asks about a GPU
    before a launch: a current device, and one multiprocessor (partial sums have one row per multiprocessor, and so are
    negligible)."""
    find_stubs(*packages or ("triton",))
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(multi_processor_count=1)  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda device=None: "NVIDIA A100"


def load_others() -> None:
    """Import torch's own modules that look for Triton, before they could find the stub."""
    for name in ("torch._inductor.compile_fx", "torch.utils.flop_counter"):
        importlib.import_module(name)


@contextlib.contextmanager
def while_importing(*packages: str) -> Iterator[None]:
    """A context in which imports get the stub, for code that imports kernels and never launches them; afterwards nothing
    gets it."""
    finder = Finder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in packages]:
            del sys.modules[name]


def find_stubs(*packages: str) -> None:
    """Make `import` of `packages` give the stub in this process, even if the real one was imported: a CUDA build of torch
    includes Triton and has loaded it."""
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]
    sys.meta_path.insert(0, Finder(packages))
    # operators made of Triton kernels (torch.library.triton_op) launch the stub as it is, and are compiled as their code
    torch.library.wrap_triton = lambda kernel: kernel
