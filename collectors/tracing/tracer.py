"""The tracer: every storage that a step allocates, from which operation to which, as a `Timeline`.

A dispatch mode sees each operation. A storage is born at the operation that first returns it, and dies when Python and
autograd have released it (a finalizer). Sizes are rounded as by the CUDA allocator. What a kernel allocates for itself is
not visible; if a GPU is given, `kernel_allocations.py` computes it. Of a tensor made of others (such as a DTensor, made of
its shard), the inner ones count: the outer one's own storage is nominal and has the full size.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._higher_order_ops import wrap
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tensor import DTensor  # where torch 2.4 has it too
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from peakcast.catalog import Device
from peakcast.collectors.tracing import fake_streams
from peakcast.collectors.tracing.blocks_in_use import BlocksInUse
from peakcast.collectors.tracing.custom_operators import gpu_kernel
from peakcast.collectors.tracing.filled_zeros import INTO_ZEROS, MAKES_ZEROS
from peakcast.collectors.tracing.flop_counts import Operations
from peakcast.collectors.tracing.kernel_allocations import KernelAllocation, kernel_allocations
from peakcast.collectors.tracing.known_values import label
from peakcast.collectors.tracing.launches import launches, plain_tensors, tensors_of, waits
from peakcast.collectors.tracing.traced_storage import TracedStorage
from peakcast.core.units import ALLOCATION_UNIT_BYTES, round_up
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

FAKE = torch._C._TorchDispatchModeKey.FAKE
AROUND = getattr(rng_prims, "graphsafe_run_with_rng_state", None)  # torch 2.4 has none
OUTER = (DTensor, AsyncCollectiveTensor)
"""Tensors that wrap others: a DTensor around its shard, and the result of a collective that was not yet waited for."""
LAST_RESULT_FIRST = frozenset({"aten.native_dropout.default"})
"""Operators whose kernel allocates its last result first (ATen `native/cuda/Dropout.cu`: the mask, then the result)."""
COMPILED_CODE: Any = getattr(wrap, "inductor_compiled_code", None)  # exists from torch 2.10 on
DEVICE = torch.ops.prim.device.default
"""A question that torch's C++ code asks about a fake tensor, not an operation."""
BUFFER = "empty_strided.default"
"""Memory that compiled code allocates before the kernel that fills it."""


class Tracer(TorchDispatchMode):  # type: ignore[misc]
    """Records storages on `device_type`. Set `phase` during the step; get the step with `timeline`."""

    supports_higher_order_operators = True

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__()
        self.device_type = device_type
        self.phase = Phase.INIT
        self.gpu: Device | None = None
        """The GPU whose kernels run; memory that they allocate for themselves is then recorded. None: it is not."""
        self._zeros: tuple[int, int] | None = None
        """(operation, storage) of the last zeros made to be filled."""
        self._kept: set[tuple[str, bool, int]] = set()
        """Workspaces that a library keeps: (name, whether it is the autograd thread's, stream)."""
        self._modules: list[str] = []
        self._phases: list[int] = []
        self._labels: list[str] = []
        self._entries: dict[int, TracedStorage] = {}
        self._alive: dict[int, int] = {}  # storage -> number
        self._seen: set[int] = set()  # living storages, including emptied ones
        self._named: dict[int, tuple[Category, str]] = {}
        self._count = 0
        self._blocks_in_use = BlocksInUse()
        self._operations = Operations()
        self.kept_until: dict[int, int | None] = {}
        """Storage's number -> the operation at which something else than Python and autograd lets go of it; None: it still
        keeps it."""
        self.compiled = False
        """Whether a kernel that `torch.compile` wrote has run."""
        self._fused: str | None = None
        """The label of a function that is seen as one operation, while it runs."""

    @property
    def now(self) -> int:
        """The number of the next operation."""
        return len(self._phases)

    @property
    def module(self) -> str:
        """The module whose forward (or recomputation) is running; "" in backward itself and outside of modules."""
        return self._modules[-1] if self._modules else ""

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """A context in which the modules of `model` are named as they run."""
        names = {id(part): name.replace("_orig_mod.", "") for name, part in model.named_modules()}
        before = hooks.register_module_forward_pre_hook(lambda part, _: self._enter(part, names))
        # also when it raises: checkpointing stops a recomputation early with an exception
        after = hooks.register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        compiled = [part for part in model.modules() if part._compiled_call_impl is not None]
        for part in compiled:  # its hooks would be compiled away
            part._compiled_call_impl = self._within(part, names)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            for part in compiled:
                part._compiled_call_impl = part._compiled_call_impl.__wrapped__

    def _within(self, part: torch.nn.Module, names: dict[int, str]) -> Callable[..., Any]:
        call = part._compiled_call_impl
        assert call is not None

        @functools.wraps(call)
        def called(*arguments: Any, **keywords: Any) -> Any:
            self._enter(part, names)
            try:
                return call(*arguments, **keywords)
            finally:
                self._leave()

        return called

    @contextlib.contextmanager
    def one_operation(self, label: str) -> Iterator[None]:
        """A context around Python code that is a single kernel on a GPU. It counts as one operation, and of the tensors
        that it makes only those are recorded that exist after it."""
        if self._fused is not None:
            yield
            return
        self._fused, first = label, self._count
        self._phases.append(int(self.phase))
        self._labels.append(label)
        try:
            yield
        finally:
            self._fused = None
            for number in range(first, self._count):
                if number in self._entries and self._entries[number].dies is not None:
                    del self._entries[number]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: torch leaves the mode while it compiles, not while compiled code runs; otherwise nothing is compiled."""
        return True

    def launched(self, label: str, tensors: Iterable[torch.Tensor], operations: int = 0) -> None:
        """A kernel of so many `operations`, no operator of torch, ran on `tensors`; buffers made for it get its name."""
        self._operations.launched(operations, self.now)
        self._phases.append(int(self.phase))
        self._labels.append(label)
        self._blocks_in_use.launch(self.now)
        self._name_buffers(tensors, label)

    def _name_buffers(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        for tensor in tensors:
            entry = self._entries.get(self._alive.get(tensor.untyped_storage()._cdata, -1))
            if entry is not None and entry.name == BUFFER:
                entry.name = label

    def switched(self, stream: int) -> None:
        """From now on tensors are allocated on `stream`."""
        self._blocks_in_use.switched(stream)

    def used(self, tensor: torch.Tensor, stream: int) -> None:
        """`stream` uses `tensor` (`record_stream`); its block stays out of the cache until the stream has finished with
        it."""
        if (number := self._alive.get(tensor.untyped_storage()._cdata)) is not None:
            self._blocks_in_use.use(number, stream)

    def done(self, until: int) -> None:
        """The CPU knows that the GPU has finished everything launched before the operation `until`."""
        self._blocks_in_use.done(until, self.now)

    def __enter__(self) -> Tracer:
        """Also see storages that are emptied in place, as FSDP frees them."""
        fake_streams.tell(self)
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            answer = resize(storage, size)
            self._resized(storage)
            return answer

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]
        tracer: Tracer = super().__enter__()
        return tracer

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    @property
    def finished(self) -> int:
        """The operation up to which the GPU has surely finished."""
        return self._blocks_in_use.finished

    def operations_between(self, start: int, stop: int) -> int:
        """Floating-point operations of what was launched from `start` to before `stop`."""
        return self._operations.before(stop) - self._operations.before(start)

    def numbers_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """The numbers of the storages of `tensors` that are on the traced device."""
        found = (self._alive.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return {number for number in found if number is not None}

    def _enter(self, part: torch.nn.Module, names: dict[int, str]) -> None:
        if not torch.compiler.is_compiling():  # a name would be compiled again for each layer
            self._modules.append(names.get(id(part), ""))

    def _leave(self) -> None:
        if not torch.compiler.is_compiling() and self._modules:
            self._modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # autograd asks for it more often than all operations together run
        if any(issubclass(kind, OUTER) for kind in types):
            return NotImplemented  # it runs operations on its inner tensors, each of which comes here
        if (found := self._instead(func, args, kwargs or {})) is not NotImplemented:
            return found
        if func is AROUND:  # around an operator that compiled code recomputes
            func, *args = args
            kwargs = {name: value for name, value in kwargs.items() if name != "rng_state"}
        if func in INTO_ZEROS and self._fills_new_zeros(args[0]):
            func = INTO_ZEROS[func]
        result = self._ran(func, types, args, kwargs or {})
        leaves = tensors_of(result)
        if self._fused is None:
            self._next_instant(func, args, kwargs or {}, leaves)
        instant = self.now - 1
        self._operations.ran(func, args, kwargs or {}, result, instant)
        for leaf in reversed(leaves) if label(func) in LAST_RESULT_FIRST else leaves:
            self._see(leaf, instant)
        if func._overloadname == "out" and isinstance(result, torch.Tensor):
            self._name_buffers([result], self._labels[instant])
        if func in MAKES_ZEROS:
            self._zeros = instant, result.untyped_storage()._cdata
        if self.gpu is not None:
            for workspace in kernel_allocations(func, args, result, self.gpu):
                self._take(workspace, instant)
        return result

    def _ran(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator. Where only fake tensors are below this mode they are asked at once, as the dispatcher
        would after it has packed and unpacked all arguments again."""
        fakes = torch._C._get_dispatch_mode(FAKE)
        if fakes is None or torch._C._len_torch_dispatch_stack() > 1 or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        torch._C._unset_dispatch_mode(FAKE)
        try:
            result = fakes.__torch_dispatch__(func, types, args, kwargs)
        finally:
            torch._C._set_dispatch_mode(fakes)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _instead(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that is not run as its rule for fake tensors has it; NotImplemented for others."""
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as csrc/distributed/c10d/Functional.cpp does; the rule for fake tensors makes another tensor
        if func is COMPILED_CODE:  # a region wrapped so that checkpointing can save its outputs
            return self._within_operator(args[0], args[1:], {})
        if self._fused is None and (kernel := gpu_kernel(func)) is not None:
            with contextlib.suppress(Exception):  # it launches a missing kernel, or reads a value
                return self._within_operator(kernel, args, kwargs)
        return NotImplemented

    def _next_instant(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        """Count an operator that has run as an instant."""
        self._phases.append(int(self.phase))
        self._labels.append(label(func).removeprefix("aten."))
        if launches(func, args, results, self.device_type):
            self._blocks_in_use.launch(self.now)
        if waits(func, args, kwargs, results, self.device_type):
            self.done(self.now)

    def _within_operator(self, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator's Python function, and record what it allocates."""
        super().__enter__()
        try:
            return kernel(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _fills_new_zeros(self, target: torch.Tensor) -> bool:
        """Whether an operator in backward writes into zeros that were made for it (`INTO_ZEROS`)."""
        made = self._zeros == (self.now - 1, target.untyped_storage()._cdata)
        return made and self.phase is Phase.BACKWARD

    def _take(self, workspace: KernelAllocation, instant: int) -> None:
        """Record memory that an operator's kernel allocates for itself, until it ends or permanently."""
        number, backward = self._count, self.phase is Phase.BACKWARD
        self._blocks_in_use.made(number, backward=backward)
        if workspace.kept and (holder := (workspace.name, backward, self._blocks_in_use.stream(number))) in self._kept:
            return
        self._count, self._kept = number + 1, self._kept | ({holder} if workspace.kept else set())
        size = max(ALLOCATION_UNIT_BYTES, round_up(workspace.num_bytes, ALLOCATION_UNIT_BYTES))
        dies = None if workspace.kept else instant + 1
        self._entries[number] = TracedStorage(workspace.name, size, instant, dies, self.module)
        self._named[number] = (Category.WORKSPACES, workspace.name)

    def _see(self, tensor: torch.Tensor, instant: int) -> None:
        for plain in plain_tensors(tensor):
            if plain.device.type == self.device_type:
                self._begin(plain.untyped_storage(), instant)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """The storage's old memory is freed; its new memory, if any, is allocated now. Whether the storage is on the traced
        device is known from its first tensor: the storage of a fake tensor says "meta"."""
        if storage._cdata not in self._seen:
            return
        if (number := self._alive.get(storage._cdata)) is not None:
            self._free(storage._cdata, number)
        self._begin(storage, self.now)

    def _begin(self, storage: torch.UntypedStorage, instant: int) -> None:
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            weakref.finalize(storage, self._seen.discard, key)
        if key in self._alive:
            return
        number = self._count
        self._count += 1
        size = storage.nbytes()
        if not isinstance(size, int) or size == 0:
            return
        name = self._labels[instant] if instant < len(self._labels) else ""
        rounded = max(ALLOCATION_UNIT_BYTES, round_up(size, ALLOCATION_UNIT_BYTES))
        self._entries[number] = TracedStorage(name, rounded, instant, None, self.module)
        self._alive[key] = number
        self._blocks_in_use.made(number, backward=self.phase is Phase.BACKWARD)
        weakref.finalize(storage, self._free, key, number)

    def _free(self, key: int, number: int) -> None:
        if self._alive.get(key) == number:
            del self._alive[key]
        entry = self._entries.get(number)
        if entry is not None and entry.dies is None:
            entry.dies = self.now
            self._blocks_in_use.gone(number, self.now)

    def name(self, tensors: Iterable[tuple[str, torch.Tensor]], category: Category) -> None:
        """Set the category of living tensors: parameters, gradients, optimizer states. Those of lazy modules get one when
        they have a shape."""
        for name, tensor in tensors:
            if is_lazy(tensor):
                continue
            while is_functorch_wrapped_tensor(tensor):  # torch.func.functional_call puts such in place of parameters
                tensor = get_unwrapped(tensor)
            if is_traceable_wrapper_subclass(tensor):
                self.name(((name, inner) for inner in plain_tensors(tensor)), category)
                continue
            number = self._alive.get(tensor.untyped_storage()._cdata)
            if number is not None and number not in self._named:
                self._named[number] = (category, name)
                if category is not Category.OPTIMIZER_STATES:  # parameters and gradients have their module's name as prefix
                    self._entries[number].module = name.removesuffix(".grad").rpartition(".")[0]

    def timeline(self, start: int, stop: int, again: tuple[int, int] | None = None, *, kept: bool = True) -> Timeline:
        """The tensors at the operations `start` to `stop` (exclusive), counted from 0. `again`: tensors that were allocated
        and freed within this range are added once more at the end. `kept`: they live as long as something keeps them
        (`kept_until`), otherwise until Python and autograd have released them."""
        first, last = again or (stop, stop)
        end, later = stop - start + last - first, stop - start - first
        reusable = self._blocks_in_use.reusable()
        entries = []
        for number, one in self._entries.items():
            born, dies = one.born, one.dies
            if kept and dies is not None and number in self.kept_until:
                until = self.kept_until[number]
                dies = None if until is None else max(dies, until)
            ends = stop if dies is None else dies
            waited = reusable.get(number, start)
            free = end if waited is None else min(waited - start, end)
            stream = self._blocks_in_use.stream(number)
            category, called = self._named.get(number, (self._guess(born, ends, stop), one.name))
            if born < stop and ends > start:
                gone = end if ends >= stop else ends - start
                entries.append(Entry(called, category, one.num_bytes, max(born - start, 0), gone, one.module, stream, free))
            if again is not None and first <= born and dies is not None and dies <= last:
                entries.append(Entry(called, category, one.num_bytes, born + later, dies + later, one.module, stream))
        phases = self._phases[start:stop] + self._phases[first:last]
        labels = self._labels[start:stop] + self._labels[first:last]
        return Timeline.from_entries(entries, phases, labels)

    def _guess(self, born: int, dies: int, stop: int) -> Category:
        """The category of an unnamed storage, from its lifetime: saved from forward for backward, or temporary."""
        phase = self._phases[born] if born < len(self._phases) else 0
        last = self._phases[min(dies, stop) - 1]
        if phase == Phase.OPTIMIZER_STEP:
            return Category.OPTIMIZER_TEMPORARIES
        if phase in (Phase.FORWARD, Phase.LOSS) and last >= Phase.BACKWARD:
            return Category.ACTIVATIONS
        return Category.INPUTS if phase == Phase.INIT else Category.TEMPORARIES
