"""Fake tensors whose values are known: token ids, grids of patches, and what is computed from them.

A fake tensor has a shape and no values. If shapes depend on values (the number of image tokens, the end of a window of
patches), small tensors that are computed from known ones are also computed with real values, on the CPU, without being
traced.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from peakcast.collectors.tracing.cache_keys import CheaperKeys

MOST_ELEMENTS = 2**21
"""Most elements of a tensor whose values are kept; more than the tokens of the largest batch that is recorded."""
_WITHOUT_VALUES = (
    *("aten.empty", "aten.new_empty", "aten.rand.", "aten.rand_like", "aten.randn", "aten.native_dropout"),
    "aten.as_strided",
)
"""Prefixes of the names of operators whose results have no known values: uninitialised memory, random numbers, or another
view of a storage."""


_LABELS: dict[int, tuple[str, Any]] = {}
"""Identity of an operator -> its name and itself, which keeps the identity its own. An operator's own hash is computed in
Python, at each look-up."""


def label(operator: Any) -> str:
    """The name of an operator, "aten.add.Tensor". Kept, because torch builds the text at each call."""
    found = _LABELS.get(id(operator))
    if found is None:
        found = _LABELS[id(operator)] = str(operator), operator
    return found[0]


def install() -> None:
    """Change this process permanently: `torch.tensor` accepts numbers that are fake tensors, which it reads where no mode
    sees it; `tolist` reads all values at once; and a number can be formatted into a text (the name of an expert in
    Switch)."""
    if hasattr(torch.tensor, "__wrapped__"):
        return
    make, to_list = torch.tensor, FakeTensor.tolist

    @functools.wraps(make)
    def made(data: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return make(_plain(data), *arguments, **keywords)

    def listed(tensor: FakeTensor) -> Any:
        value = value_of(tensor)
        if value is None:
            return to_list(tensor)
        with _disable_current_modes():
            return value.tolist()

    def formatted(tensor: FakeTensor, specification: str) -> str:
        value = value_of(tensor) if tensor.ndim == 0 else None
        if value is None:
            return object.__format__(tensor, specification)
        with _disable_current_modes():
            return format(value.item(), specification)

    torch.tensor, FakeTensor.tolist, FakeTensor.__format__ = made, listed, formatted


class KnownValuesMode(CheaperKeys):
    """Makes fake tensors; small ones have values if everything from which they are computed has values."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The fake result, with the real values if they are known. If they are not, it raises what FakeTensorMode
        raises."""
        kwargs = kwargs or {}
        known = self._follows(func, args, kwargs)
        values = _on_the_cpu(args, kwargs) if known else ((), {})  # now, because code inside may forget them
        guessed = known and _are_guessed(values)
        try:
            result = super().dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if known:
                if guessed:
                    self._reads_a_guess()
                return self._faked(_really(func, *values), args)
            if func is torch.ops.aten.index.Tensor and (positions := _positions(args[1])) is not None:
                with self:
                    return func(args[0], [None if one is None else _on(one, args[0]) for one in positions])
            raise
        if known and all(self._keeps(one) for one in tree_iter(result) if isinstance(one, torch.Tensor)):
            for fake, real in zip(tree_iter(result), tree_iter(_really(func, *values)), strict=True):
                if isinstance(fake, FakeTensor):
                    fake.known_value = real
                    real.guessed = guessed
        elif (largest := _largest(func, args, kwargs, result)) is not None and largest[0].numel() <= MOST_ELEMENTS:
            largest[0].known_value = _in_turn(*largest)
        else:
            _forget_written(func, args)
            if (number := _ALL_OF.get(label(func))) is not None and isinstance(result, FakeTensor):
                result.all_of = number, version_of(result)
        return result

    def _reads_a_guess(self) -> None:
        """Called when a value is read that follows from indices of unknown numbers; for subclasses."""

    def _follows(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the values of `func`'s result should be computed."""
        return _are_known(func, args, kwargs)

    def _keeps(self, result: torch.Tensor) -> bool:
        """Whether the values of this result are kept."""
        return bool(result.numel() <= MOST_ELEMENTS)

    def _faked(self, real: Any, args: Any) -> Any:
        """Fake tensors with the values of `real`, on the device of the arguments from which they were made."""
        device = next(one.device for one in tree_iter(args) if isinstance(one, torch.Tensor))

        def fake(value: torch.Tensor) -> torch.Tensor:
            with self:
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            made.known_value = value  # type: ignore[attr-defined]
            return made

        return tree_map_only(torch.Tensor, fake, real)


_LARGEST: dict[str, tuple[int, int | None]] = {
    "aten.topk.default": (2, -1),
    "aten.max.dim": (1, None),
    "aten.argmax.default": (1, None),
}
"""Operators that find the largest numbers along a dimension -> (position of the dimension among the arguments, its default;
None: all dimensions)."""


def _largest(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[torch.Tensor, int] | None:
    """(indices that `func` has found along a dimension, size of that dimension); None for other operators."""
    if (operator := label(func)) not in _LARGEST:
        return None
    place, default = _LARGEST[operator]
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    if dim is None or not args[0].ndim:
        return None
    return (result if isinstance(result, torch.Tensor) else result[1]), args[0].shape[dim]


def _in_turn(chosen: torch.Tensor, choices: int) -> torch.Tensor:
    """Indices of the largest of unknown numbers: every index equally often, as a balanced router would distribute
    tokens."""
    with _disable_current_modes():
        taken = (torch.arange(chosen.numel()) % choices).reshape(chosen.shape)
    taken.guessed = True  # type: ignore[attr-defined]
    return taken


_ALL_OF = {
    **dict.fromkeys(("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default"), 0),
    **dict.fromkeys(("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default"), 1),
}
"""Operators that make a tensor of one number, whatever the values of their arguments. Such a tensor has only a note of it
(`all_of`): most of them are large, and soon written."""


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor; None if they are not known."""
    if isinstance(tensor, FakeTensor):
        if (found := _kept_value(tensor)) is not None:
            return found
        if not _is_known(tensor):
            return None
        with _disable_current_modes():
            number: float = tensor.all_of[0]  # type: ignore[attr-defined]
            # not `torch.full`, which DeepSpeed's zero.Init replaces by one that makes tensors on the GPU
            return torch.ops.aten.full.default(tensor.shape, number, dtype=tensor.dtype, device=torch.device("cpu"))
    return tensor if tensor.device.type == "cpu" and tensor.numel() <= MOST_ELEMENTS else None


def _plain(data: Any) -> Any:
    """`data` with the fake tensors of a list replaced by their numbers."""
    if isinstance(data, (list, tuple)):
        return [_plain(one) for one in data]
    return data.item() if isinstance(data, FakeTensor) and data.ndim == 0 else data


def _are_known(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the values of the result follow from known ones."""
    for one in args:  # nearly always an unknown one, and quick to check
        if isinstance(one, FakeTensor) and not _is_known(one):
            return False
    if not label(func).startswith("aten.") or label(func).startswith(_WITHOUT_VALUES):
        return False
    return all(_is_known(one) for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor))


def _is_known(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, FakeTensor):
        return value_of(tensor) is not None
    if _kept_value(tensor) is not None:
        return True
    noted = getattr(tensor, "all_of", None)
    return noted is not None and noted[1] == version_of(tensor) and tensor.numel() <= MOST_ELEMENTS


def _kept_value(tensor: FakeTensor) -> torch.Tensor | None:
    """The values that were kept with a tensor; None if there are none, or if the tensor has been given other memory since
    (`parameter.data = ...`, as ZeRO-3 does when it gathers and releases a weight), which no operator shows."""
    kept: torch.Tensor | None = getattr(tensor, "known_value", None)
    return kept if kept is not None and kept.shape == tensor.shape else None


def version_of(tensor: torch.Tensor) -> int:
    """How often the memory of a tensor was written, through whichever view of it."""
    return 0 if tensor.is_inference() else tensor._version


def _are_guessed(values: Any) -> bool:
    return any(getattr(one, "guessed", False) for one in tree_iter(values))


def _on_the_cpu(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with tensors replaced by their values."""
    leaves, spec = tree_flatten((args, kwargs))
    found: tuple[Any, Any] = tree_unflatten([_on_cpu(leaf) for leaf in leaves], spec)
    return found


def _really(func: Any, args: Any, kwargs: Any) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    with _disable_current_modes(), torch.no_grad():
        try:
            return func(*args, **kwargs)
        except NotImplementedError:  # on the CPU only for floats: histc, which counts the tokens of each expert
            dtype = next(one.dtype for one in tree_iter(args) if isinstance(one, torch.Tensor))
            made = func(*tree_map_only(torch.Tensor, torch.Tensor.double, args), **kwargs)
            return tree_map_only(torch.Tensor, lambda one: one.to(dtype), made)


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return value_of(leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _positions(indices: Any) -> list[Any] | None:
    """`indices` with masks replaced by the positions that they select; None if the values of a mask are not known."""
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
            continue
        value = value_of(index)
        if value is None:
            return None
        with _disable_current_modes():
            found += value.nonzero().unbind(1)
    return found


def _on(index: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return index if isinstance(index, FakeTensor) else torch.empty(index.shape, dtype=index.dtype, device=tensor.device)


def _forget_written(func: Any, args: Any) -> None:
    """Forget the values of tensors that the operator overwrites."""
    for place in _written(func):
        for one in tree_iter(args[place]) if place < len(args) else ():
            if isinstance(one, FakeTensor):
                one.known_value = one.all_of = None


_WRITTEN: dict[str, tuple[int, ...]] = {}


def _written(func: Any) -> tuple[int, ...]:
    """The places of the arguments that the operator overwrites."""
    operator = label(func)
    if operator not in _WRITTEN:
        aliases = [argument.alias_info for argument in func._schema.arguments]
        _WRITTEN[operator] = tuple(place for place, one in enumerate(aliases) if one is not None and one.is_write)
    return _WRITTEN[operator]
