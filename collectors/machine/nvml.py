"""NVML: memory in use on the GPU as the driver counts it, which processes use it, and sentences that say what cannot be
read here and why.

Facts about NVML are from docs/where-memory-goes.md, section B, and from NVIDIA's NVML API reference.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from typing import Any

from peakcast.core.units import GIB, MIB

MISSING = "pynvml is not installed; install it with: pip install nvidia-ml-py"
WHY = {
    "LibraryNotFound": "the driver's libnvidia-ml.so.1 is not here (a container needs NVIDIA_DRIVER_CAPABILITIES=utility)",
    "DriverNotLoaded": "no NVIDIA driver is loaded",
    "LibRmVersionMismatch": "the driver's library and its kernel module are of two versions; reboot, or reload it",
    "NoPermission": "this user may not ask the driver; run as one who may",
    "NotSupported": "this GPU does not tell (virtual machines, and GPUs that share the host's memory, may not)",
    "NotFound": "CUDA_VISIBLE_DEVICES names a GPU that the driver does not have",
    "InvalidArgument": "CUDA_VISIBLE_DEVICES names a GPU that the driver does not have",
    "GpuIsLost": "the GPU has fallen off the bus; reboot",
}
"""The meaning of the vendor's errors (pynvml.NVMLError_...) here."""
QUANTUM_BYTES = 64 * MIB
"""If more than this is in use before our context exists, another process uses the GPU: an idle driver reports some MiB, a
context several hundred."""
DRIVER_RESERVE_BYTES = GIB
"""The most that the v1 call counts on a GPU without processes: the driver's reserve (912 MB were seen on an A100)."""
SETTLING_SECONDS = 2.0
"""How long to wait for the memory of a cell that has just ended."""
VIRTUAL = {
    2: "a virtual GPU: memory is that of its profile, and what other machines use of the GPU is not seen.",
    3: "a GPU shared with virtual machines: what they use is counted as if it were this run's.",
    4: "a GPU shared with virtual machines: what they use is counted as if it were this run's.",
}
"""nvmlDeviceGetVirtualizationMode -> what it means for readings; with none (0) and passthrough (1) they are as usual."""
MIG = "a MIG instance: memory is the instance's, and the context is smaller than the whole GPU's."
UNLISTED = "processes on the GPU cannot be listed here (a container or a virtual machine); another one may go unnoticed."


def why(error: BaseException) -> str:
    """The meaning of an NVML error, as a sentence without its full stop."""
    if isinstance(error, ImportError):
        return MISSING
    return WHY.get(type(error).__name__.removeprefix("NVMLError_"), " ".join(str(error).split()) or type(error).__name__)


class Nvml:
    """Readings of the GPU that CUDA calls `index`. Without a driver every reading is None and `reason` says why.

    Uses the v1 memory call, whose `used` contains the driver's reserve, as `torch.cuda.device_memory_used()` does.
    """

    def __init__(self, index: int = 0) -> None:
        self.reason = ""
        self.is_mig = False
        self._handle: Any = None
        self._lib: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._lib = pynvml
            self._handle = self._find(index)
            pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        except Exception as error:  # pynvml raises a class per error code; each means "no reading"
            self._give_up(why(error))

    def _give_up(self, reason: str) -> None:
        self._handle, self.reason = None, reason

    def _find(self, index: int) -> Any:
        """The handle for that entry of CUDA_VISIBLE_DEVICES (a number, or a uuid or its beginning), else for the GPU with
        that number. If the GPU is split into MIG instances, the first instance, which CUDA uses."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
        chosen = visible.split(",")[index].strip() if visible else str(index)
        if chosen.startswith("MIG-"):
            self.is_mig = True
            return self._lib.nvmlDeviceGetHandleByUUID(chosen.encode())
        handle = self._lib.nvmlDeviceGetHandleByIndex(int(chosen)) if chosen.isdigit() else self._by_uuid(chosen)
        with contextlib.suppress(Exception):  # most GPUs have no MIG and answer with an error
            self.is_mig = self._lib.nvmlDeviceGetMigMode(handle)[0] == 1
        return self._lib.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0) if self.is_mig else handle

    def _by_uuid(self, start: str) -> Any:
        handles = map(self._lib.nvmlDeviceGetHandleByIndex, range(self._lib.nvmlDeviceGetCount()))
        found = [handle for handle in handles if _text(self._lib.nvmlDeviceGetUUID(handle)).startswith(start)]
        return found[0] if len(found) == 1 else self._lib.nvmlDeviceGetHandleByUUID(start.encode())

    def check(self, cuda_uuid: str) -> None:
        """Stop reading if CUDA uses another GPU than this one: a wrong number is worse than none."""
        if self._handle is None or self.is_mig or not cuda_uuid:
            return
        found = _text(self._ask("nvmlDeviceGetUUID") or "")
        if found and cuda_uuid not in found:
            self._give_up(f"it reads {found} and CUDA uses GPU-{cuda_uuid}; set CUDA_DEVICE_ORDER=PCI_BUS_ID")

    def used_bytes(self) -> int | None:
        """Memory in use on the whole GPU (or MIG instance), as `nvidia-smi` shows it."""
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        return None if memory is None else int(memory.used)

    def used_by_processes_bytes(self) -> int | None:
        """Memory in use without the driver's reserve; None if the driver does not tell the two apart (v2 call)."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", getattr(self._lib, "nvmlMemory_v2", None))
        if memory is None or not hasattr(memory, "reserved"):
            return None
        apart = memory.total == memory.reserved + memory.used + memory.free  # some drivers count the reserve as used
        return int(memory.used) if apart else max(int(memory.used) - int(memory.reserved), 0)

    def settled_bytes(self) -> int | None:
        """`used_bytes` after the memory of processes that have just ended is released, or after `SETTLING_SECONDS`."""
        deadline = time.monotonic() + SETTLING_SECONDS
        while self.is_in_use() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.used_bytes()

    def is_in_use(self) -> bool:
        """Whether another process has memory on the GPU; to be called before our context exists."""
        mine = self.used_by_processes_bytes()
        return mine > QUANTUM_BYTES if mine is not None else (self.used_bytes() or 0) > DRIVER_RESERVE_BYTES

    def processes(self) -> frozenset[int] | None:
        """Numbers of the compute processes on the GPU; they are the host's, which differ from ours in a container. None if
        they cannot be listed."""
        listed = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return None if listed is None else frozenset(int(process.pid) for process in listed)

    def driver(self) -> str | None:
        """The driver's version."""
        if self._lib is not None:
            with contextlib.suppress(Exception):
                return _text(self._lib.nvmlSystemGetDriverVersion())
        return None

    def remarks(self, listed: Collection[int] | None) -> list[str]:
        """Sentences about what is unusual with readings here. `listed`: the processes that were seen while ours was on the
        GPU."""
        if self._handle is None:
            return [f"NVML cannot be read: {self.reason}; device memory and context are left out."]
        mode = VIRTUAL.get(self._ask("nvmlDeviceGetVirtualizationMode") or 0)
        return [*([MIG] if self.is_mig else []), *([mode] if mode else []), *([] if listed else [UNLISTED])]

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer of an NVML call about the GPU; None if it fails."""
        if self._handle is None or None in arguments:
            return None
        with contextlib.suppress(Exception):
            return getattr(self._lib, name)(self._handle, *arguments)
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
