"""What data-parallel wrappers need of CUDA besides tensors: streams, events and devices that do nothing, on a machine
without a GPU. Everything then happens in the order of the calls.

`max_memory_allocated` does not depend on streams: a block that another stream still uses counts as free as soon as Python
has released it (CUDACachingAllocator `free`). Reserved memory does: each stream has a pool of its own, and such a block is
not reused before the CPU knows that the other stream has finished with it. So a `Watcher` is told on which stream each
tensor is allocated, which tensors other streams use, and when the CPU has waited.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

STREAMS_IN_POOL = 32
"""Streams of each of two priorities; a new `torch.cuda.Stream` is the next one of these, in turn (c10/cuda/CUDAStream.cpp,
`kStreamsPerPool`)."""


class Watcher(Protocol):
    """An observer of tensors and streams."""

    @property
    def now(self) -> int:
        """The number of the next operation."""

    @property
    def finished(self) -> int:
        """The operation up to which the GPU has surely finished."""

    def switched(self, stream: int) -> None:
        """From now on tensors are allocated on `stream`."""

    def used(self, tensor: torch.Tensor, stream: int) -> None:
        """`stream` uses `tensor`, which may have been allocated on another one."""

    def done(self, until: int) -> None:
        """The CPU knows that the GPU has finished everything launched before the operation `until`."""


class _Nobody:
    now = finished = 0

    def switched(self, stream: int) -> None:
        """Does nothing."""

    def used(self, tensor: torch.Tensor, stream: int) -> None:
        """Does nothing."""

    def done(self, until: int) -> None:
        """Does nothing."""


_WATCHER: Watcher = _Nobody()
_MADE = {True: itertools.count(), False: itertools.count()}
"""Whether the priority is high -> counter of streams."""


def tell(watcher: Watcher) -> None:
    """Report to `watcher` from now on."""
    global _WATCHER
    _WATCHER = watcher


class Stream:
    """A stream, of whose work is known alone how much of the computing stream's must come before it. Number 0 is the
    computing stream."""

    device = torch.device("cuda:0")
    device_index = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        high = priority < 0
        self.stream_id = 1 + next(_MADE[high]) % STREAMS_IN_POOL + high * STREAMS_IN_POOL
        self._follows = 0

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def follows(self) -> int:
        """The operation up to which the computing stream must have finished before this stream can."""
        return self._follows if self.stream_id else _WATCHER.now

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """An event at this moment."""
        return (event or FakeEvent()).record(self)

    def query(self) -> bool:
        """True: nothing is left to do."""
        return True

    def synchronize(self) -> None:
        """The CPU waits for this stream."""
        _WATCHER.done(self.follows)

    def wait_stream(self, stream: Stream) -> None:
        """What comes next on this stream waits for what another one has so far; the CPU does not wait."""
        self._follows = max(self._follows, stream.follows)

    def wait_event(self, event: FakeEvent) -> None:
        """What comes next on this stream waits for an event; the CPU does not wait."""
        self._follows = max(self._follows, event.follows)


PATIENCE = 8
"""How often an event answers that it has not happened yet, before it has: a program may ask until it has."""


class FakeEvent:
    """An event. `follows`: as of the stream that it was recorded on."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.follows, self._asked = 0, 0

    def record(self, stream: Stream | None = None) -> FakeEvent:
        """Returns the event itself, as in torch."""
        self.follows, self._asked = (stream or current_stream()).follows, 0
        return self

    def query(self) -> bool:
        """Whether it has surely happened; it has, if that is asked too often."""
        self._asked += 1
        if self._asked > PATIENCE:
            self.synchronize()
        return self.follows <= _WATCHER.finished

    def wait(self, stream: Stream | None = None) -> None:
        """Only the GPU waits, not the CPU."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The CPU waits for it."""
        _WATCHER.done(self.follows)


def _default() -> Stream:
    stream = Stream()
    stream.stream_id = 0
    return stream


DEFAULT = _default()
_CURRENT = DEFAULT


def current_stream() -> Stream:
    """The stream on which tensors are now allocated."""
    return _CURRENT


def _set_stream(stream: Any) -> None:
    global _CURRENT
    if isinstance(stream, Stream) and stream is not _CURRENT:
        _CURRENT = stream
        _WATCHER.switched(stream.stream_id)


@contextlib.contextmanager
def on(stream: Any) -> Iterator[Any]:
    """A context in which tensors are allocated on `stream` (`torch.cuda.stream`)."""
    before = _CURRENT
    _set_stream(stream)
    try:
        yield stream
    finally:
        _set_stream(before)


class _Logger:
    """DDP's logger without timers that only a CUDA build has."""

    def __getattr__(self, _: str) -> Any:
        return lambda *arguments, **keywords: None


class _Reducer:
    """DDP's reducer without its rebuild of buckets in the order in which gradients arrived, which sends bucket numbers in a
    tensor with values. The bytes of buckets stay the same, but their limits may differ. Nor does it count its forwards:
    from the first on it would time them with events of a CUDA build, which need a driver."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_forward(self) -> None:
        """Does nothing."""


def install() -> None:
    """Replace them in this process."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, FakeEvent
    cuda.stream, cuda.set_stream = on, _set_stream
    answers = {"default_stream": DEFAULT, "device_count": 1, "current_device": 0}
    # a pipeline saves the state of random numbers while it prepares
    nothing = ("set_device", "get_rng_state", "set_rng_state", "reset_peak_memory_stats")
    for name, answer in (answers | dict.fromkeys(nothing)).items():  # one function each: Dynamo distinguishes them
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    for module in (cuda, torch.accelerator):  # each has its own functions; FSDP2 uses those of the second
        module.current_stream = lambda *_, **__: current_stream()
        module.synchronize = lambda *_, **__: DEFAULT.synchronize()
    torch.Tensor.record_stream = lambda tensor, stream: _WATCHER.used(tensor, stream.stream_id)  # type: ignore[method-assign,assignment]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment]
    _install_fsdp1()
    _install_ddp()


def _install_fsdp1() -> None:
    """Two changes for FSDP1. It asks once, before its first forward, whether there is a GPU; answering yes everywhere would
    mislead fake tensors. And it compares addresses to see whether a flat parameter is sharded; all fake tensors have
    address 0, so frozen units would stay gathered forever."""
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
        """Set the device together with the data, as it is an attribute of a fake tensor; FSDP1 moves a flat parameter to
        the host in this way."""
        data.__set__(tensor, value)
        tensor.fake_device = value.device

    FakeTensor.data = property(data.__get__, set_data)  # type: ignore[assignment]
    FakeTensor.data_ptr = lambda tensor: tensor.untyped_storage()._cdata  # type: ignore[method-assign,assignment]
    _install_addresses()
    runtime._lazy_init = wrapper._lazy_init = initialise_with_gpu


def _install_addresses() -> None:
    """Give the storages of fake tensors addresses of their own, 0 where they are not allocated. TRL's offloading of
    activations takes two with one address for the same tensor (trl 1.16 models/activation_offloading.py)."""
    address: Any = torch.UntypedStorage.data_ptr

    def data_ptr(storage: Any) -> int:
        if storage.device.type == "meta":
            return int(storage._cdata) if storage.nbytes() else 0
        return int(address(storage))

    torch.UntypedStorage.data_ptr = data_ptr  # type: ignore[method-assign]


def _install_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    dist._verify_params_across_processes = lambda *_, **__: None  # type: ignore[attr-defined]
    reducer, find_unused_argument = dist.Reducer, 6  # type: ignore[attr-defined]

    def make_reducer(*arguments: Any, **keywords: Any) -> Any:
        """A reducer without its map of used parameters, which has 4 bytes for each in pinned memory; fake tensors cannot be
        pinned."""
        rest = arguments[find_unused_argument + 1 :]
        return reducer(*arguments[:find_unused_argument], False, *rest, **keywords)

    dist.Reducer = make_reducer  # type: ignore[attr-defined]
    register = DistributedDataParallel.register_comm_hook

    def register_and_replace(self: Any, *arguments: Any) -> None:
        register(self, *arguments)
        self.logger, self.reducer = _Logger(), _Reducer(self.reducer)

    DistributedDataParallel.register_comm_hook = register_and_replace  # type: ignore[method-assign]
