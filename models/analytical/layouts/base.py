"""What a data-parallel layout is: where each tensor of the network stands on one rank, and what happens to it around the
runs of the blocks. `Layout` is the one rank that holds everything; the other layouts say what they do differently."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from peakcast.fields import HashedOnce
from peakcast.models.analytical.optimizer_rules.rule import TrainedTensor
from peakcast.models.analytical.pipeline import Turn
from peakcast.models.analytical.step import Hooks, Step
from peakcast.models.analytical.template import Template
from peakcast.models.analytical.update_in_backward import Alone
from peakcast.timeline import Category


@dataclass(frozen=True)
class StoredTensor(HashedOnce):
    """A tensor of the network as it is stored, unsharded. `shape[0]` counts its rows (dimension 0).

    `gathered_bytes`: of one element when it is used; narrower than `element_bytes` under FSDP's mixed precision.
    """

    __hash__ = HashedOnce.__hash__

    name: str
    module: str
    shape: tuple[int, ...]
    element_bytes: int
    gathered_bytes: int
    trains: bool
    decays: bool = True
    gradient_parts: int = 1
    """How many times as large its gradient is until it is reduced: that of a split table is whole on every rank."""
    parts_in_optimizer: int = 1
    """The same when the optimizer takes it: nothing has reduced it."""
    sums_gradient: bool = False
    """Whether its gradient is then a part of the sum over tensor-parallel ranks."""
    expert_ranks: int = 1
    """Ranks that have other experts: data parallelism is over as many fewer."""
    sharded: bool = True
    """Whether FSDP shards it: what is a parameter, and not what hangs on one (the constants of quantised weights)."""

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """Whether it is the matrices of all experts of a layer, which no nn.Linear has."""
        return len(self.shape) > 2

    @property
    def quantized(self) -> bool:
        """Whether it is counted in bytes: several elements of the network's weight make one."""
        return self.element_bytes == 1 and not self.trains

    @property
    def of_encoder(self) -> bool:
        """Whether it is in the first of two stacks, which only an encoder-decoder has."""
        return self.name.startswith("encoder.")

    def optimized(self, shape: tuple[int, ...]) -> TrainedTensor:
        """The part of `shape` of it, as the optimizer sees it."""
        parts, sums = self.parts_in_optimizer, self.sums_gradient
        return TrainedTensor(self.name, self.module, shape, self.element_bytes, self.decays, parts, sums)


class Layout(Hooks):
    """One rank that holds every tensor in full; gradients stay as backward makes them."""

    holds_main_parameters = False
    """Whether the layout itself keeps the wide copies that its optimizer updates."""
    updates_as_reduced = False
    """Whether what updates in backward does so where the layout reduces a gradient, and not where autograd makes it."""
    first_step = False
    """Whether this is the first step of the training: a library may not have seen the network run yet."""

    def __init__(self, tensors: Sequence[StoredTensor]) -> None:
        self.tensors = tensors
        self.updates: Mapping[tuple[str, str], Alone] = {}
        """The optimizers of single parameters, by module and name, if so."""

    def build(self, step: Step) -> None:
        """What the layout does with the network before the first step, where that is known."""

    def hold_resident(self, step: Step) -> None:
        """What stands in memory from before the step to its end."""
        step.hold_all(((t.name, t.module, t.numel * t.element_bytes) for t in self.tensors), Category.PARAMETERS)

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        """Before a micro-batch that is the first, the last, or both, of the step."""

    def end_backward(self, step: Step) -> None:
        """When autograd has finished a micro-batch."""

    def has_gradient(self, module: str, template: Template, *, begun: bool) -> bool:
        """Whether gradients that `template` makes of `module` are there, to be added to; `begun`: they were made before."""
        return begun

    def end_forward(self, step: Step) -> None:
        """When the whole network, or a pipeline stage, has run forward."""

    def begin_turns(self) -> None:
        """Before the forward and backward turns of a pipeline stage."""

    def before_turn(self, step: Step, turns: Sequence[Turn]) -> None:
        """Before the first of `turns`, which are all that are left."""

    def after_turn(self, step: Step, turns: Sequence[Turn]) -> None:
        """After the first of them."""

    def end_turns(self, step: Step) -> None:
        """After them."""

    def optimized(self) -> list[TrainedTensor]:
        """What the optimizer updates on this rank."""
        return [t.optimized(t.shape) for t in self.tensors if t.trains]

    def clip(self, step: Step) -> None:
        """What gradient clipping makes beside a norm per gradient."""

    def update_groups(self, trained: list[TrainedTensor], *, by_decay: bool) -> list[list[TrainedTensor]]:
        """The tensors that the optimizer updates at a time; its temporaries live as long."""
        if not by_decay:
            return [trained]
        return [group for group in ([t for t in trained if t.decays], [t for t in trained if not t.decays]) if group]

    def before_update(self, step: Step, group: list[TrainedTensor]) -> None:
        """Before the optimizer updates a group."""

    def after_update(self, step: Step) -> None:
        """After the optimizer has updated a group."""

    def release_gradients(self, step: Step) -> None:
        """`zero_grad(set_to_none=True)`, from the next instant on. (Gradients of blocks die with `Step.gradients_die`.)"""
