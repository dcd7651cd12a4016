"""The modules of a block that have parameters, and which of them each operation runs in.

A few of transformers' modules have another name than the operations that the ledger writes for them (`CALLED`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.module_tree import ADAPTER, CLONE, ModulePath, path_of

CALLED = {
    ModulePath.of("post_attention_layernorm"): ModulePath.of("pre_feedforward_layernorm"),
    ModulePath.of("norm"): ModulePath.of("final_norm"),
}
"""Modules whose operations have a different name: module -> the module that operations name."""
WITHIN = dict.fromkeys(("qkv_split", "relative_position", "relative_position_bucket"), "self_attn")
"""Operation -> its outermost module, where the name of the operation does not contain it."""


@dataclass(frozen=True, slots=True)
class RanIn:
    """Where an operation runs. `path`: the module path in its label. `owner`: the module with parameters that runs it; None
    for the sum of a matrix's output and its adapter's, and for the copy of a quantised matrix's output before that sum.
    `linear`: the matrix to whose adapter the operation belongs; otherwise `path`."""

    path: ModulePath
    owner: ModulePath | None
    linear: ModulePath
    outermost: str
    """The module of the block that contains the others; "" if the operation is the block's own."""


class ParameterModules:
    """The modules of a block with these tensors, in the order of registration. `operations`: the labels of what the block
    runs. `leaf`: the name of a module that has the parameters of all modules inside it; "": none."""

    def __init__(self, tensors: Sequence[StoredTensor], operations: Iterable[str], leaf: str = "") -> None:
        self.everything = tensors
        self.leaf = ModulePath.of(leaf) if leaf else None
        paths, own = [path_of(label) for label in operations], {tensor.path for tensor in tensors}
        self._tensors: dict[ModulePath, tuple[StoredTensor, ...]] = {}
        for tensor in tensors:
            module = self._registered_as(tensor.path, paths, own)
            self._tensors[module] = (*self._tensors.get(module, ()), tensor)

    def _registered_as(
        self, module: ModulePath, operations: Sequence[ModulePath], own: Collection[ModulePath]
    ) -> ModulePath:
        """The path by which operations call a module."""
        if self.leaf is not None and module.is_inside(self.leaf):
            return self.leaf
        called = CALLED.get(module)
        if called is None or called in own or not any(path.is_inside(called) for path in operations):
            return module
        return called

    def __contains__(self, module: ModulePath) -> bool:
        return module in self._tensors

    def tensors(self, module: ModulePath) -> tuple[StoredTensor, ...]:
        """The tensors of a module itself."""
        return self._tensors.get(module, ())

    def without_operation(self, ran: Collection[ModulePath | None]) -> tuple[StoredTensor, ...]:
        """The tensors of all modules but those that have run, and adapters."""
        rest = (one for module, one in self._tensors.items() if module not in ran and not module.is_adapter)
        return tuple(tensor for one in rest for tensor in one)

    def of_operation(self, label: str) -> RanIn:
        """Where the operation `label` runs."""
        path = path_of(label)
        around = (ModulePath(path.names[:depth]) for depth in range(len(path.names), 0, -1))
        owner = next((module for module in around if module in self._tensors), None)
        if owner is not None and path.beyond(owner)[:1] in ((ADAPTER,), (CLONE,)):
            owner = None
        return RanIn(path, owner, path.adapted, WITHIN.get(label, path.outermost))
