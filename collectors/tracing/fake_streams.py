"""What data-parallel wrappers ask of CUDA beyond tensors: streams, events and devices that do nothing, on a machine
without a GPU. Everything then happens in the order in which it is asked for.

`max_memory_allocated` does not depend on the streams: a block that another stream still uses counts as free from the
moment that Python lets go of it (CUDACachingAllocator `free`). Reserved memory does: each stream has a pool of its own, and
such a block is not handed out again before the CPU knows that the other stream is done with it. So a `Watcher` is told on
which stream each tensor is made, what other streams use, and when the CPU has waited.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

STREAMS_IN_POOL = 32
"""Of each of two priorities: a new `torch.cuda.Stream` is one of these in turn (c10/cuda/CUDAStream.cpp,
`kStreamsPerPool`)."""


class Watcher(Protocol):
    """Whoever sees the tensors."""

    @property
    def now(self) -> int:
        """The operation that comes next."""

    def switched(self, stream: int) -> None:
        """From now on tensors are made on `stream`."""

    def used(self, tensor: torch.Tensor, stream: int) -> None:
        """`stream` uses `tensor`, whichever stream it was made on."""

    def done(self, until: int) -> None:
        """The CPU knows that the GPU has done all that was asked for before the operation `until`."""


class _Nobody:
    now = 0

    def switched(self, stream: int) -> None:
        """Nobody cares."""

    def used(self, tensor: torch.Tensor, stream: int) -> None:
        """Nor here."""

    def done(self, until: int) -> None:
        """Nor here."""


_WATCHER: Watcher = _Nobody()
_MADE = {True: itertools.count(), False: itertools.count()}
"""Streams so far, by whether they have a high priority."""


def tell(watcher: Watcher) -> None:
    """Tell `watcher` from now on."""
    global _WATCHER
    _WATCHER = watcher


class Stream:
    """A stream on which everything happens at once. Its number is 0 for the one that computes."""

    device = torch.device("cuda:0")
    device_index = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        high = priority < 0
        self.stream_id = 1 + next(_MADE[high]) % STREAMS_IN_POOL + high * STREAMS_IN_POOL

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Event | None = None) -> Event:
        """An event of now."""
        return (event or Event()).record()

    def query(self) -> bool:
        """Nothing is left to do."""
        return True

    def synchronize(self) -> None:
        """The CPU waits for it."""
        _WATCHER.done(_WATCHER.now)

    def wait_stream(self, *_: Any) -> None:
        """The GPU waits, not the CPU."""

    wait_event = wait_stream


class Event:
    """An event that has happened; the CPU knows it once it has waited."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded = 0

    def record(self, *_: Any) -> Event:
        """Itself, as torch's does."""
        self._recorded = _WATCHER.now
        return self

    def query(self) -> bool:
        """It has happened."""
        return True

    def wait(self, *_: Any) -> None:
        """The GPU waits, not the CPU."""

    def synchronize(self) -> None:
        """The CPU waits for it."""
        _WATCHER.done(self._recorded)


def _default() -> Stream:
    stream = Stream()
    stream.stream_id = 0
    return stream


DEFAULT = _default()
_CURRENT = DEFAULT


def current_stream() -> Stream:
    """The stream on which tensors are made now."""
    return _CURRENT


def _set_stream(stream: Any) -> None:
    global _CURRENT
    if isinstance(stream, Stream) and stream is not _CURRENT:
        _CURRENT = stream
        _WATCHER.switched(stream.stream_id)


@contextlib.contextmanager
def on(stream: Any) -> Iterator[Any]:
    """Tensors are made on `stream` in here (`torch.cuda.stream`)."""
    before = _CURRENT
    _set_stream(stream)
    try:
        yield stream
    finally:
        _set_stream(before)


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
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    cuda.stream, cuda.set_stream = on, _set_stream
    answers = {"default_stream": DEFAULT, "device_count": 1, "current_device": 0}
    # a pipeline keeps the state of random numbers while it prepares
    nothing = ("set_device", "get_rng_state", "set_rng_state", "reset_peak_memory_stats")
    for name, answer in (answers | dict.fromkeys(nothing)).items():  # each a function of its own: Dynamo tells them apart
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    for module in (cuda, torch.accelerator):  # each with functions of its own; FSDP2 waits on what the second one says
        module.current_stream = lambda *_, **__: current_stream()
        module.synchronize = lambda *_, **__: DEFAULT.synchronize()
    torch.Tensor.record_stream = lambda tensor, stream: _WATCHER.used(tensor, stream.stream_id)  # type: ignore[method-assign,assignment]
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
