"""The modules of a network under ZeRO-3: which weights each has, and in which turns they run.

Source: DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.module_tree import ENCODER, LM_HEAD, BlockKind, TransformerStack, block_of, path_of
from peakcast.models.ledger.layouts.zero3_hooks import (
    BlockModule,
    BlockOperations,
    Container,
    Module,
    ModuleTurn,
    PassDirection,
    TurnPart,
)
from peakcast.models.ledger.layouts.zero3_turns import module_turns
from peakcast.networks.families import counted_as

ENDS = (BlockKind.EMBEDDING, BlockKind.HEAD)
ROOT = "root"
ROOT_FROM_INSIDE = -2
"""Which of the modules around a block, the outermost first, is the network that reads weights itself: its base model is
inside it."""


class ModuleTurns(Protocol):
    """What stage 3 needs to know of a network's modules."""

    tensors: dict[str, list[StoredTensor]]
    """The tensors of each block."""
    leaf: str
    """The name of a module in each layer that DeepSpeed treats as one with all inside it; "": none."""

    @property
    def tied(self) -> bool:
        """Whether the lm_head's gradient is half of the token table's."""

    @property
    def unread(self) -> Collection[StoredTensor]:
        """Weights that another module than their own reads. The first time that module gathers the weight when it reads
        it; later DeepSpeed knows of it and gathers it when the module begins."""

    @property
    def between_stacks(self) -> bool:
        """Whether one of an encoder-decoder's embeddings has run, forward or backward, and the other has not."""

    def turns(self, operations: BlockOperations) -> list[ModuleTurn]:
        """The turns of a block's modules while its operations run."""


class Zero3Modules:
    """The modules of a network. `head_of_root`: whether the loss reads the lm_head's weight without calling the lm_head, so
    that the network itself, the root module, gathers it. `leaf`: as in `ModuleTurns`. `family`: the `model_type`."""

    def __init__(self, tensors: Sequence[StoredTensor], *, head_of_root: bool, leaf: str, family: str) -> None:
        self._all = tuple(tensors)
        self._two_stacks = any(tensor.of_encoder for tensor in tensors)
        self._num_around_layers = 2 if all(t.trains for t in tensors) else 4
        """The network and its base model, and the two modules that peft puts around them."""
        self.leaf = leaf
        self._family = family
        self.tensors: dict[str, list[StoredTensor]] = {}
        """The tensors of each block that its forward reads; not a module's of which a copy trains (`modules_to_save`)."""
        for tensor in tensors:
            if not tensor.is_original:
                self.tensors.setdefault(tensor.module, []).append(tensor)
        embedding, head = BlockKind.EMBEDDING.value, BlockKind.HEAD.value
        tables = [t for t in tensors if t.module == embedding and t.of_token_table]
        table = [t for t in tables if t.is_original] or tables
        self.tied = not any(t.is_lm_head for t in tensors)
        self._table = table[0] if table else None
        if self.tied and not head_of_root:
            self.tensors.setdefault(head, []).extend(replace(t, name=f"{LM_HEAD}.weight") for t in table)
        of_head = [t for t in self.tensors.get(head, []) if t.of_lm_head]
        self.of_root = tuple(table if self.tied else of_head) if head_of_root and head in self.tensors else ()
        """Weights that the network's own forward reads without running their module: external parameters of the root,
        gathered from its second forward on when the root begins (`ZeROOrderedDict`, `register_external_parameter`). A
        pipeline's stage before the last reads none."""
        if self.of_root:
            self.tensors[head] = [t for t in self.tensors[head] if t not in of_head]
        read = {path_of(name) for name in counted_as(family).modules.reads.values()}
        self.unread = {*self.of_root, *(t for t in tensors if t.path in read)}
        """As `ModuleTurns.unread`."""
        self._embedded = 0
        """How often an embedding has run, forward or backward; an encoder-decoder's two run alternately."""
        self._unnamed_in_forward: dict[tuple[str, TransformerStack | None], tuple[StoredTensor, ...]] = {}
        """By block, and by stack where both have it: the tensors that no operation of its forward is named after."""

    def turns(self, operations: BlockOperations) -> list[ModuleTurn]:
        """As `ModuleTurns.turns`."""
        block, stack = block_of(operations.block), self._stack(operations)
        backward = operations.direction is PassDirection.BACKWARD
        turns = module_turns(
            operations,
            self._tensors_of(operations.block, stack),
            around=self._num_entered_before(block, stack, backward=backward),
            leaf=self.leaf,
            family=self._family,
        )
        if block in ENDS:
            turns = [self._around_all(turn) for turn in turns]
        turns = self._without_operation_in_forward(turns, (operations.block, stack), backward=backward)
        if self.tied and not self.of_root and block is BlockKind.HEAD and self._table is not None:
            turns = [self._reading_table(turn) for turn in turns]
        if backward and block is BlockKind.EMBEDDING:
            turns = [turn.unreleased() for turn in turns]
        if self.of_root:
            turns = self._with_root(turns, block, operations)
        if operations.direction is PassDirection.FORWARD and block is BlockKind.EMBEDDING:
            turns[0] = turns[0]._replace(starts=stack is not TransformerStack.DECODER)
            if counted_as(self._family).modules.rotary:
                turns.append(ModuleTurn(Module("rotary_emb"), operations.ends, operations.ends + 1))
        return turns

    def _tensors_of(self, block: str, stack: TransformerStack | None) -> list[StoredTensor]:
        """The tensors of a block; of the end of one stack, where both have one."""
        tensors = self.tensors.get(block, [])
        if stack is None or block_of(block) is not BlockKind.HEAD:
            return tensors
        return [t for t in tensors if t.of_encoder == (stack is TransformerStack.ENCODER)]

    def _around_all(self, turn: ModuleTurn) -> ModuleTurn:
        """The turn of a module around the whole network, if the module is around a block."""
        if not isinstance(turn.module, Container):
            return turn
        return turn._replace(module=replace(turn.module, inside=self._all))

    def _without_operation_in_forward(
        self, turns: list[ModuleTurn], block: tuple[str, TransformerStack | None], *, backward: bool
    ) -> list[ModuleTurn]:
        """`turns`, where a block's first turn in backward has only those tensors that no forward operation is named after
        either. A tensor with an operation in forward and none in backward gets no gradient, so backward does not gather
        it."""
        first = turns[0] if turns and isinstance(turns[0].module, BlockModule) else None
        if not backward:
            self._unnamed_in_forward[block] = first.tensors if first is not None else ()
        elif first is not None:
            kept = self._unnamed_in_forward.get(block, ())
            own = tuple(t for t in first.tensors if t in kept)
            return [first._replace(module=BlockModule(first.name, own)), *turns[1:]]
        return turns

    def _reading_table(self, turn: ModuleTurn) -> ModuleTurn:
        """The turn with the token table in the place of a tied lm_head's weight. (A pipeline's last stage has no embedding,
        so its lm_head has a weight of its own.)"""
        assert self._table is not None
        if not any(t.is_lm_head for t in turn.tensors):
            return turn
        own = tuple(self._table if t.is_lm_head else t for t in turn.tensors)
        return turn._replace(module=replace(turn.module, tensors=own))

    def _with_root(self, turns: list[ModuleTurn], block: BlockKind, operations: BlockOperations) -> list[ModuleTurn]:
        """`turns` in which the network reads weights itself: when it begins, and where the head's forward reads them."""
        backward = operations.direction is PassDirection.BACKWARD
        if block is (BlockKind.HEAD if backward else BlockKind.EMBEDDING):
            at = [i for i, turn in enumerate(turns) if isinstance(turn.module, Container)][ROOT_FROM_INSIDE]
            root = replace(turns[at].module, name=ROOT, tensors=self.of_root)
            turns[at] = turns[at]._replace(module=root, part=TurnPart.BEGINS)
        elif block is BlockKind.HEAD and operations.direction is PassDirection.FORWARD:
            reads = next(i for i, label in enumerate(operations.labels) if path_of(label).outermost == LM_HEAD.name)
            turns.append(ModuleTurn(Module(ROOT, self.of_root), operations.begins + reads, operations.ends, TurnPart.ENDS))
        return turns

    def _stack(self, operations: BlockOperations) -> TransformerStack | None:
        """To which stack of an encoder-decoder a block belongs that both stacks have; None for other blocks."""
        block = block_of(operations.block)
        if block not in ENDS or not self._two_stacks:
            return None
        if block is BlockKind.HEAD:
            in_encoder = path_of(operations.labels[0]).is_inside(ENCODER)
            return TransformerStack.ENCODER if in_encoder else TransformerStack.DECODER
        self._embedded += 1
        backward = operations.direction is PassDirection.BACKWARD
        return TransformerStack.ENCODER if backward == (self._embedded % 2 == 0) else TransformerStack.DECODER

    @property
    def between_stacks(self) -> bool:
        """Whether one of an encoder-decoder's embeddings has run, forward or backward, and the other has not."""
        return self._two_stacks and self._embedded % 2 == 1

    def _num_entered_before(self, block: BlockKind, stack: TransformerStack | None, *, backward: bool) -> int:
        """How many modules are entered when the block begins: its layer, the network and the two that peft puts around it,
        a stack."""
        first = TransformerStack.ENCODER if backward else TransformerStack.DECODER
        network = 1 if stack is first else self._num_around_layers
        if block is BlockKind.EMBEDDING:
            return 0 if backward else network
        if block is BlockKind.HEAD:
            return network if backward else 0
        return 1
