"""Who still needs a weight that a ZeRO-3 module releases: modules that have not ended, recomputations, autograd."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero3_hooks import Leaf, ModuleTurn, PassDirection, TurnPart
from peakcast.models.ledger.layouts.zero3_weights import Zero3Engine


class WeightUsers:
    """Which weights of one micro-batch something still needs when a module releases them. `viewed`: tensors of which
    autograd saves views (as of stacked experts), so that a release does not free their memory; checkpoints save no views.
    """

    def __init__(self, turns: Sequence[ModuleTurn], engine: Zero3Engine, viewed: Collection[StoredTensor]) -> None:
        self.turns, self.engine, self.viewed = turns, engine, viewed
        self._uses: dict[StoredTensor, list[int]] = {}
        """The turns that have each tensor."""
        for index, turn in enumerate(turns):
            for tensor in turn.module.tensors:
                self._uses.setdefault(tensor, []).append(index)
        self._packed = set[StoredTensor]()
        """Weights whose memory a checkpoint keeps from their recomputation to their backward."""
        self._kept = set[StoredTensor]()
        """Weights of modules that have begun and not ended."""
        self._gathered_by_recomputation = dict[StoredTensor, None]()
        """Frozen weights that a recomputation has gathered and no module has released. DeepSpeed assigns them to the module
        whose backward is running (`ds_recompute_parameters`): a module of the block, which ends soon, or, with
        use_reentrant, the whole network, which never ends."""
        self._reassigned = dict[StoredTensor, None]()
        """Such weights that have been assigned to the module of the current turn, which releases them."""

    def note(self, turn: ModuleTurn, mine: Sequence[StoredTensor]) -> None:
        """Note that the module of a turn reads its tensors."""
        self._reassigned = {}
        if turn.part is TurnPart.BEGINS:
            self._kept.update(mine)
        elif turn.part is TurnPart.ENDS:
            self._kept.difference_update(mine)
        if turn.direction is PassDirection.RECOMPUTATION:
            self._packed.update(t for t in mine if self.engine.packs and t.trains)
            if self.engine.reassigns:
                self._gathered_by_recomputation |= {t: None for t in mine if not t.trains}
        elif mine or turn.part is TurnPart.ENDS:
            self._packed.difference_update(mine)
            if self.engine.packs:
                self._reassigned, self._gathered_by_recomputation = self._gathered_by_recomputation, {}

    def freed_after(self, released: Iterable[StoredTensor]) -> list[StoredTensor]:
        """The tensors that are freed when the current turn ends: `released` by the module's hook, and the frozen ones that
        the last recomputation gathered. Those that another module or recomputation still needs are not."""
        large = (t for t in self._reassigned if not self.engine.persists(t))
        return [t for t in (*released, *large) if t not in self._gathered_by_recomputation and t not in self._kept]

    def is_packed(self, tensor: StoredTensor) -> bool:
        """Whether a checkpoint keeps the tensor's memory."""
        return tensor in self._packed

    def memory_ends(self, tensor: StoredTensor, index: int, mine: Sequence[StoredTensor]) -> int:
        """The instant from which the memory of a tensor is free that the module of turn `index` has released. `mine`: the
        module's own tensors."""
        ends = self.turns[index].ends
        if tensor in self._packed:
            ends = next((later.ends for later in self._later(tensor, index)), ends)
        if self.engine.packs and tensor.quantized and tensor in mine:
            ends = self._last(tensor).ends  # bitsandbytes' product keeps a quantised weight for its backward (`MatMul4Bit`)
        if (tensor.exceeds_matrix or tensor in self.viewed) and (tensor in mine or tensor in self._reassigned):
            after = self._later(tensor, index)
            if after and not any(later.direction is PassDirection.RECOMPUTATION for later in after):
                ends = max(ends, _done(after[-1], tensor))
        return ends

    def _later(self, tensor: StoredTensor, index: int) -> list[ModuleTurn]:
        """The turns after turn `index` that have the tensor."""
        uses = self._uses.get(tensor, [])
        return [self.turns[use] for use in uses[bisect_right(uses, index) :]]

    def _last(self, tensor: StoredTensor) -> ModuleTurn:
        """The last turn that has the tensor."""
        return self.turns[self._uses[tensor][-1]]


def _done(turn: ModuleTurn, tensor: StoredTensor) -> int:
    """The instant at which a module is done with one of its tensors: a leaf, when the tensor's own operation has ended."""
    if isinstance(turn.module, Leaf) and tensor.name in turn.module.done:
        return turn.begins + turn.module.done[tensor.name]
    return turn.ends
