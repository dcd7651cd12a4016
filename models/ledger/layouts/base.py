"""The interface of data-parallel layouts: what one rank stores of each tensor, and what the layout does around the runs of
blocks. `Layout` itself is a rank that holds everything; the other layouts override what they do differently."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from peakcast.models.ledger.layouts.module_tree import (
    ENCODER,
    LM_HEAD,
    ORIGINAL,
    TOKEN_TABLE,
    BlockKind,
    ModulePath,
    block_of,
    module_of,
)
from peakcast.models.ledger.layouts.pipeline import Turn
from peakcast.models.ledger.optimizers.rule import TrainedTensor
from peakcast.models.ledger.tape.step import Hooks, Step
from peakcast.models.ledger.tape.template import Template
from peakcast.models.ledger.tape.update_in_backward import ParameterKey, ParameterOptimizer
from peakcast.timelines.timeline import Category


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the Trainer decays the weight: a matrix whose name does not call it a bias, as of stacked experts
    (transformers 5.17 trainer.py `get_decay_parameter_names`). Of vectors almost all are biases and norms, which do not."""
    return len(shape) > 1 and "bias" not in name


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of the network as it is stored, before sharding. `shape[0]` is its number of rows (dimension 0).
    `gathered_bytes`: bytes of one element when it is used, fewer than `element_bytes` under FSDP's mixed precision."""

    name: str
    module: str
    shape: tuple[int, ...]
    element_bytes: int
    gathered_bytes: int
    trains: bool
    decays: bool = True
    gradient_parts: int = 1
    """How many times larger its gradient is until it is reduced: a split table's gradient is whole on every rank."""
    parts_in_optimizer: int = 1
    """How many times larger its gradient still is in the optimizer step, if nothing has reduced it."""
    sums_gradient: bool = False
    """Whether the gradient of each tensor-parallel rank is, until then, only one term of a sum over these ranks."""
    expert_ranks: int = 1
    """Number of ranks with different experts; data parallelism has that many times fewer ranks."""
    sent_bytes: int = 0
    """Bytes of one element while it is gathered, if fewer than `gathered_bytes`: of float8 weights; 0: as many."""
    name_in_block: str = ""
    """The name under which its block makes its gradient, if that is not its own: the gradients of all experts that run one
    after the other have the name of one expert's."""
    sharded: bool = True
    """Whether FSDP shards it: true for parameters, false for tensors attached to one (constants of quantised weights)."""

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def exceeds_matrix(self) -> bool:
        """Whether it has more than two dimensions, so that no nn.Linear reads it: the matrices of all experts of a layer,
        stacked, or the kernel of a convolution."""
        return len(self.shape) > 2

    @property
    def quantized(self) -> bool:
        """Whether its size is counted in bytes because one byte holds several elements of the weight."""
        return self.element_bytes == 1 and not self.trains

    @cached_property
    def path(self) -> ModulePath:
        """The module that it belongs to, inside its block."""
        return module_of(self.name)

    @property
    def block(self) -> BlockKind:
        """The kind of its block."""
        return block_of(self.module)

    @property
    def of_encoder(self) -> bool:
        """Whether it belongs to the encoder of an encoder-decoder."""
        return self.path.is_inside(ENCODER)

    @property
    def is_token_table(self) -> bool:
        """Whether it is the weight of the token embedding."""
        return self.path == TOKEN_TABLE and self.block is BlockKind.EMBEDDING

    @property
    def of_token_table(self) -> bool:
        """Whether it is the weight of the token embedding, or the one of which that is a copy."""
        return self.path.is_inside(TOKEN_TABLE) and self.block is BlockKind.EMBEDDING

    @property
    def is_lm_head(self) -> bool:
        """Whether it is the lm_head's matrix."""
        return self.path == LM_HEAD and len(self.shape) > 1

    @property
    def of_lm_head(self) -> bool:
        """Whether it belongs to the lm_head."""
        return self.path.is_inside(LM_HEAD)

    @property
    def is_original(self) -> bool:
        """Whether it is a frozen weight of which a copy trains (`modules_to_save`), so that no forward reads it; but where
        the lm_head shares the token table and has no copy itself, it reads the original."""
        return self.path.name == ORIGINAL

    @property
    def of_adapter(self) -> bool:
        """Whether it is an adapter's."""
        return self.path.is_adapter

    def optimized(self, shape: tuple[int, ...]) -> TrainedTensor:
        """Its part of `shape`, as a tensor that the optimizer updates."""
        parts, sums = self.parts_in_optimizer, self.sums_gradient
        return TrainedTensor(self.name, self.module, shape, self.element_bytes, self.decays, parts, sums)


class Layout(Hooks):
    """One rank that holds every tensor whole. Gradients stay as backward makes them."""

    holds_main_parameters = False
    """Whether the layout itself holds the fp32 copies that the optimizer updates."""
    updates_as_reduced = False
    """Whether an update during backward runs when the layout has reduced the gradient, not when autograd has made it."""
    different_micro_batches = 2
    """How many micro-batches of a step differ: the first makes the gradients, the last adds to them and may reduce them."""
    first_step: bool | None = False
    """Whether this is the first step of the training, in which a library may not yet know the order of modules. None: it
    may be any step, and `Step.differs` holds what only some steps have."""

    def __init__(self, tensors: Sequence[StoredTensor]) -> None:
        self.tensors = tensors
        self.updates: Mapping[ParameterKey, ParameterOptimizer] = {}
        """The optimizers of single parameters, if `updates_as_reduced` and the job has them."""

    def build(self, step: Step) -> None:
        """Add what the layout does with the network before the first step, if that is known."""

    def hold_resident(self, step: Step) -> None:
        """Hold what exists from before the step to its end."""
        step.hold_all(((t.name, t.module, t.numel * t.element_bytes) for t in self.tensors), Category.PARAMETERS)

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        """Called before a micro-batch that is the first, the last, or both, of the step."""

    def end_backward(self, step: Step) -> None:
        """Called when autograd has finished a micro-batch."""

    def has_gradient(self, module: str, template: Template, *, begun: bool) -> bool:
        """Whether the gradients that `template` makes for `module` exist already and are added to. `begun`: an earlier
        micro-batch has made them."""
        return begun

    def end_forward(self, step: Step) -> None:
        """Called when the whole network, or a pipeline stage, has run forward."""

    def begin_turns(self) -> None:
        """Called before the forward and backward turns of a pipeline rank."""

    def before_turn(self, step: Step, turns: Sequence[Turn]) -> None:
        """Called before the first of `turns`, which are all that are left."""

    def after_turn(self, step: Step, turns: Sequence[Turn]) -> None:
        """Called after the first of `turns`."""

    def end_turns(self, step: Step) -> None:
        """Called after all turns of a pipeline stage."""

    def optimized(self) -> list[TrainedTensor]:
        """The tensors that the optimizer updates on this rank."""
        return [t.optimized(t.shape) for t in self.tensors if t.trains]

    def clip(self, step: Step) -> None:
        """Add what gradient clipping allocates besides one norm per gradient."""

    def update_groups(self, trained: list[TrainedTensor], *, by_decay: bool) -> list[list[TrainedTensor]]:
        """The groups of tensors that the optimizer updates together; its temporaries live as long as the group's update."""
        if not by_decay:
            return [trained]
        return [group for group in ([t for t in trained if t.decays], [t for t in trained if not t.decays]) if group]

    def before_update(self, step: Step, group: list[TrainedTensor]) -> None:
        """Called before the optimizer updates a group."""

    def after_update(self, step: Step) -> None:
        """Called after the optimizer has updated a group."""

    def release_gradients(self, step: Step) -> None:
        """`zero_grad(set_to_none=True)`: free the layout's gradients from the next instant on. (Gradients of blocks die at
        `Step.gradients_die`.) As in `clip`, `before_update` and `after_update`, lists of handles are copied before they are
        freed: a first step and a later one may go on from shallow copies of one layout."""
