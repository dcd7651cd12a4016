"""In which order ZeRO-3's hooks run on a block's modules. Modules without parameters count too, since each may gather
ahead.

Source: DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`, `_register_deepspeed_module`; peft 0.21
`tuners/lora/layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.module_tree import LORA_A, ModulePath, path_of
from peakcast.models.ledger.layouts.parameter_modules import ParameterModules, RanIn
from peakcast.models.ledger.layouts.zero3_hooks import (
    BlockModule,
    BlockOperations,
    Container,
    Function,
    Leaf,
    Module,
    ModuleTurn,
    PassDirection,
    TurnPart,
)
from peakcast.networks.families import counted_as
from peakcast.networks.family import Family

ACTIVATIONS = ("silu", "relu", "gelu", "bloom_gelu", "act_fn", "activation")
"""Names of a feed-forward's activation, which is a module of its own."""
FUNCTIONS = ("logits", "softcap")
"""First parts of operation names in the head that are not modules but the network's own code and the loss."""
ADAPTED = "adapted"
"""The name here of the module that contains a matrix and its adapter, as a part of the matrix's path."""
DROPOUT = "dropout"
FEED_FORWARD = "mlp"


def module_turns(
    operations: BlockOperations, tensors: Sequence[StoredTensor], *, around: int = 0, leaf: str = "", family: str = ""
) -> list[ModuleTurn]:
    """The turns of a block's modules while its operations run. Parameters that no operation is named after count as read by
    the block itself, whose turn is the first; adapters that no operation is named after are disabled. `around`: how many
    modules that contain the block begin with it. `leaf`: a module that DeepSpeed treats as one with all modules inside it.
    `family`: the `model_type`."""
    labels, names = tuple(operations.labels), tuple(tensor.name for tensor in tensors)
    alike = _turns_of_equal_blocks(labels, operations.direction, names, around, leaf, family)
    modules, begins = _modules_in_block(alike, operations.block, tuple(tensors)), operations.begins
    return [
        ModuleTurn(module, first + begins, ends + begins, part, direction, starts)
        for module, (_, first, ends, part, direction, starts) in zip(modules, alike.turns, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _EqualBlocks:
    """The turns of blocks whose operations and tensors have the same names: those of one such block, whose own name is ""
    and which begins at instant 0."""

    turns: tuple[ModuleTurn, ...]
    tensors: tuple[StoredTensor, ...]
    """The tensors of that block."""


@lru_cache(maxsize=4096)
def _modules_in_block(alike: _EqualBlocks, block: str, tensors: tuple[StoredTensor, ...]) -> tuple[Module, ...]:
    """The modules of the turns of `alike`, with the name and the tensors of one of its blocks."""
    own = dict(zip(alike.tensors, tensors, strict=True))
    return tuple(turn.module.in_block(block, own) for turn in alike.turns)


@lru_cache(maxsize=1024)
def _turns_of_equal_blocks(
    labels: tuple[str, ...], direction: PassDirection, names: tuple[str, ...], around: int, leaf: str, family: str
) -> _EqualBlocks:
    """The turns that equal blocks have in common; arguments as in `module_turns`."""
    tensors = tuple(StoredTensor(name, "", (), 0, 0, trains=True) for name in names)
    operations = BlockOperations("", labels, 0, direction)
    found = _TurnFinder(operations, ParameterModules(tensors, labels, leaf), counted_as(family))
    return _EqualBlocks(found.turns(around), tensors)


class _TurnFinder:
    """Follows the operations of a block from module to module, and notes a turn for each module that begins or ends."""

    def __init__(self, operations: BlockOperations, modules: ParameterModules, code: Family) -> None:
        self.operations, self.modules, self.code = operations, modules, code
        self.backward = operations.direction is PassDirection.BACKWARD
        self.read_by = {path_of(reader): modules.tensors(path_of(read)) for reader, read in code.modules.reads.items()}
        """By module: the weights of a module inside it that it reads."""
        self.switched_off = not any(LORA_A in path_of(label).names for label in operations.labels)
        self.found: list[ModuleTurn] = []
        self.entered: tuple[ModulePath, ...] = ()
        self.owner: ModulePath | None = None
        """The module with weights that ran last."""
        self.inside: ModulePath | None = None
        """The module that the last operation ran in, if it is known."""
        self.ran = set[ModulePath | None]()

    def turns(self, around: int) -> tuple[ModuleTurn, ...]:
        """All turns: those of modules around the block, and of the block and what is in it."""
        block, everything = self.operations.block, tuple(self.modules.everything)
        self.found = [
            self._turn(0, module=Container(f"{block} within {depth}", inside=everything)) for depth in range(around)
        ]
        for index, label in enumerate(self.operations.labels):
            self._operation(index, label)
        if not self.backward:
            self._functions(len(self.operations.labels) - 1, self._runs_after(self.inside))
        if rest := self.modules.without_operation(self.ran):
            own = ModuleTurn(BlockModule(block, rest), 0, len(self.operations.labels), direction=self.operations.direction)
            self.found.insert(0, own)
        return tuple(self.found)

    def _turn(self, index: int, module: Module, part: TurnPart = TurnPart.WHOLE) -> ModuleTurn:
        """A turn in which the operation `index` runs."""
        return ModuleTurn(module, index, index + 1, part, self.operations.direction)

    def _operation(self, index: int, label: str) -> None:
        """Note which modules end before the operation `label`, and which begin with it."""
        ran_in = self.modules.of_operation(label)
        path = tuple(self._path(ran_in))
        for module in self.entered:
            if module in self.read_by and module not in path:
                self._add(index - 1, Module(self._name(module), self.read_by[module]), TurnPart.ENDS)
        self._note_functions_between(index, ran_in)
        for module in path:
            if module == ran_in.owner:
                self._run_owner(index, module)
            elif module not in self.entered:
                self._enter(index, module)
        if ran_in.owner is not None and ran_in.owner == self.modules.leaf:
            self._note_done(index, label)
        self.entered, self.owner = path, ran_in.owner or self.owner
        self.ran.add(ran_in.owner)

    def _add(self, index: int, module: Module, part: TurnPart = TurnPart.WHOLE) -> None:
        self.found.append(self._turn(index, module, part))

    def _name(self, module: ModulePath) -> str:
        return f"{self.operations.block} {module}"

    def _functions(self, index: int, modules: Iterable[ModulePath]) -> None:
        """Note modules without weights."""
        for module in modules:
            self._add(index, Module(self._name(module)))

    def _runs_after(self, module: ModulePath | None) -> list[ModulePath]:
        """The modules without weights that run after a module."""
        return [path_of(name) for name in self.code.modules.run_after.get(str(module), ())]

    def _note_functions_between(self, index: int, ran_in: RanIn) -> None:
        """Note the modules without weights, such as dropout, that run between two modules with weights: in forward after
        the module that has ended, in backward before the module that begins."""
        linear = str(ran_in.linear) in self.code.modules.run_after
        left, self.inside = self.inside, ran_in.linear if linear else ran_in.owner
        if self.inside == left:
            return
        at = max(index - 1, 0) if self.backward else index  # dropout's own operation
        for module in self._runs_after(self.inside if self.backward else left):
            self._add(at, Function(self._name(module)))

    def _run_owner(self, index: int, module: ModulePath) -> None:
        """Note that a module with weights begins or, if its operation follows another of its own, that it has not ended."""
        if module == self.owner and module in self.entered:
            self.found[-1] = self.found[-1]._replace(ends=index + 1)
            return
        if self.owner is not None and module != self.owner and _linear(module) == _linear(self.owner):
            self._functions(index, [_linear(module).child(DROPOUT)])  # between a Linear and its adapter
        own = self.modules.tensors(module)
        made: Module = (Leaf if module == self.modules.leaf else Module)(self._name(module), own)
        self._add(index, made, TurnPart.UNRELEASED if own in self.read_by.values() else TurnPart.WHOLE)

    def _enter(self, index: int, module: ModulePath) -> None:
        """Note the begin of a module without weights of its own. peft's adapted Linear is one, but its forward reads
        lora_A's dtype, so ZeRO gathers that weight for it and does not release it."""
        adapter = self.modules.tensors(module.parent.child(LORA_A)) if module.name == ADAPTED else ()
        holds = self.read_by.get(module, ())
        part = TurnPart.WHOLE if not adapter or self.switched_off else TurnPart.UNRELEASED
        self._add(index, Module(self._name(module), (*adapter, *holds)), TurnPart.BEGINS if holds else part)
        self._functions(index, map(module.child, self.code.modules.run_after.get(str(module), ())))

    def _note_done(self, index: int, label: str) -> None:
        """Note that the operation of a module inside a leaf is done."""
        last = self.found[-1]
        done = last.module.done if isinstance(last.module, Leaf) else {}
        ends = index + 1 - last.begins
        self.found[-1] = last._replace(module=Leaf(last.name, last.tensors, {**done, label: ends}))

    def _path(self, ran_in: RanIn) -> Iterator[ModulePath]:
        """The modules inside the block in which an operation runs, the outermost first."""
        owner, names = ran_in.owner, ran_in.path.names
        if owner is not None and owner == self.modules.leaf:
            yield owner
            return
        outer = path_of(ran_in.outermost)
        inline = self.code.layer.inline_feed_forward and ran_in.outermost == FEED_FORWARD
        if ran_in.outermost and outer not in self.modules and ran_in.outermost not in FUNCTIONS and not inline:
            yield outer
            around = self.code.modules.around_inner
            if around and "".join(names[1:2]) not in around:
                yield outer.child("inner")
        if ran_in.linear.child(LORA_A) in self.modules:
            yield ran_in.linear.child(ADAPTED)
        if owner is None and len(names) > 1 and names[1].startswith(ACTIVATIONS):
            yield ModulePath(names[:2])
        if owner is not None:
            yield owner


def _linear(module: ModulePath) -> ModulePath:
    """The matrix whose adapter's first part `module` is, or the module itself."""
    return module.parent if module.name == LORA_A else module


def with_recomputation_inside(turns: Sequence[ModuleTurn], again: Sequence[ModuleTurn], asks: int) -> list[ModuleTurn]:
    """The turns of a backward in which a recomputation runs: it starts at the instant `asks`, when an operation first reads
    a saved tensor. That operation is either of the first module with weights, whose turn then ends after the recomputation,
    or a dropout before that module, whose turn ends first. `again`: the turns of the recomputation."""
    begun = again[0].begins
    blocks = [turn for turn in turns[:1] if isinstance(turn.module, BlockModule)]
    inside = turns[len(blocks) :]
    found = (index for index, turn in enumerate(inside) if turn.tensors and turn.releases)
    first = next(found, len(inside) - 1)
    asked_by_first = inside[first].begins <= asks
    if not asked_by_first:
        first = next(index for index, turn in enumerate(inside) if turn.begins > asks)
    before = [turn._replace(begins=begun, ends=begun + 1) for turn in inside[:first]]
    if not asked_by_first:
        function = [turn for turn in inside[:first][-1:] if isinstance(turn.module, Function) and turn.begins == asks]
        return [*blocks, *before, *again, *(turn.ending() for turn in function), *inside[first:]]
    holds = inside[first]._replace(begins=begun, ends=begun + 1, part=TurnPart.BEGINS)
    return [*blocks, *before, holds, *again, inside[first].ending(), *inside[first + 1 :]]
