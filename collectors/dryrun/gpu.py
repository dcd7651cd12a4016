"""Answers a script's calls of `torch.cuda` about the GPU as the chosen GPU type would."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from peakcast.catalog import Device
from peakcast.collectors.dryrun import generators
from peakcast.collectors.dryrun.peaks import Peaks
from peakcast.collectors.tracing import fake_cuda, fake_streams, inductor

NAMES = {
    "A100-40GB": "NVIDIA A100-SXM4-40GB",
    "A100-80GB": "NVIDIA A100-SXM4-80GB",
    "A800-80GB": "NVIDIA A800-SXM4-80GB",
    "H100-80GB": "NVIDIA H100 80GB HBM3",
    "H100-PCIe-80GB": "NVIDIA H100 PCIe",
    "H100-NVL-94GB": "NVIDIA H100 NVL",
    "H800-80GB": "NVIDIA H800",
    "H20-96GB": "NVIDIA H20",
    "GH200-96GB": "NVIDIA GH200 480GB",
    "T4": "Tesla T4",
    "V100-16GB": "Tesla V100-SXM2-16GB",
    "V100-32GB": "Tesla V100-SXM2-32GB",
    "A6000": "NVIDIA RTX A6000",
    "RTX6000-Ada": "NVIDIA RTX 6000 Ada Generation",
    "RTX2080Ti": "NVIDIA GeForce RTX 2080 Ti",
    "RTX3060": "NVIDIA GeForce RTX 3060",
    "RTX3070": "NVIDIA GeForce RTX 3070",
    "RTX3080": "NVIDIA GeForce RTX 3080",
    "RTX4060Ti-16GB": "NVIDIA GeForce RTX 4060 Ti",
    "RTX4070Ti": "NVIDIA GeForce RTX 4070 Ti",
    "RTX4080": "NVIDIA GeForce RTX 4080",
    "RTX5080": "NVIDIA GeForce RTX 5080",
    "RTX3090": "NVIDIA GeForce RTX 3090",
    "RTX4090": "NVIDIA GeForce RTX 4090",
    "RTX5090": "NVIDIA GeForce RTX 5090",
    "RTX-PRO-6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}
"""Name of a GPU type in the catalog -> CUDA's name, where that is not "NVIDIA " and the same. Scripts compare it, and
accelerate does ("RTX 40")."""
NCCL_VERSION = (2, 27, 5)
"""Of the CUDA builds of torch 2.9; scripts compare it with the first that has bfloat16."""
COMPILING = "torch._dynamo.variables."
"""The modules in which Dynamo calls functions whose answers become constants of compiled code."""
SILENT = (
    *("init", "_lazy_init", "set_device", "manual_seed", "manual_seed_all", "ipc_collect"),
    *("set_rng_state", "seed", "seed_all"),
    *(
        "reset_accumulated_memory_stats",
        "set_per_process_memory_fraction",
        "set_sync_debug_mode",
        "set_rng_state_all",
    ),
)


def install(device: Device, gpus_per_node: int, own: torch.device, peaks: Peaks) -> None:
    """Make this process one with `gpus_per_node` GPUs of type `device`, of which `own` is current. Installs fake CUDA
    too."""
    fake_cuda.install()
    fake_streams.install()
    fake_streams.Stream.device = own
    _describe(device)
    _answer(device, gpus_per_node, own)
    cuda: Any = torch.cuda
    free_and_all: Any = lambda *_, **__: (device.cuda_memory_bytes - peaks.now(), device.cuda_memory_bytes)  # noqa: E731
    cuda.mem_get_info = cuda.memory.mem_get_info = torch.accelerator.get_memory_info = free_and_all
    generators.install(gpus_per_node)
    cuda.get_rng_state = lambda *_, **__: cuda.default_generators[0].get_state()
    cuda.get_rng_state_all = lambda: [cuda.get_rng_state()] * gpus_per_node
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.device = cuda.device_of = _OnDevice
    cuda.Event.elapsed_time = lambda *_: 1.0
    for each in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, each, _always(None))
    memory = cuda.memory
    memory._record_memory_history = memory._dump_snapshot = _always(None)
    memory._set_allocator_settings = _always(None)
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.Tensor.cuda = _to(own)  # type: ignore[method-assign,assignment]
    torch.cuda.nccl.version = _always(NCCL_VERSION)
    peaks.install()
    _answer_for_accelerators(gpus_per_node, own)


def _describe(device: Device) -> None:
    """Give `inductor.PROPERTIES`, which compiled code asks too, the properties that CUDA has for `device`."""
    major, minor = device.compute_capability
    vars(inductor.PROPERTIES).update(
        name=name_of(device),
        major=major,
        minor=minor,
        multi_processor_count=device.num_sms,
        total_memory=device.cuda_memory_bytes,
        is_integrated=False,
        is_multi_gpu_board=False,
        L2_cache_size=50 * 2**20,
        uuid="GPU-00000000-0000-0000-0000-000000000000",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
    )
    fake_cuda.COMPUTE_CAPABILITY = (major, minor)


def _answer(device: Device, gpus_per_node: int, own: torch.device) -> None:
    """Let functions of `torch.cuda` give the answers of a machine that has these GPUs."""
    cuda: Any = torch.cuda
    major, minor = device.compute_capability
    answers: dict[str, Any] = {
        "is_initialized": True,
        "device_count": gpus_per_node,
        "current_device": own.index,
        "get_device_name": name_of(device),
        "get_device_capability": (major, minor),
        "get_device_properties": inductor.PROPERTIES,
        "is_bf16_supported": (major, minor) >= (8, 0),
        "get_arch_list": [f"sm_{major}{minor}"],
        "can_device_access_peer": True,
        "memory_summary": "",
        "memory_snapshot": [],
        "utilization": 0,
        **dict.fromkeys(SILENT),
    }
    for question, answer in answers.items():
        setattr(cuda, question, _always(answer))
        if hasattr(cuda.memory, question):
            setattr(cuda.memory, question, _always(answer))
    cuda.is_available = _is_available


def name_of(device: Device) -> str:
    """CUDA's name of `device`."""
    return NAMES.get(device.name, f"NVIDIA {device.name}")


def _answer_for_accelerators(gpus_per_node: int, own: torch.device) -> None:
    """Answer calls of `torch.accelerator`, which newer scripts use instead of `torch.cuda`."""
    accelerator: Any = torch.accelerator
    for question, answer in {
        "is_available": True,
        "current_accelerator": torch.device("cuda"),
        "device_count": gpus_per_node,
        "current_device_index": own.index,
        "current_device_idx": own.index,
        **dict.fromkeys(("set_device_index", "set_device_idx")),
    }.items():
        if hasattr(accelerator, question):
            setattr(accelerator, question, _to_scripts(_always(answer), getattr(accelerator, question)))
    ours: Any = torch._C
    known = ours._get_accelerator

    def accelerator_of_asker(*given: Any) -> Any:
        """What libraries and FSDP's default mesh ask; other code of torch gets the CPU build's answer."""
        asker = _asker()
        for_itself = asker.partition(".")[0] == "torch" and not asker.startswith("torch.distributed.")
        return known(*given) if for_itself else torch.device("cuda")

    ours._get_accelerator = accelerator_of_asker


def _to_scripts(answer: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives `answer` to every caller except torch itself. torch gets what it got before, as it would start
    a driver, or make real tensors; but where it compiles a script's code, it asks for the script."""

    def asked(*arguments: Any, **keywords: Any) -> Any:
        asker = _asker()
        for_itself = asker.partition(".")[0] == "torch" and not asker.startswith(COMPILING)
        return (otherwise if for_itself else answer)(*arguments, **keywords)

    asked._dynamo_marked_constant = True  # type: ignore[attr-defined]

    return asked


def _asker() -> str:
    """The module of the caller's caller."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


_is_available = _to_scripts(lambda: True, lambda: False)


class _OnDevice(contextlib.nullcontext[None]):
    """`torch.cuda.device` as a class, because torch tests whether something is an instance of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _to(own: torch.device) -> Callable[..., torch.Tensor]:
    """`torch.Tensor.cuda` to the GPU `own`."""
    return lambda tensor, device=None, non_blocking=False, **_: tensor.to(own, non_blocking=non_blocking)


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer
