"""NVML's pitfalls, with a driver's answers as NVIDIA documents them: what cannot be read is a sentence, never a number."""

import itertools
import sys
import time
import types

import pytest

from peakcast.collectors.machine import nvml
from peakcast.collectors.machine.nvml import Nvml
from peakcast.collectors.measure.recorder import Recorder
from peakcast.collectors.stacks.steps.sampling import sampling

real = pytest.importorskip("pynvml")
MIB = 2**20
H100 = {"total": 81559 * MIB, "reserved": 551 * MIB, "used": 4 * MIB}
"""A whole GPU with nobody there: the reserve apart from what is used (v2), and within it (v1)."""


class Gpu:
    """A GPU's answers; `None` in place of an answer means that the driver does not support the question."""

    def __init__(self, uuid, memory, *, processes=(), mig=None, instances=(), mode=0, v2=True):
        self.uuid, self.memory, self.processes, self.mig = uuid, dict(memory), list(processes), mig
        self.instances, self.mode, self.v2 = instances, mode, v2


def driver(monkeypatch, *gpus, **functions):
    """A `pynvml` with these GPUs, its errors and constants the real ones; `functions` replace some of it."""
    fake = types.ModuleType("pynvml")
    fake.__dict__.update({name: value for name, value in vars(real).items() if not name.startswith("nvmlDevice")})
    everything = [each for gpu in gpus for each in (gpu, *gpu.instances)]

    def by_index(index):
        if index >= len(gpus):
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT)
        return gpus[index]

    def by_uuid(uuid):
        for each in everything:
            if each.uuid == uuid.decode():
                return each
        raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)

    def memory(gpu, version=None):
        if version and not gpu.v2:
            raise real.NVMLError(real.NVML_ERROR_FUNCTION_NOT_FOUND)
        total, reserved, used = (gpu.memory[name] for name in ("total", "reserved", "used"))
        free = total - reserved - used
        if version:
            return types.SimpleNamespace(total=total, reserved=reserved, used=used, free=free)
        return types.SimpleNamespace(total=total, used=reserved + used, free=free)

    def supported(answer):
        if answer is None:
            raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)
        return answer

    fake.__dict__.update(
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetMigMode=lambda gpu: supported(gpu.mig and [gpu.mig, gpu.mig]),
        nvmlDeviceGetMigDeviceHandleByIndex=lambda gpu, index: gpu.instances[index],
        nvmlDeviceGetVirtualizationMode=lambda gpu: supported(gpu.mode),
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [
            types.SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in supported(gpu.processes)
        ],
    )
    fake.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, "pynvml", fake)


@pytest.fixture(autouse=True)
def everything_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "SETTLING_SECONDS", 0.05)


A, B, C = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-b6ae1be5-52f1-4ad0", "GPU-b6ffffff-0000-4ad0"


@pytest.mark.parametrize(
    ("visible", "read"),
    [(None, 1), ("", 1), ("1", 2), ("2,0", 3), (B, 2), ("GPU-893", 1), ("GPU-b6f,GPU-893", 3), (" 1 ", 2)],
)
def test_the_gpu_that_cuda_visible_devices_puts_first_is_read(monkeypatch, visible, read):
    gpus = [Gpu(uuid, H100 | {"used": number * 100 * MIB}) for number, uuid in enumerate((A, B, C), start=1)]
    driver(monkeypatch, *gpus)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Nvml().used_by_processes_bytes() == read * 100 * MIB


@pytest.mark.parametrize("visible", ["7", "GPU-none", "GPU-b6"])  # the last is the beginning of two
def test_a_gpu_that_is_not_there_is_said(monkeypatch, visible):
    driver(monkeypatch, *(Gpu(uuid, H100) for uuid in (A, B, C)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = Nvml()
    assert found.used_bytes() is None
    assert found.reason == "CUDA_VISIBLE_DEVICES names a GPU that the driver does not have"


def test_readings_of_another_gpu_than_cudas_are_dropped(monkeypatch):
    driver(monkeypatch, Gpu(A, H100), Gpu(B, H100))
    same, other = Nvml(), Nvml()
    same.check(A.removeprefix("GPU-"))
    other.check(B.removeprefix("GPU-"))
    assert same.used_bytes() == 555 * MIB
    assert other.used_bytes() is None
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in other.remarks(None)[0]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (real.NVML_ERROR_LIBRARY_NOT_FOUND, "libnvidia-ml.so.1 is not here (a container needs NVIDIA_DRIVER_CAPABILITIES"),
        (real.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "its kernel module are of two versions; reboot"),
        (real.NVML_ERROR_DRIVER_NOT_LOADED, "no NVIDIA driver is loaded"),
        (real.NVML_ERROR_NO_PERMISSION, "this user may not ask the driver"),
        (real.NVML_ERROR_IRQ_ISSUE, "Interrupt Request Issue"),  # the driver's own words
    ],
)
def test_a_driver_that_does_not_answer_is_a_sentence_and_no_reading(monkeypatch, code, sentence):
    def fails():
        raise real.NVMLError(code)

    driver(monkeypatch, Gpu(A, H100), nvmlInit=fails)
    found = Nvml()
    assert (found.used_bytes(), found.processes(), found.driver()) == (None, None, None)
    (remark,) = found.remarks(None)
    assert sentence in remark
    assert remark.endswith("; device memory and context are left out.")
    with sampling(found) as seen:
        pass
    assert (seen.peak, seen.others) == (None, 0)


def test_without_pynvml_the_remark_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in Nvml().remarks(None)[0]


def test_a_mig_instance_is_read_in_place_of_its_gpu(monkeypatch):
    instance = Gpu("MIG-c7384736-a75d-5afc", {"total": 9856 * MIB, "reserved": 0, "used": 13 * MIB}, processes=[7])
    whole = Gpu(A, H100 | {"used": 40_000 * MIB}, mig=1, instances=[instance], processes=[7, 8, 9])
    driver(monkeypatch, whole)
    for visible in (None, "0", A, "MIG-c7384736-a75d-5afc"):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = Nvml()
        assert (found.used_bytes(), found.is_mig, found.processes()) == (13 * MIB, True, {7})
        assert found.remarks({7}) == [nvml.MIG]
        found.check("whatever CUDA calls an instance")
        assert found.used_bytes() == 13 * MIB


def test_a_container_lists_host_numbers_or_nothing(monkeypatch):
    gpu = Gpu(A, H100)
    driver(monkeypatch, gpu)
    found = Nvml()
    for pids, others, remarks in (
        ([4711], 0, []),  # ours, by a number that we do not know
        ([4711, 4712], 1, []),
        ([], 0, [nvml.UNLISTED]),
        (None, 0, [nvml.UNLISTED]),
    ):
        gpu.processes = pids
        with sampling(found) as seen:
            pass
        assert (seen.others, found.remarks(seen.processes)) == (others, remarks)


def test_a_virtual_gpu_is_said_and_one_passed_through_is_like_any(monkeypatch):
    driver(monkeypatch, Gpu(A, H100, mode=2))
    assert Nvml().remarks({1}) == [nvml.VIRTUAL[2]]
    driver(monkeypatch, Gpu(A, H100, mode=1))
    assert Nvml().remarks({1}) == []
    driver(monkeypatch, Gpu(A, H100, mode=None))
    assert Nvml().remarks({1}) == []


def test_a_gpu_without_memory_of_its_own_says_so(monkeypatch):
    def unsupported(gpu, version=None):
        raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)

    driver(monkeypatch, Gpu(A, H100), nvmlDeviceGetMemoryInfo=unsupported)
    assert "share the host's memory" in Nvml().remarks(None)[0]


@pytest.mark.parametrize(
    ("memory", "v2", "in_use"),
    [
        (H100, True, False),
        (H100 | {"used": 70 * MIB}, True, True),  # the reserve is known, so a small process shows
        ({"total": 40960 * MIB, "reserved": 871 * MIB, "used": 8 * MIB}, False, False),  # the driver's reserve alone
        ({"total": 40960 * MIB, "reserved": 871 * MIB, "used": 426 * MIB}, False, True),  # with a bare context
    ],
)
def test_another_process_before_the_run_is_told_from_the_drivers_reserve(monkeypatch, memory, v2, in_use):
    driver(monkeypatch, Gpu(A, memory, v2=v2))
    found = Nvml()
    assert found.is_in_use() is in_use
    assert found.settled_bytes() == memory["reserved"] + memory["used"]


def test_a_reserve_that_the_driver_counts_as_used_is_taken_off(monkeypatch):
    inside = types.SimpleNamespace(total=1000 * MIB, reserved=300 * MIB, used=310 * MIB, free=690 * MIB)
    driver(monkeypatch, Gpu(A, H100), nvmlDeviceGetMemoryInfo=lambda *_: inside)
    assert Nvml().used_by_processes_bytes() == 10 * MIB


def test_memory_that_the_last_cell_gives_back_late_is_waited_for(monkeypatch):
    gpu = Gpu(A, H100 | {"used": 500 * MIB})
    driver(monkeypatch, gpu)
    monkeypatch.setattr(nvml, "SETTLING_SECONDS", 5)
    monkeypatch.setattr(nvml.time, "sleep", lambda _: gpu.memory.update(used=4 * MIB))
    found = Nvml()
    assert (found.settled_bytes(), found.is_in_use()) == (555 * MIB, False)


def test_a_process_that_comes_and_goes_during_the_run_is_seen(monkeypatch):
    lists = itertools.chain([[1], [1, 2]], itertools.repeat([1]))
    used = itertools.chain([4, 4, 900], itertools.repeat(40))
    driver(
        monkeypatch,
        Gpu(A, H100),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [types.SimpleNamespace(pid=pid) for pid in next(lists)],
        nvmlDeviceGetMemoryInfo=lambda *_: types.SimpleNamespace(used=next(used) * MIB),
    )
    with sampling(Nvml(), interval_seconds=0.001) as seen:
        deadline = time.monotonic() + 20
        while not seen.others and time.monotonic() < deadline:
            time.sleep(0.001)
    assert (seen.peak, seen.others) == (900 * MIB, 1)


def test_a_row_from_a_mig_instance_counts_in_no_accuracy_figure(monkeypatch):
    pytest.importorskip("torch")
    from peakcast.collectors.machine import probes
    from peakcast.collectors.measure.grid import expand

    monkeypatch.setattr(probes, "allocator_counts", lambda: {"num_alloc_retries": 0, "num_ooms": 0})
    (job,) = expand({"include": [{"architecture": "gpt2"}]})
    record = Recorder(job, "A100-80GB", {})
    assert record.row().counts
    record.is_mig = True
    assert "MIG instance" in record.row().out_of_scope
    assert not record.row().counts
