"""What ZeRO-3's hooks see of a module: when it begins and ends, which weights it reads, and whether they are released.

Source: DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`, `_register_deepspeed_module`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.tape.step import BlockRun


class PassDirection(Enum):
    """In which direction a block's operations run."""

    FORWARD = "forward"
    RECOMPUTATION = "recomputation"
    """Forward once more, for a checkpoint."""
    BACKWARD = "backward"


class BlockOperations(NamedTuple):
    """The operations of a block that run one after the other, in one direction."""

    block: str
    labels: Sequence[str]
    begins: int
    """The instant of the first."""
    direction: PassDirection = PassDirection.FORWARD

    @property
    def ends(self) -> int:
        """The instant before which the last ends."""
        return self.begins + len(self.labels)


def block_operations(run: BlockRun, block: str, direction: PassDirection) -> BlockOperations:
    """The operations of a run, in one direction."""
    if direction is PassDirection.BACKWARD:
        return BlockOperations(block, run.template.backward_labels, run.backward_start or 0, direction)
    return BlockOperations(block, run.template.forward_labels, run.forward_start, direction)


@dataclass(frozen=True, slots=True)
class Module:
    """A module as DeepSpeed's hooks see it. `name`: its name in DeepSpeed's recorded order of modules. `tensors`: its own
    parameters; a module that only contains other modules has none."""

    name: str
    tensors: tuple[StoredTensor, ...] = ()

    def counted(self, *, by_leaf: bool) -> Sequence[StoredTensor]:
        """The tensors that DeepSpeed counts for this module when another module is released and it looks for uses that
        follow soon; `by_leaf`: when that other module is a leaf (`recurse` in `__params_to_release`)."""
        return self.tensors

    def in_block(self, block: str, tensors: Mapping[StoredTensor, StoredTensor]) -> Module:
        """The same module in another block of the same kind, whose name comes before its own. `tensors`: by tensor of this
        block, that of the other."""
        own = tuple(tensors[tensor] for tensor in self.tensors) if self.tensors else ()
        return type(self)(block + self.name, own)


@dataclass(frozen=True, slots=True)
class Container(Module):
    """A layer or the network. `inside`: the tensors of all modules in it."""

    inside: tuple[StoredTensor, ...] = ()

    def counted(self, *, by_leaf: bool) -> Sequence[StoredTensor]:
        return (*self.tensors, *self.inside) if by_leaf else self.tensors

    def in_block(self, block: str, tensors: Mapping[StoredTensor, StoredTensor]) -> Container:
        moved = Module.in_block(self, block, tensors)
        return Container(moved.name, moved.tensors, tuple(tensors[tensor] for tensor in self.inside))


@dataclass(frozen=True, slots=True)
class BlockModule(Module):
    """A block with parameters of its own, or with parameters that no operation is named after."""


@dataclass(frozen=True, slots=True)
class Leaf(Module):
    """A module that DeepSpeed treats as one with all the modules inside it: their tensors count as its own. `done`: by
    tensor, how many instants after the module begins the tensor's operation ends."""

    done: Mapping[str, int] = field(default_factory=dict)

    def counted(self, *, by_leaf: bool) -> Sequence[StoredTensor]:
        return self.tensors if by_leaf else ()

    def in_block(self, block: str, tensors: Mapping[StoredTensor, StoredTensor]) -> Leaf:
        moved = Module.in_block(self, block, tensors)
        return Leaf(moved.name, moved.tensors, self.done)


@dataclass(frozen=True, slots=True)
class Function(Module):
    """A module without weights that ends with its one operation, such as dropout."""


class TurnPart(Enum):
    """Whether a module begins in a turn, whether it ends, and whether a hook then releases its tensors."""

    WHOLE = "it begins and ends, and its hook releases its tensors"
    UNRELEASED = "it begins and ends, but its hook does not run: no gradient flows on, or the module stopped early"
    BEGINS = "it begins; until the turn in which it ends, no other module's hook can release its tensors"
    ENDS = "it ends, having begun in an earlier turn, and its hook releases its tensors"


class ModuleTurn(NamedTuple):
    """A module's turn, from instant `begins` until before `ends`."""

    module: Module
    begins: int
    ends: int
    part: TurnPart = TurnPart.WHOLE
    direction: PassDirection = PassDirection.FORWARD
    starts: bool = False
    """Whether the network's forward begins with it, whether or not a backward follows."""

    @property
    def name(self) -> str:
        """The module's name."""
        return self.module.name

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors that the module reads."""
        return self.module.tensors

    @property
    def enters(self) -> bool:
        """Whether the module begins in this turn."""
        return self.part is not TurnPart.ENDS

    @property
    def releases(self) -> bool:
        """Whether a hook releases the module's tensors after the turn."""
        return self.part is TurnPart.WHOLE or self.part is TurnPart.ENDS

    def ending(self) -> ModuleTurn:
        """The same turn, of a module that has begun before."""
        return self._replace(part=TurnPart.ENDS)

    def later(self, instants: int) -> ModuleTurn:
        """The same turn, `instants` later."""
        module, begins, ends, part, direction, starts = self
        return ModuleTurn(module, begins + instants, ends + instants, part, direction, starts)

    def unreleased(self) -> ModuleTurn:
        """The same turn, after which no hook releases anything."""
        return self._replace(part=TurnPart.UNRELEASED) if self.part is TurnPart.WHOLE else self

    def never_ending(self) -> ModuleTurn:
        """The same turn, of a module that holds its tensors until backward ends."""
        return self._replace(part=TurnPart.BEGINS)
