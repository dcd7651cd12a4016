"""What a script asks of the machine that it runs on, besides torch: a free port, NVML, and to wait."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import sys
import threading
import time
import types
import weakref
from typing import Any

from peakcast.catalog import Device
from peakcast.collectors.dryrun.noted import is_of_script
from peakcast.collectors.dryrun.peaks import Peaks
from peakcast.collectors.machine.imports import when_imported

FIRST_PORT = 29500
"""The first of the ports that are said to be free; torchrun's own default."""
MOST_SECONDS = 0.01
"""A script's main thread sleeps for no longer while no process that it has started could go on meanwhile."""


def install(device: Device, name: str, num_gpus: int, peaks: Peaks) -> None:
    """Answer in this process as a node with `num_gpus` GPUs of type `device`, which CUDA calls `name`."""
    _say_that_ports_are_free()
    _sleep_shortly()

    def answer(module: Any) -> None:
        for function, stand_in in _answers_of_nvml(device, name, num_gpus, peaks).items():
            setattr(module, function, stand_in)

    when_imported("pynvml", answer)


def _say_that_ports_are_free() -> None:
    """Let scripts look for a free port: binding does nothing, and to listen is refused."""
    ports = itertools.count(FIRST_PORT)
    bound: weakref.WeakKeyDictionary[socket.socket, tuple[str, int]] = weakref.WeakKeyDictionary()
    bind, name = socket.socket.bind, socket.socket.getsockname

    def bind_nothing(self: socket.socket, address: Any) -> None:
        if not isinstance(address, tuple):
            return bind(self, address)
        host, port, *_ = address
        bound[self] = host or "0.0.0.0", port or next(ports)
        return None

    def say_name(self: socket.socket) -> Any:
        return bound.get(self) or name(self)

    def refuse(self: socket.socket, *_: Any) -> None:
        raise PermissionError(errno.EPERM, f"a dry run opens no port, and the script listens at {bound.get(self)!r}")

    changed: Any = socket.socket
    changed.bind, changed.getsockname, changed.listen = bind_nothing, say_name, refuse


def _sleep_shortly() -> None:
    clock: Any = time
    sleep = time.sleep

    def sleep_shortly(seconds: float) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        asked_by_script = is_of_script(sys._getframe(1).f_code.co_filename)
        sleep(min(seconds, MOST_SECONDS) if in_main and asked_by_script and not _has_children() else seconds)

    clock.sleep = sleep_shortly


def _has_children() -> bool:
    """Whether a process that this one has started still runs."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _answers_of_nvml(device: Device, name: str, num_gpus: int, peaks: Peaks) -> dict[str, Any]:
    """Functions of `pynvml` for the chosen GPU; a handle is its number."""

    def memory(*_: Any, **__: Any) -> Any:
        used = peaks.now()
        total = device.cuda_memory_bytes
        return types.SimpleNamespace(total=total, used=used, free=total - used, reserved=0, version=2)

    answers: dict[str, Any] = {
        **dict.fromkeys(("nvmlInit", "nvmlInitWithFlags", "nvmlShutdown")),
        **dict.fromkeys(("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByPciBusId"), 0),
        **dict.fromkeys(("nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo"), 0),
        **dict.fromkeys(("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetFanSpeed"), 0),
        **dict.fromkeys(("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"), ()),
        "nvmlDeviceGetCount": num_gpus,
        "nvmlDeviceGetName": name,
        "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetCudaComputeCapability": device.compute_capability,
        "nvmlDeviceGetUUID": "GPU-00000000-0000-0000-0000-000000000000",
        "nvmlSystemGetDriverVersion": "580.00",
        "nvmlSystemGetCudaDriverVersion": 13000,
    }
    functions: dict[str, Any] = {asked: _always(answer) for asked, answer in answers.items()}
    of_a_gpu = dict.fromkeys(("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetIndex"), lambda number, *_: number)
    return {**functions, **of_a_gpu, "nvmlDeviceGetMemoryInfo": memory}


def _always(answer: Any) -> Any:
    return lambda *_, **__: answer
