"""Skipped layers: each returns its input, so that a step of a deep network takes as long as one of a shallow network.

The other layers keep their numbers, because a network may decide by a layer's number what the layer does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

NUMBERS = re.compile(r"\w*(idx|index|layer_id|layer_num)\w*")
"""Names of attributes that have the number of a layer."""


@dataclass(frozen=True)
class Results:
    """What a skipped layer returns. `spec`: the structure of its results; `sources`: for each of them, the position of the
    argument that is returned in its place (None: no argument is like it)."""

    spec: TreeSpec
    sources: tuple[int | None, ...]

    @classmethod
    def of(cls, arguments: Any, results: Any) -> Results:
        """The results of a layer that has run: arguments that it returned as they were, else the first of that shape."""
        given = tree_leaves(arguments)
        leaves, spec = tree_flatten(results)
        return cls(spec, tuple(_source(leaf, given) for leaf in leaves))

    def from_arguments(self, arguments: Any) -> Any:
        """The results for other arguments of the same structure."""
        given = tree_leaves(arguments)
        return tree_unflatten([None if source is None else given[source] for source in self.sources], self.spec)


def _source(result: Any, given: Sequence[Any]) -> int | None:
    if not isinstance(result, torch.Tensor):
        return None
    same = (index for index, one in enumerate(given) if one is result)
    alike = (i for i, one in enumerate(given) if isinstance(one, torch.Tensor) and one.shape == result.shape)
    return next(chain(same, alike), None)


class Skipped(torch.nn.Module):  # type: ignore[misc]
    """Takes the place of a layer. It has the layer's plain attributes, but no weights and no submodules."""

    def __init__(self, layer: torch.nn.Module, results: Results) -> None:
        super().__init__()
        for part in layer.modules():
            part._parameters.clear()
            part._buffers.clear()
        self.__dict__.update(_layer=layer, _results=results)  # a module's own setter would make the layer a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The arguments, in the places of the layer's results."""
        return self.__dict__["_results"].from_arguments((arguments, keywords))


_SKIPPED: ContextVar[Mapping[str, Results]] = ContextVar("skipped_layers", default=MappingProxyType({}))


@contextmanager
def skipping(layers: Mapping[str, Results]) -> Iterator[None]:
    """Inside this context, networks are built with these layers skipped. `layers`: name of the module -> its results."""
    token = _SKIPPED.set(layers)
    try:
        yield
    finally:
        _SKIPPED.reset(token)


def without_skipped(model: torch.nn.Module) -> torch.nn.Module:
    """`model`, with the layers replaced that are to be skipped."""
    for name, results in _SKIPPED.get().items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, Skipped(model.get_submodule(name), results))
    return model


@contextmanager
def observed(blocks: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, Results]]:
    """A context in which the results of each of `blocks` are noted: name -> results."""
    found: dict[str, Results] = {}

    def note(name: str) -> Any:
        return lambda _, arguments, keywords, results: found.update({name: Results.of((arguments, keywords), results)})

    handles = [block.register_forward_hook(note(name), with_kwargs=True) for name, block in blocks.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def numbered_kinds(blocks: Sequence[torch.nn.Module]) -> list[int]:
    """For each block, the number of its kind: blocks are of one kind if their modules have the same classes and the same
    plain attributes, but for a layer's number."""
    kinds: dict[str, int] = {}
    return [kinds.setdefault(repr([*map(_attributes, block.modules())]), len(kinds)) for block in blocks]


def _attributes(part: torch.nn.Module) -> tuple[str, list[tuple[str, object]]]:
    plain = (one for one in vars(part).items() if isinstance(one[1], (bool, int, float, str)))
    return type(part).__name__, [(name, value) for name, value in plain if not NUMBERS.fullmatch(name)]
