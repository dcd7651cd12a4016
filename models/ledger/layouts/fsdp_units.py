"""Units: tensors that FSDP gathers and reduces together, and how a network is divided into them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

import numpy as np

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.module_tree import LORA_A, LORA_B, WEIGHT, BlockKind, block_of, module_of
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.placing import BlockRun, Ints
from peakcast.models.ledger.tape.template import Template

ENDS = (BlockKind.EMBEDDING.value, BlockKind.HEAD.value)
ADAPTER_MATRICES = (LORA_A, LORA_B)


class UnitPlace(Enum):
    """The part of the network that a unit has."""

    ROOT = "root"
    """What has no unit of its own; it is gathered first."""
    TAIL = "tail"
    """The final norm and the lm_head."""
    INSIDE = ""
    """A layer, or a part of the network that is found by its class."""


@dataclass(slots=True, eq=False)
class Unit:
    """Tensors that are gathered and reduced together, and what exists of them at the moment. A unit equals only itself."""

    name: str
    modules: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]
    stays_after_forward: bool = False
    """Whether it stays gathered after forward."""
    reduces_at_end: bool = False
    """Whether its gradients are reduced only at the end of backward, because none of its inputs has a gradient."""
    prefetched_unused: bool = False
    """Whether it is prefetched in backward and then not used: its output has no gradient, so its backward does not run."""
    operation: str = ""
    """The one operation of a block that reads its tensors, for which alone they are gathered; "": the whole block."""
    gradient_operation: str = ""
    """The operation that makes its weight's gradient, if that is one of its own, as in compiled graphs."""
    place: UnitPlace = UnitPlace.INSIDE
    hook: Mark | None = None
    """The operation whose backward waits for the gather and starts the next prefetch; None: the block's first."""
    sent: list[int] = field(default_factory=list)
    """Handles of an all-gather's output that has not been copied out yet."""
    gathered: list[int] = field(default_factory=list)
    """Handles of the unsharded tensors."""
    gradient: list[int] = field(default_factory=list)
    """Handles of the reduced gradients that wait for the optimizer."""
    runs: list[BlockRun] = field(default_factory=list)
    """Backward runs whose full gradients still exist."""
    accumulated: list[int] = field(default_factory=list)
    """Handles of full gradients of earlier micro-batches that are no longer the tensors that backward made."""
    trained: list[StoredTensor] = field(init=False)
    """Those of its tensors that the optimizer updates. If there are any, FSDP1 makes one gradient for all tensors."""

    def __post_init__(self) -> None:
        self.trained = [tensor for tensor in self.tensors if tensor.trains]

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations for which alone its tensors are gathered."""
        return tuple(name for name in (self.operation, self.gradient_operation) if name)

    def gradients_in(self, template: Template) -> Ints | None:
        """The places of its gradients among those of a block's parameters; None if it has all of them. (The norms that are
        counted with a matrix are left out.)"""
        if not self.operation:
            return None
        matrix = self.tensors[-1].path
        return np.flatnonzero([module_of(name) == matrix for name in template.parameters])


@dataclass(frozen=True)
class OutsideLayers:
    """What FSDP makes of a network outside of its layers. `table`: the tensors of the token embedding; `tail`: those of
    final norm and lm_head, with the token embedding's if the two share a weight (accelerate 1.15
    `fsdp2_prepare_model`)."""

    table: tuple[StoredTensor, ...]
    tail: tuple[StoredTensor, ...]
    shares_table: bool
    """Whether the lm_head reads the token embedding's weight."""
    tail_begins: str = BlockKind.HEAD.value
    """The block before which the first of the tail's modules runs, if that is not the token embedding."""
    root: tuple[str, ...] = ENDS
    """The blocks that have no unit of their own."""
    classes: tuple[tuple[str, tuple[StoredTensor, ...]], ...] = ()
    """(block, tensors) of modules outside of layers that FSDP finds by their class, as it finds layers."""


def named_ends(
    tensors: Iterable[StoredTensor], *, tied: bool, norm_apart: bool, head_apart: bool = False
) -> OutsideLayers:
    """The units outside the layers of a network whose tensors have Llama's names. `tied`: the lm_head reads the token
    embedding's weight, even if the head has no tensor of its own. `norm_apart`: the final norm belongs to the root;
    `head_apart`: the head does, as that of a reward model, which `get_output_embeddings` does not give."""
    ends: dict[BlockKind, list[StoredTensor]] = {BlockKind.EMBEDDING: [], BlockKind.HEAD: []}
    for tensor in tensors:
        ends.get(tensor.block, []).append(tensor)
    table, head = [tensor for tensor in ends[BlockKind.EMBEDDING] if tensor.of_token_table], ends[BlockKind.HEAD]
    if head_apart:
        return OutsideLayers(tuple(table), tuple(one for one in head if not (one.of_lm_head or norm_apart)), False)
    # a head without tensors: a pipeline stage that is not the last, or a final norm without weights (OLMo)
    tied = (tied or bool(head)) and not any(tensor.is_lm_head for tensor in head)
    tail = [tensor for tensor in head if tensor.of_lm_head or not norm_apart]
    return OutsideLayers(tuple(table), (*table, *tail) if tied else tuple(tail), tied)


def units_by_layer(
    tensors: Iterable[StoredTensor],
    ends: OutsideLayers,
    *,
    ends_apart: bool = False,
    adapters_apart: bool = False,
    first_layer_without_gradient: bool = False,
) -> list[Unit]:
    """A unit per decoder layer, and one or more for the rest: the root, which is gathered first and stays gathered; or,
    with `ends_apart`, the token table as one unit, final norm and lm_head as another (a single unit if they share the
    table), and a root with what is left. Returned in the order in which their forward ends; the root is last.

    `adapters_apart`: each adapter matrix is a unit of its own, and each copy of a module outside the layers.
    `first_layer_without_gradient`: no input of the first layer has a gradient.
    """
    groups: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.module, []).append(tensor)
    left = [tensor for name, group in groups.items() if name in ends.root for tensor in group]
    units: list[Unit] = []
    for name, group in ends.classes:
        units.append(Unit(f"{name}.class", (name,), group, reduces_at_end=block_of(name) is BlockKind.EMBEDDING))
    layers = [name for name in groups if name not in ends.root]
    for index, name in enumerate(layers):
        apart = [tensor for tensor in groups[name] if adapters_apart and tensor.path.name in ADAPTER_MATRICES]
        units += [Unit(f"{name}.{one.name}", (name,), (one,), operation=str(one.path)) for one in apart]
        rest = [tensor for tensor in groups[name] if tensor not in apart]
        units.append(Unit(name, (name,), tuple(rest), reduces_at_end=first_layer_without_gradient and index == 0))
    if adapters_apart:
        units = _with_copies(units, left)
    if ends_apart:
        units = _with_ends(units, ends, first_layer_without_gradient)
    taken = {tensor for unit in units for tensor in unit.tensors}
    left = [tensor for tensor in left if tensor not in taken]
    if left or not ends_apart:
        units.append(Unit("root", ends.root, tuple(left), True, reduces_at_end=True, place=UnitPlace.ROOT))
    return units


def units_by_module(tensors: Iterable[StoredTensor], *, compiled: bool = False) -> list[Unit]:
    """A unit per matrix: what FSDP1 makes of an auto_wrap_policy that wraps every module. Norms, which have a few KB, are
    counted with the matrix that follows them. `compiled`: layers' operations have the names of `compiled/forward.py`."""
    units: list[Unit] = []
    waiting: list[StoredTensor] = []
    groups = {key: list(group) for key, group in groupby(tensors, lambda tensor: (tensor.module, str(tensor.path)))}
    for (module, path), group in groups.items():
        waiting += group
        if any(len(tensor.shape) > 1 for tensor in group):
            name = path.rsplit(".", 1)[-1].removesuffix("_proj")
            alone = Unit(f"{module}.{path}", (module,), tuple(waiting), operation=path)
            if compiled and block_of(module) is BlockKind.LAYER:
                alone.operation, alone.gradient_operation = name, f"{name}.{WEIGHT}.grad"
            units.append(alone)
            waiting = []
    return units


def _with_copies(units: list[Unit], outside: Iterable[StoredTensor]) -> list[Unit]:
    """`units` and those of the token table's and the lm_head's copies that train beside adapters (peft 0.21
    `fsdp_auto_wrap_policy` wraps every module without children whose weight trains)."""
    before: list[Unit] = []
    after: list[Unit] = []
    for one in (tensor for tensor in outside if tensor.trains):
        name = f"{one.module}.{one.path}"
        if one.is_token_table:
            before.append(Unit(name, (one.module,), (one,), reduces_at_end=True))
        elif one.is_lm_head:
            after.append(Unit(name, (one.module,), (one,), operation=str(one.path)))
    return [*before, *units, *after]


def _with_ends(units: list[Unit], ends: OutsideLayers, first_layer_without_gradient: bool) -> list[Unit]:
    """`units` and those of token table, final norm and lm_head."""
    if ends.shares_table:  # gathered for the embedding, whose input has no gradient
        return [*units, Unit("tail", ENDS, ends.tail, True, reduces_at_end=True, place=UnitPlace.TAIL, hook=Mark.LM_HEAD)]
    unused = first_layer_without_gradient
    first = Unit("embedding", ENDS[:1], ends.table, reduces_at_end=True, prefetched_unused=unused)
    modules = tuple(dict.fromkeys((ends.tail_begins, BlockKind.HEAD.value)))
    at_end = first_layer_without_gradient and block_of(ends.tail_begins) is BlockKind.LAYER
    tail = Unit("tail", modules, ends.tail, True, reduces_at_end=at_end, place=UnitPlace.TAIL, hook=Mark.LM_HEAD)
    return [*([first] if ends.table else []), *units, *([tail] if ends.tail else [])]  # a pipeline stage may lack either
