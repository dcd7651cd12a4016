"""The dispatch mode of a dry run: tensors on the GPU and all weights are fake; small tensors on the CPU are real.

So batches, indices and schedules have values, while a network of any size takes no memory. A value read from the GPU is
replaced by a plausible one, with a note.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.jit._builtins import _register_builtin
from torch.nested._internal.nested_int import NestedIntNode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from peakcast.collectors.dryrun import checks, collective_values, finite
from peakcast.collectors.dryrun.noted import RunFindings, asking
from peakcast.collectors.dryrun.resizing import Resizing
from peakcast.collectors.tracing import copied_tensors
from peakcast.collectors.tracing.known_values import KnownValuesMode, label, value_of

REAL_FLOAT_BYTES = 2**16
"""Floating-point tensors made on the CPU are real up to this size: they are coefficients, not weights."""
REAL_BYTES = 2**30
"""Other tensors, such as a file of tokens, are real up to this size."""
aten = torch.ops.aten
UNIQUE = (
    *(aten._unique2.default, aten.unique_consecutive.default),
    *(aten.unique_dim.default, aten.unique_dim_consecutive.default),
)
"""Operators that return the different elements, or rows, the number of each element's among them, and how often each is."""
CPU = torch.device("cpu")


class ScriptMode(KnownValuesMode):
    """Makes a script's tensors fake if they are on a GPU or large; `notes` gets what was made up. For small integer and
    boolean tensors (tokens, masks, positions), the values are known as long as they follow from the script's own data."""

    def __init__(self, notes: RunFindings, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.notes = notes
        self.device = device
        """This rank's GPU. Any GPU that a script names means this one, as a single rank sees no other."""
        self.resizing: Resizing | None = None
        """Changes the size of the script's batches; None: they keep their size."""
        self.batch: tuple[int, ...] = ()
        """Shape of the largest batch of whole numbers that came to the GPU: the tokens of networks without modules."""
        self._sizes = FakeTensorMode()
        self._jagged = itertools.count()
        self._on_fake_weights = False
        """Whether an operator runs on a fake tensor of the CPU, such as a weight: what it makes on the way is fake as
        well."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of `func`."""
        kwargs = self._on_own_device(kwargs or {})
        if getattr(func, "overloadpacket", None) is aten.to:  # in inference mode `Tensor.to` comes as it was called
            with self:
                return func.decompose(*args, **kwargs)
        if self.resizing is not None:
            args = self.resizing.arguments(func, args, kwargs)
        if self._is_real(func, args, kwargs):
            return func(*args, **kwargs)
        if func is aten._to_copy.default and isinstance(args[0], FakeTensor) and kwargs.get("device") == CPU:
            return self._on_the_cpu(args[0], kwargs)
        if func is aten._to_copy.default and kwargs.get("device") == self.device:
            if isinstance(args[0], FakeTensor):
                args[0].constant = None  # otherwise a fake tensor with known numbers would move them
            whole_numbers = not (args[0].is_floating_point() or args[0].dtype is torch.bool)
            if args[0].ndim > 1 and whole_numbers and args[0].device != self.device:
                self.batch = max(self.batch, tuple(args[0].shape), key=math.prod) if self.batch else tuple(args[0].shape)
        outer = self._on_fake_weights
        self._on_fake_weights = outer or any(isinstance(one, FakeTensor) and one.device == CPU for one in args)
        try:
            result = super().dispatch(func, types, args, kwargs)
        except DataDependentOutputException:
            return self._value(func, args)
        except DynamicOutputShapeException:
            return self._sample(func, args, kwargs)
        finally:
            self._on_fake_weights = outer
        collective_values.follow(func, args, kwargs, result)
        finite.follow(func, args, result)
        if label(func) in ("aten.sum.default", "aten.count_nonzero.default") and _is_mask(args[0]):
            result.counted = args[0].numel()
        if self.resizing is not None:
            _check_rows(func, args)
            return self.resizing.result(args, result)
        return result

    def _on_the_cpu(self, tensor: FakeTensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """A fake tensor's copy on the CPU: real with its values, if they are known, else fake."""
        if (known := value_of(tensor)) is not None:
            if getattr(known, "guessed", False):
                self._reads_a_guess()
            with _disable_current_modes():
                return aten._to_copy.default(known, **kwargs)
        with in_kernel_invocation_manager(self):
            meta = aten._to_copy.default(tensor, **{**kwargs, "device": torch.device("meta")})
        return FakeTensor(self, meta, CPU)

    def _follows(self, func: Any, args: Any, kwargs: Any) -> bool:
        if not super()._follows(func, args, kwargs):
            return False
        # not for random tensors, as the script's own random numbers would change
        noise = "rand" in label(func) or kwargs.get("generator") is not None
        return not noise and torch._guards.TracingContext.try_get() is None

    def _reads_a_guess(self) -> None:
        self.notes.balanced()

    def _keeps(self, result: torch.Tensor) -> bool:
        return not result.is_floating_point() and super()._keeps(result)

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> Any:
        """The size of the ragged dimension of a jagged tensor, as for real tensors: this mode has no symbols."""
        return torch.SymInt(NestedIntNode(next(self._jagged) if nt_tensor_id is None else nt_tensor_id, 1))

    def _on_own_device(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """`kwargs` with this rank's GPU in place of any other, and without pinning, which a CPU-only build cannot do."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": self.device}
        return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs

    def _is_real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether `func` can really run: its tensors are all real and on the CPU, or it makes a small one there."""
        for one in args:  # nearly always there is a fake one, and it is quick to check
            if isinstance(one, FakeTensor):
                return False
        if torch._guards.TracingContext.try_get() is not None:
            return False
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return False
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or is_traceable_wrapper_subclass(tensor):
                return False
        if func is aten._to_copy.default or tensors:
            return not any(isinstance(leaf, torch.device) and leaf.type != "cpu" for leaf in args)
        return not self._on_fake_weights and self._makes_little(func, args, kwargs)

    def _makes_little(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether `func` makes, from no other tensor, one that is small enough to be real."""
        try:
            with self._sizes:
                made = func(*args, **kwargs)
        except Exception:  # it is not a factory: it runs and reports errors itself
            return True
        return all(
            tensor.numel() * tensor.element_size() <= (REAL_FLOAT_BYTES if tensor.is_floating_point() else REAL_BYTES)
            for tensor in tree_leaves(made)
            if isinstance(tensor, torch.Tensor)
        )

    def _value(self, func: Any, args: Any) -> Any:
        """A plausible value: that of finite numbers, if it follows from that; else 1 for a number, the largest possible for
        a count; for a boolean, that with which the script raises no error, or else False."""
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        dtype = tensor.dtype if tensor is not None else torch.bool
        answer: Any = finite.value_if_finite(tensor)
        checked = checks.expected(asking()) if dtype is torch.bool else None
        if answer is not None and checked is None:
            pass
        elif func is aten._local_scalar_dense.default and dtype is not torch.bool:
            count = getattr(tensor, "counted", None)
            answer = 1.0 if dtype.is_floating_point else 1 if count is None else count
        else:
            answer = bool(checked)
        self.notes.value("a truth value" if isinstance(answer, bool) else f"a {str(dtype).removeprefix('torch.')}", answer)
        return answer

    def _sample(self, func: Any, args: Any, kwargs: Any) -> Any:
        """All elements that a mask could select; all elements as different ones; as few bins as numbers can fill."""
        tensor = args[0]
        if func is aten.bincount.default:
            bins = max(1, args[2] if len(args) > 2 else kwargs.get("minlength", 0))
            self.notes.value("how many bins numbers fill", bins)
            return tensor.new_empty((bins,), dtype=torch.int64 if kwargs.get("weights") is None else torch.float64)
        self.notes.value("how many entries a mask chooses", f"all {tensor.numel():,}")
        with self:
            if func is aten.nonzero.default:
                return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)
            if func is aten.masked_select.default:
                return tensor.new_empty((tensor.numel(),))
            if func in UNIQUE:
                along = len(args) > 1 and func in (aten.unique_dim.default, aten.unique_dim_consecutive.default)
                count, shape = (tensor.shape[args[1]], tensor.shape) if along else (tensor.numel(), (tensor.numel(),))
                numbers = tensor.new_empty((count,) if along else tensor.shape, dtype=torch.int64)
                return tensor.new_empty(shape), numbers, tensor.new_empty((count,), dtype=torch.int64)
            if func is aten.repeat_interleave.Tensor:
                return tensor.new_empty((tensor.numel(),), dtype=torch.int64)
            if func is aten.index.Tensor and len([index for index in args[1] if index is not None]) == 1:
                position = next(i for i, index in enumerate(args[1]) if index is not None)
                mask = args[1][position]
                shape = tensor.shape
                return tensor.new_empty((*shape[:position], mask.numel(), *shape[position + mask.ndim :]))
        raise DynamicOutputShapeException(func)


def _check_rows(func: Any, args: Any) -> None:
    """Check indices as a GPU does: a table of positions has a last row. Raises: IndexError."""
    if func is aten.embedding.default and (rows := value_of(args[1])) is not None and rows.numel():
        with _disable_current_modes():
            last = int(rows.max())
        if last >= args[0].shape[0]:
            raise IndexError(f"row {last:,} is asked for of a table of {args[0].shape[0]:,}")


def _is_mask(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bool


def install(mode: ScriptMode) -> None:
    """Make fake tensors answer questions outside of operators, and keep a network's parameters the same objects when it is
    moved."""
    for name in ("tolist", "numpy", "__array__"):
        setattr(torch.Tensor, name, _numbers(name, getattr(torch.Tensor, name)))
    make_of_numbers = torch.tensor

    @functools.wraps(make_of_numbers)
    def of_numbers(data: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        """In C++ it pins memory, and reads tensors in lists of numbers, where no mode sees it."""
        if isinstance(data, (list, tuple)) and (read := [one for one in tree_leaves(data) if isinstance(one, FakeTensor)]):
            keywords = {"dtype": read[0].dtype, **keywords}
            data = tree_map_only(FakeTensor, lambda one: one.tolist(), data)
        return make_of_numbers(data, **keywords)

    torch.tensor = of_numbers
    _register_builtin(torch.tensor, "aten::tensor")  # for torch.jit.script, as in torch.distributed.optim
    # as torch.Tensor does for its own class alone
    FakeTensor.__format__ = lambda tensor, form: format(tensor.item() if tensor.ndim == 0 else str(tensor), form)
    copied_tensors.install()
    make = torch.nn.Parameter.__new__

    def make_fake(cls: type[torch.nn.Parameter], data: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """Make small weights fake as well, so that they can be moved to the GPU and remain the same parameter."""
        if type(data) in (torch.Tensor, torch.nn.Parameter) and data.device.type == "cpu":
            data = mode.fake_tensor_converter.from_real_tensor(mode, data.detach())
        return make(cls, data, *arguments, **keywords)

    torch.nn.Parameter.__new__ = make_fake  # type: ignore[method-assign,assignment]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign,assignment]


def _apply(self: torch.nn.Module, convert: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply` (behind `.to`, `.float`). As with real tensors, a parameter stays the same object, which an optimizer
    may already have, and gets other data; torch's own would swap fake tensors, which they refuse."""
    if recurse:
        for child in self.children():
            child._apply(convert)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            converted = convert(parameter)
            gradient = convert(parameter.grad) if parameter.grad is not None else None
        if converted is parameter:
            continue
        from_or_to_meta = (parameter.device.type == "meta") != (converted.device.type == "meta")  # as torch itself does
        if is_traceable_wrapper_subclass(parameter) or from_or_to_meta or not isinstance(converted, FakeTensor):
            made = self._parameters[name] = torch.nn.Parameter(converted, parameter.requires_grad)
            for note, value in vars(parameter).items():
                vars(made).setdefault(note, value)
            continue
        parameter.grad = None
        parameter.data = converted
        parameter.grad = gradient
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = convert(buffer)
    return self


def _numbers(name: str, real: Any) -> Any:
    """`Tensor.tolist` or `Tensor.numpy`; for a fake tensor they give ones."""

    def read(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        known = value_of(tensor) if isinstance(tensor, FakeTensor) else tensor
        if known is not None:
            if getattr(known, "guessed", False) and isinstance(tensor.fake_mode, ScriptMode):
                tensor.fake_mode.notes.balanced()
            with _disable_current_modes() if known is not tensor else contextlib.nullcontext():
                return real(known, *arguments, **keywords)
        if isinstance(tensor.fake_mode, ScriptMode):
            tensor.fake_mode.notes.value(f"{tensor.numel():,} numbers", "ones")
        ones = np.ones(tuple(tensor.shape), dtype=_numpy_dtype(tensor.dtype))
        return ones.tolist() if name == "tolist" else ones

    return read


def _numpy_dtype(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return np.float64 if dtype is torch.float64 else np.float32
    return np.bool_ if dtype is torch.bool else np.int64
