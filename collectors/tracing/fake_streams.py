"""What data-parallel wrappers ask of CUDA beyond tensors: streams, events and devices that do nothing, on a machine
without a GPU. Everything then happens in the order in which it is asked for, on one stream.

`max_memory_allocated` does not depend on the streams: a block that another stream still uses counts as free from the
moment that Python lets go of it (CUDACachingAllocator `free`); reserved memory does depend on them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist


class Stream:
    """A stream on which everything has already happened."""

    device = torch.device("cuda:0")
    cuda_stream = stream_id = device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """Nothing is left to do."""
        return True

    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for."""

    wait_event = synchronize = wait_stream


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> Event:
        """Itself, as torch's does."""
        return self

    def query(self) -> bool:
        """It has happened."""
        return True

    def wait(self, *_: Any) -> None:
        """Nothing to wait for."""

    synchronize = wait


class _Logger:
    """DDP's logger reads timers that only a CUDA build has."""

    def __getattr__(self, _: str) -> Any:
        return lambda *arguments, **keywords: None


class _Reducer:
    """DDP's reducer without its one rebuild of buckets in the order in which gradients arrived: that sends bucket
    numbers around in a tensor with data. The buckets' bytes stay the same but for where one ends. Nor does it count its
    forwards: from the first on it would time them, by events of a CUDA build, which want a driver."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_forward(self) -> None:
        """Nothing."""


def install() -> None:
    """Replace them for this process."""
    current = Stream()
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    answers = {"current_stream": current, "default_stream": current, "device_count": 1, "current_device": 0}
    # a pipeline keeps the state of random numbers while it prepares
    nothing = ("synchronize", "set_device", "get_rng_state", "set_rng_state", "reset_peak_memory_stats")
    for name, answer in (answers | dict.fromkeys(nothing)).items():  # each a function of its own: Dynamo tells them apart
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    torch.accelerator.current_stream = lambda *_, **__: current  # FSDP2 waits on it for what was gathered and not used
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign,assignment]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment]
    _install_fsdp1()
    _install_ddp()


def _install_fsdp1() -> None:
    """FSDP1 asks once, before its first forward, whether there is a GPU (always saying yes would mislead fake tensors);
    and it compares addresses to see whether a flat parameter is sharded: all fake tensors have address 0, so frozen units
    would stay gathered for ever."""
    import torch.distributed.fsdp._runtime_utils as runtime
    import torch.distributed.fsdp.fully_sharded_data_parallel as wrapper
    from torch._subclasses.fake_tensor import FakeTensor

    initialise, cuda = runtime._lazy_init, torch.cuda

    def initialise_with_gpu(*arguments: Any) -> Any:
        available = cuda.is_available
        cuda.is_available = lambda: True
        try:
            return initialise(*arguments)
        finally:
            cuda.is_available = available

    data: Any = torch.Tensor.data

    def set_data(tensor: FakeTensor, value: torch.Tensor) -> None:
        """A fake tensor's device is an attribute, which goes with its data: FSDP1 moves a flat parameter so to the host."""
        data.__set__(tensor, value)
        tensor.fake_device = value.device

    FakeTensor.data = property(data.__get__, set_data)  # type: ignore[assignment]
    FakeTensor.data_ptr = lambda tensor: tensor.untyped_storage()._cdata  # type: ignore[method-assign,assignment]
    runtime._lazy_init = wrapper._lazy_init = initialise_with_gpu


def _install_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    dist._verify_params_across_processes = lambda *_, **__: None  # type: ignore[attr-defined]
    reducer, find_unused_argument = dist.Reducer, 6  # type: ignore[attr-defined]

    def make_reducer(*arguments: Any, **keywords: Any) -> Any:
        """Without its map of used parameters, 4 bytes each in pinned memory, which fake tensors cannot be."""
        rest = arguments[find_unused_argument + 1 :]
        return reducer(*arguments[:find_unused_argument], False, *rest, **keywords)

    dist.Reducer = make_reducer  # type: ignore[attr-defined]
    register = DistributedDataParallel.register_comm_hook

    def register_and_replace(self: Any, *arguments: Any) -> None:
        register(self, *arguments)
        self.logger, self.reducer = _Logger(), _Reducer(self.reducer)

    DistributedDataParallel.register_comm_hook = register_and_replace  # type: ignore[method-assign]
