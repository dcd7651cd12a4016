"""What torch's pipeline keeps of micro-batches between their turns (`torch_pipeline.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from peakcast.models.ledger.tape.step import BlockRun
from peakcast.models.ledger.tape.template import Template, Waiting


@dataclass(slots=True)
class InFlight:
    """A micro-batch of a chunk between its forward and its backward."""

    start: int
    ended: int
    runs: dict[int, BlockRun]
    again: dict[int, BlockRun] = field(default_factory=dict)
    """For checkpointed layers: their recomputations for the inputs' backward."""
    embedded: BlockRun | None = None
    loss: BlockRun | None = None
    body_ends: int = 0
    """The instant at which its layers, and the last norm if it has one, are done."""
    unwound: int = 0
    """The instant after its backward; 0 before that."""


@dataclass(slots=True)
class WeightsHalf:
    """The second half of a block's split backward: `run` is the block's forward, `inputs` the run whose backward computed
    the inputs' gradients, which is a recomputation if the block is checkpointed."""

    run: BlockRun
    inputs: BlockRun
    ended: list[int] = field(default_factory=list)
    """The instant after each weight's turn."""
    recomputed: list[BlockRun] = field(default_factory=list)
    """For a checkpointed block: the recomputation for each weight."""
    on_top: bool = False
    """Whether it is the last block of its chunk, whose graph no later block keeps alive."""

    @property
    def checkpointed(self) -> bool:
        return self.inputs is not self.run

    @property
    def templates(self) -> Sequence[Template]:
        """The template of each weight's turn."""
        return self.inputs.template.later.weights if self.inputs.template.later else ()

    @property
    def waiting(self) -> Sequence[Waiting]:
        """The tensors that wait for the weights' turns."""
        return self.inputs.template.later.waiting if self.inputs.template.later else ()

    def until(self, one: Waiting) -> int | None:
        """The last turn that needs a tensor; None: it is needed until all blocks' turns have run."""
        return one.until_on_top if self.on_top else one.until


class NamedGradients(NamedTuple):
    """The gradients that a variable refers to."""

    num_bytes: int
    born: int


@dataclass(slots=True)
class SentGradient:
    """A gradient that a chunk sends to the stage before it."""

    chunk: int
    born: int


def kept(template: Template) -> list[Waiting]:
    """The saved tensors of a block's forward."""
    return [one for one in template.later.waiting if not one.born_backward] if template.later else []
