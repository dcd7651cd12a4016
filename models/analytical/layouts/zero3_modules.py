"""The modules of a network under ZeRO-3: which weights each has, and its turns as the blocks run.

Source: DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from peakcast.models.analytical.layouts.base import StoredTensor
from peakcast.models.analytical.layouts.zero3_turns import NO_ROTARY_MODULE, READS, Turn, turns_of

ENCODER, DECODER = "encoder.", "decoder."
"""The stacks of an encoder-decoder; the first is how the labels of the encoder's end begin."""


class ModuleTurns(Protocol):
    """What stage 3 asks of a network."""

    tensors: dict[str, list[StoredTensor]]
    """Of each block."""
    leaf: str
    """A module of each layer that is one for all within it."""

    @property
    def tied(self) -> bool:
        """Whether the lm_head's gradient is one half of the token table's."""

    @property
    def unread(self) -> Collection[StoredTensor]:
        """What a module reads that is another's: it gathers that itself the first time, and from then on as it begins."""

    @property
    def between_stacks(self) -> bool:
        """Whether one of an encoder-decoder's embeddings has run, forward or backward, and the other has not."""

    def turns(
        self, module: str, labels: Sequence[str], begins: int, *, again: bool = False, backward: bool = False
    ) -> list[Turn]:
        """Those of a block whose operations have these labels, forward, once more (`again`) or `backward`."""


class Modules:
    """`head_of_root`: the loss reads the head's weight, whose module does not run. `leaf`: a module of each layer that is
    one for all within it. `family`: `model_type`."""

    def __init__(self, tensors: Sequence[StoredTensor], *, head_of_root: bool, leaf: str, family: str) -> None:
        self._all = tuple(tensors)
        self._two_stacks = any(tensor.of_encoder for tensor in tensors)
        self.leaf = leaf
        self._family = family
        self.tensors: dict[str, list[StoredTensor]] = {}
        """Of each block."""
        for tensor in tensors:
            self.tensors.setdefault(tensor.module, []).append(tensor)
        table = [t for t in self.tensors.get("embedding", []) if t.name == "embed_tokens.weight"]
        self.tied = not any(t.name == "lm_head.weight" for t in tensors)
        if self.tied and not head_of_root:
            self.tensors.setdefault("head", []).extend(replace(t, name="lm_head.weight") for t in table)
        head = [t for t in self.tensors.get("head", []) if t.name.startswith("lm_head.")]
        self.of_root = tuple(table if self.tied else head) if head_of_root else ()
        """What the network's own forward reads of a module that does not run: an external parameter of the root, from its
        second forward on fetched as the root begins (`ZeROOrderedDict`, `register_external_parameter`)."""
        if self.of_root:
            self.tensors["head"] = [t for t in self.tensors["head"] if t not in head]
        read = (t for t in tensors if t.name.removesuffix(".weight") in READS.get(family, {}).values())
        self.unread = {*self.of_root, *read}
        """What a module reads that is another's: it gathers that itself the first time, and from then on as it begins."""
        self._embedded = 0
        """How often an embedding has run, forward or backward: in turns both of an encoder-decoder."""
        self._throughout: dict[str, tuple[StoredTensor, ...]] = {}
        """Of each block the tensors that no operation of its forward is named after."""

    def turns(
        self, module: str, labels: Sequence[str], begins: int, *, again: bool = False, backward: bool = False
    ) -> list[Turn]:
        """Those of a block whose operations have these labels, forward, once more (`again`) or `backward`."""
        stack = self._stack(module, labels, backward=backward)
        around, ends = self._around(module, stack, backward=backward), begins + len(labels)
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
        if backward:  # what has no operation there has no turn either: no gradient comes by
            kept = self._throughout.get(stack + module, ())
            turns[0] = replace(turns[0], tensors=tuple(t for t in turns[0].tensors if t in kept))
        else:
            self._throughout[stack + module] = turns[0].tensors
        if self.tied and not self.of_root:  # the lm_head's is the table itself
            table = {t.name: t for t in self.tensors.get("embedding", [])}.get("embed_tokens.weight")
            turns = [  # of a pipeline's last stage, which has no embedding, the lm_head's is its own
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
            rotary = [Turn(ends - 1, ends, name="rotary_emb")] if self._family not in NO_ROTARY_MODULE else []
            turns = [replace(turns[0], starts=stack != DECODER), *turns[1:], *rotary]
        return turns

    def _stack(self, module: str, labels: Sequence[str], *, backward: bool) -> str:
        """Which stack of an encoder-decoder a block is of that both have, "" of others."""
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

    def _around(self, module: str, stack: str, *, backward: bool) -> int:
        """Modules that are entered as the block begins: its layer's; the network's, and peft's two around it; a stack."""
        network = 2 if all(t.trains for t in self._all) else 4
        if stack == (ENCODER if backward else DECODER):
            network = 1
        return {"embedding": 0 if backward else network, "head": network if backward else 0}.get(module, 1)
