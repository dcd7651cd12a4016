"""What ZeRO-3's hooks see of a module: when it begins and ends, which weights are its own, and what becomes of them.

Source: DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`, `_register_deepspeed_module`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.tape.step import BlockRun


class Pass(Enum):
    """In which direction a block's operations run."""

    FORWARD = "forward"
    RECOMPUTATION = "recomputation"
    """Forward once more, for a checkpoint."""
    BACKWARD = "backward"


class Passage(NamedTuple):
    """The operations of a block that run one after the other."""

    block: str
    labels: Sequence[str]
    begins: int
    """The instant of the first."""
    during: Pass = Pass.FORWARD

    @property
    def ends(self) -> int:
        """The instant before which the last ends."""
        return self.begins + len(self.labels)


def passage(run: BlockRun, block: str, during: Pass) -> Passage:
    """The operations of a run, in one direction."""
    if during is Pass.BACKWARD:
        return Passage(block, run.template.backward_labels, run.backward_start or 0, during)
    return Passage(block, run.template.forward_labels, run.forward_start, during)


@dataclass(frozen=True, slots=True)
class Module:
    """A module as DeepSpeed's hooks see it. `name`: what the recorded order of modules knows it by. `tensors`: its own
    parameters; a module that only contains other modules has none."""

    name: str
    tensors: tuple[StoredTensor, ...] = ()

    def counted(self, *, by_leaf: bool) -> Sequence[StoredTensor]:
        """The tensors that a leaf module, or another one, counts when it looks for its own among the modules that come
        (`recurse` in `__params_to_release`)."""
        return self.tensors


@dataclass(frozen=True, slots=True)
class Container(Module):
    """A layer or the network. `inside`: the tensors of all modules in it."""

    inside: tuple[StoredTensor, ...] = ()

    def counted(self, *, by_leaf: bool) -> Sequence[StoredTensor]:
        return (*self.tensors, *self.inside) if by_leaf else self.tensors


@dataclass(frozen=True, slots=True)
class OfBlock(Module):
    """A block with parameters of its own, or with parameters that no operation is named after."""


@dataclass(frozen=True, slots=True)
class Leaf(Module):
    """A module that DeepSpeed treats as one with all the modules inside it, whose tensors are its own. `done`: how many
    instants after its begin the operations of each end."""

    done: Mapping[str, int] = field(default_factory=dict)

    def counted(self, *, by_leaf: bool) -> Sequence[StoredTensor]:
        return self.tensors if by_leaf else ()


@dataclass(frozen=True, slots=True)
class Function(Module):
    """A module without weights, which is done when its operation is, such as dropout."""


class Course(Enum):
    """How far a module comes in a turn."""

    WHOLE = "it begins and ends, and its hook releases its tensors"
    UNRELEASED = "it begins and ends, but no hook releases its tensors, since no gradient flows on or it stopped before"
    BEGINS = "it begins, and holds its tensors, which no other module can release, until a turn in which it ends"
    ENDS = "it ends, having begun in an earlier turn, and its hook releases its tensors"


class ModuleTurn(NamedTuple):
    """A module's turn, from instant `begins` until before `ends`."""

    module: Module
    begins: int
    ends: int
    course: Course = Course.WHOLE
    during: Pass = Pass.FORWARD
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
        return self.course is not Course.ENDS

    @property
    def releases(self) -> bool:
        """Whether a hook releases the module's tensors after the turn."""
        return self.course is Course.WHOLE or self.course is Course.ENDS

    def ending(self) -> ModuleTurn:
        """The same turn, of a module that has begun before."""
        return self._replace(course=Course.ENDS)

    def later(self, instants: int) -> ModuleTurn:
        """The same turn, `instants` later."""
        module, begins, ends, course, during, starts = self
        return ModuleTurn(module, begins + instants, ends + instants, course, during, starts)

    def unreleased(self) -> ModuleTurn:
        """The same turn, after which no hook releases anything."""
        return self._replace(course=Course.UNRELEASED) if self.course is Course.WHOLE else self

    def never_ending(self) -> ModuleTurn:
        """The same turn, of a module that holds its tensors until backward ends."""
        return self._replace(course=Course.BEGINS)
