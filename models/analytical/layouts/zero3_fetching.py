"""How ZeRO-3 fetches and releases weights: DeepSpeed's parameter coordinator, played on the turns of one micro-batch.

Source: DeepSpeed 0.19.8 `runtime/zero/partitioned_param_coordinator.py` (`_fetch_sub_module_impl`, `release_sub_module`,
`__params_to_release`) and `partition_parameters.py` (`_all_gather_sequential`, `_all_gather_coalesced`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from peakcast.models.analytical.layouts.base import StoredTensor
from peakcast.models.analytical.layouts.zero import Buckets
from peakcast.models.analytical.layouts.zero3_turns import Turn
from peakcast.models.analytical.step import Step
from peakcast.timeline import Category

BUFFERS = Category.COMMUNICATION_BUFFERS


@dataclass(slots=True)
class Gather:
    """An all-gather that somebody waits for. `tensors`: those that have not been used yet."""

    tensors: set[StoredTensor]
    born: int
    coalesced_bytes: tuple[int, ...]
    """Of the flat outputs of several tensors, one for each dtype, which are copied out of it; none for one tensor alone,
    gathered in place."""
    arrived: bool = False


@dataclass(slots=True)
class Coordinator:
    """What is there and what is on its way, turn by turn."""

    step: Step
    ranks: int
    sizes: Buckets
    packs: bool
    """Whether a checkpoint keeps the weights that it has computed again with, as memory that a release does not free
    (`torch/utils/checkpoint.py`, not with use_reentrant: `x.detach()` in `_recomputation_hook`)."""
    available: dict[StoredTensor, int] = field(default_factory=dict)
    """Tensor -> instant since which it is there."""
    gathers: dict[StoredTensor, Gather] = field(default_factory=dict)
    elements: int = 0
    """Gathered ones, as DeepSpeed counts them: from 0 in each micro-batch."""

    def play(self, turns: Sequence[Turn], *, knows_order: bool) -> None:
        """All turns of a micro-batch. In the first of a training DeepSpeed only records their order: nothing is fetched
        ahead, and a module's parameters, small ones too, are released as soon as it is done.

        Frozen ones that are fetched to compute again belong to the module whose backward is under way
        (`ds_recompute_parameters`): the first of the block, and with use_reentrant the whole network, which is never done.
        """
        queue = deque((tensor, index) for index, turn in enumerate(turns) for tensor in turn.tensors)
        next_use: dict[StoredTensor, int] = {}
        packed, lent = set[StoredTensor](), set[StoredTensor]()
        for index, turn in enumerate(turns):
            fresh = {t for t in turn.tensors if next_use.get(t, -1) < index}
            self._gather([t for t in turn.tensors if t not in self.available and t not in self.gathers], turn.begins)
            for tensor in turn.tensors:
                self._wait(tensor, turn.begins)
            if knows_order:
                while queue and fresh:
                    tensor, at = queue.popleft()
                    next_use[tensor] = at
                    fresh.discard(tensor)
                self._prefetch(queue, next_use, turn.begins)
            released = list(self._to_release(turns, index, next_use) if knows_order else turn.tensors)
            if turn.computes_again:
                packed.update(turn.tensors if self.packs else ())
                lent.update(t for t in turn.tensors if not t.trains)
            elif turn.tensors:
                packed.difference_update(turn.tensors)
                if self.packs:
                    released += [t for t in lent if t.numel > self.sizes.persistence]
                    lent.clear()
            for tensor in [t for t in released if t not in lent] if turn.releases else ():
                later = (after.ends for after in turns[index + 1 :] if tensor in after.tensors)
                self._release(tensor, next(later, turn.ends) if tensor in packed else turn.ends)

    def _prefetch(self, queue: deque[tuple[StoredTensor, int]], next_use: dict[StoredTensor, int], now: int) -> None:
        """The next tensors in order, until they make a bucket."""
        most, ahead = min(self.sizes.live - self.elements, self.sizes.prefetch), dict[StoredTensor, None]()
        while queue and sum(t.numel for t in ahead) < most:
            tensor, at = queue.popleft()
            next_use[tensor] = max(next_use.get(tensor, -1), at)
            if tensor not in self.available and tensor not in self.gathers:
                ahead[tensor] = None
        self._gather(ahead, now)

    def _to_release(self, turns: Sequence[Turn], index: int, next_use: dict[StoredTensor, int]) -> Iterable[StoredTensor]:
        """A turn's tensors, but for small ones, those that the prefetch has passed over, and those used again soon."""
        found = [t for t in turns[index].tensors if t.numel > self.sizes.persistence and next_use.get(t, -1) <= index + 1]
        passed = 0
        for later in turns[index + 1 :]:
            if passed >= self.sizes.reuse or not found:
                break
            found = [t for t in found if t not in later.tensors]
            passed += sum(t.numel for t in later.tensors)
        return found

    def _gather(self, tensors: Iterable[StoredTensor], now: int) -> None:
        wanted = set(tensors)
        flat: dict[int, int] = {}
        for tensor in wanted if len(wanted) > 1 else ():
            flat[tensor.gathered_bytes] = flat.get(tensor.gathered_bytes, 0) + self._padded_bytes(tensor)
        gather = Gather(wanted.copy(), now, tuple(flat.values()))
        self.gathers.update(dict.fromkeys(wanted, gather))
        self.elements += sum(t.numel for t in wanted)

    def _padded_bytes(self, tensor: StoredTensor) -> int:
        return -(-tensor.numel // self.ranks) * self.ranks * tensor.gathered_bytes

    def _wait(self, tensor: StoredTensor, now: int) -> None:
        """The tensor is there, and with it all gathered with it; their flat buffer goes with the last to be used."""
        gather = self.gathers.pop(tensor, None)
        if gather is None:
            return
        ends = now if gather.arrived else now + 1
        if not gather.arrived:
            gather.arrived = True
            self.available.update(dict.fromkeys(gather.tensors, now if gather.coalesced_bytes else gather.born))
        gather.tensors.remove(tensor)
        if not gather.tensors:
            self._hold_output(gather, ends)

    def _hold_output(self, gather: Gather, ends: int) -> None:
        for size in gather.coalesced_bytes:
            self.step.hold("all_gather.output", BUFFERS, size, gather.born, ends)

    def _release(self, tensor: StoredTensor, now: int) -> None:
        born = self.available.pop(tensor, None)
        if born is not None:
            self.elements -= tensor.numel
            category = BUFFERS if tensor.numel > self.sizes.persistence else Category.PARAMETERS
            self.step.hold("gathered", category, self._padded_bytes(tensor), born, now, tensor.module)

    def end(self, now: int, *, all_of_them: bool = False) -> None:
        """What is left, as the next forward begins (`reset_step`); small tensors stay, but for the optimizer's step."""
        for gather in {id(gather): gather for gather in self.gathers.values()}.values():
            self._hold_output(gather, now)
            self.available.update(dict.fromkeys(gather.tensors - self.available.keys(), gather.born))
        self.gathers.clear()
        for tensor in [t for t in self.available if all_of_them or t.numel > self.sizes.persistence]:
            self._release(tensor, now)
        self.elements = 0
