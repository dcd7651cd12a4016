"""The modules of a network under ZeRO-3: which weights each has, and in which turns they run.

Source: DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero3_turns import Turn, turns_of
from peakcast.networks.families import counted_as

ENCODER, DECODER = "encoder.", "decoder."
"""The stacks of an encoder-decoder. The labels of the encoder's end begin with the first."""


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
        """Weights that a module reads though they belong to another: it gathers one itself the first time, and later when
        it begins."""

    @property
    def between_stacks(self) -> bool:
        """Whether one of an encoder-decoder's embeddings has run, forward or backward, and the other has not."""

    def turns(
        self, module: str, labels: Sequence[str], begins: int, *, again: bool = False, backward: bool = False
    ) -> list[Turn]:
        """The turns of a block whose operations have these labels, in forward, recomputation (`again`) or `backward`."""


class Modules:
    """`head_of_root`: the loss reads the head's weight without running its module. `leaf`: as in `ModuleTurns`. `family`:
    the `model_type`."""

    def __init__(self, tensors: Sequence[StoredTensor], *, head_of_root: bool, leaf: str, family: str) -> None:
        self._all = tuple(tensors)
        self._two_stacks = any(tensor.of_encoder for tensor in tensors)
        self.leaf = leaf
        self._family = family
        self.tensors: dict[str, list[StoredTensor]] = {}
        """The tensors of each block."""
        for tensor in tensors:
            self.tensors.setdefault(tensor.module, []).append(tensor)
        table = [t for t in self.tensors.get("embedding", []) if t.name == "embed_tokens.weight"]
        self.tied = not any(t.name == "lm_head.weight" for t in tensors)
        if self.tied and not head_of_root:
            self.tensors.setdefault("head", []).extend(replace(t, name="lm_head.weight") for t in table)
        head = [t for t in self.tensors.get("head", []) if t.name.startswith("lm_head.")]
        self.of_root = tuple(table if self.tied else head) if head_of_root and "head" in self.tensors else ()
        """Weights that the network's own forward reads without running their module: external parameters of the root,
        gathered from its second forward on when the root begins (`ZeROOrderedDict`, `register_external_parameter`). A
        pipeline's stage before the last reads none."""
        if self.of_root:
            self.tensors["head"] = [t for t in self.tensors["head"] if t not in head]
        read = (t for t in tensors if t.name.removesuffix(".weight") in counted_as(family).modules.reads.values())
        self.unread = {*self.of_root, *read}
        """As `ModuleTurns.unread`."""
        self._embedded = 0
        """How often an embedding has run, forward or backward; an encoder-decoder's two run alternately."""
        self._throughout: dict[str, tuple[StoredTensor, ...]] = {}
        """By block: the tensors that no operation of its forward is named after."""

    def turns(
        self, module: str, labels: Sequence[str], begins: int, *, again: bool = False, backward: bool = False
    ) -> list[Turn]:
        """As `ModuleTurns.turns`."""
        stack = self._stack(module, labels, backward=backward)
        around, ends = self._num_entered_before(module, stack, backward=backward), begins + len(labels)
        tensors = self.tensors.get(module, [])
        if stack and module == "head":
            tensors = [t for t in tensors if t.name.startswith(ENCODER) == (stack == ENCODER)]
        turns = turns_of(
            module,
            labels,
            begins,
            tensors,
            around=around,
            leaf=self.leaf,
            again=again,
            backward=backward,
            family=self._family,
        )
        if module in ("embedding", "head"):
            turns = [replace(turn, inside=self._all) if turn.inside else turn for turn in turns]
        if backward:  # a tensor without an operation there has no turn either, since no gradient passes it
            kept = self._throughout.get(stack + module, ())
            turns[0] = replace(turns[0], tensors=tuple(t for t in turns[0].tensors if t in kept))
        else:
            self._throughout[stack + module] = turns[0].tensors
        if self.tied and not self.of_root:  # the lm_head's weight is the table itself
            table = {t.name: t for t in self.tensors.get("embedding", [])}.get("embed_tokens.weight")
            turns = [  # (a pipeline's last stage has no embedding, so its lm_head has a weight of its own)
                replace(turn, tensors=tuple(table if table and t.name == "lm_head.weight" else t for t in turn.tensors))
                for turn in turns
            ]
        if backward and module == "embedding":
            turns = [replace(turn, releases=False) for turn in turns]
        if self.of_root and module == ("head" if backward else "embedding"):
            turns[around - 1] = replace(turns[around - 1], tensors=self.of_root, name="root", stays=True, releases=False)
        elif self.of_root and module == "head" and not again:
            reads = next(index for index, label in enumerate(labels) if label.startswith("lm_head."))
            turns.append(Turn(begins + reads, ends, self.of_root, "root", enters=False))
        if module == "embedding" and not (backward or again):
            rotary = [Turn(ends - 1, ends, name="rotary_emb")] if counted_as(self._family).modules.rotary else []
            turns = [replace(turns[0], starts=stack != DECODER), *turns[1:], *rotary]
        return turns

    def _stack(self, module: str, labels: Sequence[str], *, backward: bool) -> str:
        """To which stack of an encoder-decoder a block belongs that both stacks have; "" for other blocks."""
        if module not in ("embedding", "head") or not self._two_stacks:
            return ""
        if module == "head":
            return ENCODER if labels[0].startswith(ENCODER) else DECODER
        self._embedded += 1
        return ENCODER if backward == (self._embedded % 2 == 0) else DECODER

    @property
    def between_stacks(self) -> bool:
        """Whether one of an encoder-decoder's embeddings has run, forward or backward, and the other has not."""
        return self._two_stacks and self._embedded % 2 == 1

    def _num_entered_before(self, module: str, stack: str, *, backward: bool) -> int:
        """How many modules are entered when the block begins: its layer, the network and the two that peft puts around it,
        a stack."""
        network = 2 if all(t.trains for t in self._all) else 4
        if stack == (ENCODER if backward else DECODER):
            network = 1
        return {"embedding": 0 if backward else network, "head": network if backward else 0}.get(module, 1)
