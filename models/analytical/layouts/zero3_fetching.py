"""How ZeRO-3 fetches and releases weights: DeepSpeed's parameter coordinator, played on the turns of one micro-batch.

Source: DeepSpeed 0.19.8 `runtime/zero/partitioned_param_coordinator.py` (`_fetch_sub_module_impl`, `release_sub_module`,
`__params_to_release`) and `partition_parameters.py` (`_all_gather_sequential`, `_all_gather_coalesced`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from peakcast.models.analytical.layouts.base import StoredTensor
from peakcast.models.analytical.step import Step
from peakcast.timeline import Category

BUFFERS = Category.COMMUNICATION_BUFFERS


@dataclass(frozen=True, slots=True)
class Turn:
    """A module's forward or backward, from the instant `begins` until before `ends`."""

    begins: int
    ends: int
    tensors: tuple[StoredTensor, ...] = ()
    """Its own parameters; a module that holds others has a turn of its own, without any."""
    releases: bool = True
    """Not where no gradient flows on: the hook that would release hangs on its input's."""


@dataclass(slots=True)
class Gather:
    """An all-gather that somebody waits for. `tensors`: those that have not been used yet."""

    tensors: set[StoredTensor]
    born: int
    coalesced_bytes: int
    """Of the flat output of several tensors, which are copied out of it; 0 for one alone, gathered in place."""
    arrived: bool = False


@dataclass(slots=True)
class Coordinator:
    """What is there and what is on its way, turn by turn."""

    step: Step
    ranks: int
    prefetch: int
    reuse: int
    live: int
    persistence: int
    available: dict[StoredTensor, int] = field(default_factory=dict)
    """Tensor -> instant since which it is there."""
    gathers: dict[StoredTensor, Gather] = field(default_factory=dict)
    elements: int = 0
    """Gathered ones, as DeepSpeed counts them: from 0 in each micro-batch."""

    def play(self, turns: Sequence[Turn], *, knows_order: bool) -> None:
        """All turns of a micro-batch. In the first of a training DeepSpeed only records their order: nothing is fetched
        ahead, and a module's parameters, small ones too, are released as soon as it is done."""
        queue = deque((tensor, index) for index, turn in enumerate(turns) for tensor in turn.tensors)
        next_use: dict[StoredTensor, int] = {}
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
            released = self._to_release(turns, index, next_use) if knows_order else turn.tensors
            for tensor in released if turn.releases else ():
                self._release(tensor, turn.ends)

    def _prefetch(self, queue: deque[tuple[StoredTensor, int]], next_use: dict[StoredTensor, int], now: int) -> None:
        """The next tensors in order, until they make a bucket."""
        most, ahead = min(self.live - self.elements, self.prefetch), dict[StoredTensor, None]()
        while queue and sum(t.numel for t in ahead) < most:
            tensor, at = queue.popleft()
            next_use[tensor] = max(next_use.get(tensor, -1), at)
            if tensor not in self.available and tensor not in self.gathers:
                ahead[tensor] = None
        self._gather(ahead, now)

    def _to_release(self, turns: Sequence[Turn], index: int, next_use: dict[StoredTensor, int]) -> Iterable[StoredTensor]:
        """A turn's tensors, but for small ones, those that the prefetch has passed over, and those used again soon."""
        found = [t for t in turns[index].tensors if t.numel > self.persistence and next_use.get(t, -1) <= index + 1]
        passed = 0
        for later in turns[index + 1 :]:
            if passed >= self.reuse or not found:
                break
            found = [t for t in found if t not in later.tensors]
            passed += sum(t.numel for t in later.tensors)
        return found

    def _gather(self, tensors: Iterable[StoredTensor], now: int) -> None:
        wanted = set(tensors)
        flat = sum(self._padded_bytes(t) for t in wanted) if len(wanted) > 1 else 0
        gather = Gather(wanted.copy(), now, flat)
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
            self.step.hold("all_gather.output", BUFFERS, gather.coalesced_bytes, gather.born, ends)

    def _release(self, tensor: StoredTensor, now: int) -> None:
        born = self.available.pop(tensor, None)
        if born is not None:
            self.elements -= tensor.numel
            self.step.hold("gathered", BUFFERS, self._padded_bytes(tensor), born, now, tensor.module)

    def end(self, now: int) -> None:
        """What is left, as the next forward begins (`reset_step`); small tensors stay."""
        for gather in {id(gather): gather for gather in self.gathers.values()}.values():
            self.step.hold("all_gather.output", BUFFERS, gather.coalesced_bytes, gather.born, now)
            self.available.update(dict.fromkeys(gather.tensors - self.available.keys(), gather.born))
        self.gathers.clear()
        for tensor in [t for t in self.available if t.numel > self.persistence]:
            self._release(tensor, now)
        self.elements = 0


def turns_of(labels: Sequence[str], begins: int, tensors: Sequence[StoredTensor]) -> list[Turn]:
    """The turns of modules in a block's forward or backward, whose operations have these labels, the first at `begins`.
    What no label names is used throughout."""
    modules: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        modules.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    turns, named = list[Turn](), set[str]()
    before = current = ""
    for index, label in enumerate(labels, begins):
        owner = next((name for name in modules if name and (label == name or label.startswith(f"{name}."))), "")
        outer = label.partition(".")[0]
        if outer != before and outer != label and outer not in modules:
            turns.append(Turn(index, index + 1))  # the module around
        before = outer
        if owner and owner == current:
            turns[-1] = Turn(turns[-1].begins, index + 1, turns[-1].tensors)
        elif owner:
            turns.append(Turn(index, index + 1, tuple(modules[owner])))
        current = owner
        named.add(owner)
    rest = tuple(t for name, found in modules.items() if name not in named for t in found)
    return [Turn(begins, begins + len(labels), rest), *turns]
