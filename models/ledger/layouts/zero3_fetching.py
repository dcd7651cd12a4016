"""How ZeRO-3 gathers and releases weights: DeepSpeed's parameter coordinator, played on the turns of one micro-batch.

Source: DeepSpeed 0.19.8 `runtime/zero/partitioned_param_coordinator.py` (`_fetch_sub_module_impl`, `release_sub_module`,
`__params_to_release`) and `partition_parameters.py` (`_all_gather_sequential`, `_all_gather_coalesced`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero import Buckets
from peakcast.models.ledger.layouts.zero3_order import Order
from peakcast.models.ledger.layouts.zero3_passing import Fetched, Reduction
from peakcast.models.ledger.layouts.zero3_turns import Turn
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category

BUFFERS = Category.COMMUNICATION_BUFFERS
REHEARSALS = 3
"""Number of equal micro-batches after which the coordinator's knowledge of their order no longer changes."""


@dataclass(slots=True)
class Gather:
    """An all-gather that has been started. `tensors`: those that have not been used yet, in order."""

    tensors: dict[StoredTensor, None]
    born: int
    coalesced_bytes: tuple[int, ...]
    """Bytes of the flat outputs from which several tensors are copied, one output for each dtype; empty for a single
    tensor, which is gathered in place."""
    arrived: int | None = None
    """The instant at which a module first waited for it."""


@dataclass(slots=True)
class Coordinator:
    """Which weights are gathered and which are on their way, turn by turn."""

    step: Step
    ranks: int
    sizes: Buckets
    packs: bool
    """Whether a checkpoint keeps trained weights that its recomputation has used, so that a release does not free their
    memory (`torch/utils/checkpoint.py`, not with use_reentrant: `x.detach()` in `_recomputation_hook`)."""
    stream: int = 0
    """The stream on which it allocates. The computing stream still uses a released weight (`free_param`: `record_stream`),
    so its block would have to wait; that is not counted. DeepSpeed waits for gathers and reductions only, so nothing in a
    forward says how far ahead the CPU is: at its end, all its weights may be missing from the cache, or none."""
    from_host: bool = False
    """Whether the ranks' parts are in host memory. On one rank a weight is its own part, so only then is there a copy to
    make (`NoGatherCoalescedHandle`)."""
    order: Order = field(default_factory=Order)
    available: dict[StoredTensor, int] = field(default_factory=dict)
    """Tensor -> the instant from which it is gathered."""
    gathers: dict[StoredTensor, Gather] = field(default_factory=dict)
    viewed: Collection[StoredTensor] = ()
    """Tensors, besides stacked experts, that autograd saves as views, so that a release does not free their memory. (A
    checkpoint does not save them.)"""
    unread: set[StoredTensor] = field(default_factory=set)
    """Weights of modules that do not run. A module that reads one gathers it itself the first time, and later when it
    begins."""
    made: Sequence[int] | npt.NDArray[np.int64] = ()
    """Bytes that operations allocate at each instant, after their modules have gathered."""
    reductions: dict[int, Reduction] = field(default_factory=dict)
    """By instant: the reduction that follows the operation, when what a checkpoint kept for that operation is freed."""
    elements: int = 0
    """Gathered elements, as DeepSpeed counts them: from 0 each time the network runs forward."""
    _queue: deque[tuple[StoredTensor, int]] = field(default_factory=deque)
    _next_use: dict[StoredTensor, int] = field(default_factory=dict)
    _for_good: set[StoredTensor] = field(default_factory=set)
    _fetched: Fetched = field(default_factory=lambda: Fetched(-1))
    """What is gathered in the instant at which the current turns begin."""
    _decided: dict[tuple[str, int], tuple[StoredTensor, ...]] = field(default_factory=dict)
    """By (module, position of the turn): what it releases. `lru_cache` around `__params_to_release` keeps the first answer,
    even if the order has changed since."""

    def learn(self, turns: Sequence[Turn]) -> None:
        """Bring the coordinator into the state it has after many micro-batches of these turns."""
        if sum(turn.starts for turn in turns) == 1:  # one forward per micro-batch: the recorded order is then always right
            self.order.known = tuple(turn for turn in turns if turn.enters)
        else:
            rehearsal = replace(self, step=Step())
            for _ in range(REHEARSALS):
                rehearsal.play(turns)
                rehearsal.end(0, all_of_them=True)
        self.unread.clear()

    def play(self, turns: Sequence[Turn]) -> None:
        """Play all turns of a micro-batch. While DeepSpeed does not know their order, it gathers nothing ahead, and
        releases a module's parameters, small ones too, as soon as the module is done.

        Frozen weights that are gathered for a recomputation are assigned to the module whose backward is running
        (`ds_recompute_parameters`): a module of the block, which is done soon; with use_reentrant the whole network, which
        is never done.
        """
        packed, kept, lent = set[StoredTensor](), set[StoredTensor](), dict[StoredTensor, None]()
        last = {t: turn.ends for turn in turns for t in turn.tensors if self.packs and t.quantized}
        for index, turn in enumerate(turns):
            self._begin_turn(turn.begins)
            if turn.starts:
                self._restart(turn.begins)
            if turn.enters and self.order.meet(turn):
                self._drop_gathers(turn.begins)
            self.unread -= set() if turn.enters else set(turn.tensors)
            mine = [t for t in turn.tensors if not (turn.stays and t in self.unread)]
            missing = [t for t in mine if t not in self.available and t not in self.gathers]
            self._gather(missing, turn.begins)
            for tensor in reversed(mine):  # DeepSpeed's order is a set's; this one keeps both buffers of two gathers
                self._wait(tensor, turn.begins)
            if self.order.known is not None and turn.enters:
                self._fetch_ahead(mine, turn.begins)
            self.order.at += turn.enters
            released, taken_back = list(mine), dict[StoredTensor, None]()
            if self.order.known is not None:
                asked = turn.name, self.order.at
                if asked not in self._decided:
                    self._decided[asked] = tuple(self._to_release(mine, leaf=turn.leaf))
                released = list(self._decided[asked])
            if turn.stays:
                kept.update(mine)
            elif not turn.enters:
                kept.difference_update(mine)
            if turn.computes_again:
                packed.update(t for t in mine if self.packs and t.trains)
                lent |= {t: None for t in mine if not t.trains}
            elif mine or not turn.enters:
                packed.difference_update(mine)
                if self.packs:
                    taken_back, lent = lent, {}
                    released += [t for t in taken_back if t.numel > self.sizes.persistence]
            for tensor in [t for t in released if t not in lent and t not in kept] if turn.releases else ():
                ends = turn.ends
                if tensor in packed:
                    ends = next((later.ends for later in _turns_with(tensor, turns, index + 1)), ends)
                if tensor in mine:  # bitsandbytes' product keeps a quantised weight for its backward (`MatMul4Bit`)
                    ends = last.get(tensor, ends)
                if (tensor in mine or tensor in taken_back) and (tensor.stacked or tensor in self.viewed):
                    after = list(_turns_with(tensor, turns, index + 1))
                    if after and not any(later.computes_again for later in after):
                        ends = max(ends, after[-1].done.get(tensor.name, after[-1].ends))
                if tensor in packed and tensor in self.available and ends - 1 in self.reductions:
                    self.reductions[ends - 1].gone_bytes += self._padded_bytes(tensor)
                self._release(tensor, ends)
        self._begin_turn(-1)

    def _restart(self, now: int) -> None:
        """`reset_step`: free what was gathered ahead and not used."""
        self._drop_gathers(now)
        self.order.begin()
        self._queue = deque((t, index) for index, turn in enumerate(self.order.known or ()) for t in turn.tensors)
        self._next_use.clear()
        self.elements = 0

    def _fetch_ahead(self, mine: Sequence[StoredTensor], now: int) -> None:
        """Take this turn's tensors off the queue, and gather the next ones."""
        fresh = {t for t in mine if self._next_use.get(t, -1) < self.order.at}
        while self._queue and fresh:
            tensor, at = self._queue.popleft()
            self._next_use[tensor] = at
            fresh.discard(tensor)
        self._prefetch(now)

    def _prefetch(self, now: int) -> None:
        """Gather the next tensors in order, until they fill a bucket."""
        most, ahead = min(self.sizes.live - self.elements, self.sizes.prefetch), dict[StoredTensor, None]()
        filled = 0
        while self._queue and filled < most:
            tensor, at = self._queue.popleft()
            self._next_use[tensor] = max(self._next_use.get(tensor, -1), at)
            if tensor not in self.available and tensor not in self.gathers and tensor not in ahead:
                ahead[tensor] = None
                filled += tensor.numel
        self._gather(ahead, now)

    def _to_release(self, mine: Sequence[StoredTensor], *, leaf: bool) -> Iterable[StoredTensor]:
        """A turn's tensors, except small ones, those further along in the queue, and those used again soon."""
        at, reuse = self.order.at, self.sizes.reuse
        found = (t for t in mine if t.numel > self.sizes.persistence and self._next_use.get(t, -1) <= at)
        return (t for t in found if not self.order.comes_again(t, reuse, leaf=leaf))

    def _gather(self, tensors: Iterable[StoredTensor], now: int) -> None:
        """Start to gather `tensors`."""
        wanted = dict.fromkeys(tensors)
        if not wanted:
            return
        flat: dict[int, int] = {}
        for tensor in wanted if len(wanted) > 1 < self.ranks else ():
            flat[tensor.gathered_bytes] = flat.get(tensor.gathered_bytes, 0) + self._padded_bytes(tensor)
        gather = Gather(wanted.copy(), now, tuple(flat.values()))
        self.gathers.update(dict.fromkeys(wanted, gather))
        self.elements += sum(t.numel for t in wanted)
        whole = sum(map(self._padded_bytes, wanted))
        self._fetched.allocate(whole)
        if self.from_host and self.ranks > 1:  # its own parts are copied to the GPU, to be sent
            self._fetched.allocate(whole // self.ranks)
            self._fetched.free(whole // self.ranks)

    def _padded_bytes(self, tensor: StoredTensor) -> int:
        """Bytes of the gathered tensor, padded to equal parts."""
        if self.ranks == 1 and not self.from_host:
            return 0
        return -(-tensor.numel // self.ranks) * self.ranks * tensor.gathered_bytes

    def _wait(self, tensor: StoredTensor, now: int) -> None:
        """Finish the gather of `tensor` and of all tensors gathered with it. Their flat buffer is freed when the last of
        them is used."""
        gather = self.gathers.pop(tensor, None)
        if gather is None:
            return
        if gather.arrived is None:
            gather.arrived = now
            self.available |= dict.fromkeys(gather.tensors, now if gather.coalesced_bytes else gather.born)
            if gather.coalesced_bytes:
                self._fetched.allocate(sum(map(self._padded_bytes, gather.tensors)))
        del gather.tensors[tensor]
        if not gather.tensors:
            self._hold_output(gather, now)
            if gather.born == now:
                self._fetched.free(sum(gather.coalesced_bytes))
            else:
                self._fetched.free_older(sum(gather.coalesced_bytes))

    def _hold_output(self, gather: Gather, ends: int) -> None:
        """Hold the flat outputs of a gather until `ends`."""
        for size in gather.coalesced_bytes if gather.born < ends else ():
            self.step.hold("all_gather.output", BUFFERS, size, gather.born, ends, stream=self.stream)

    def _begin_turn(self, now: int) -> None:
        """Begin a turn at instant `now`. At the instant before, hold the peak of gathering that exceeds what its operation
        allocates."""
        at = self._fetched.at
        if at == now:
            return
        made = int(self.made[at]) if 0 <= at < len(self.made) else 0
        made += sum(self.reductions[at].num_bytes()) if at in self.reductions else 0
        self.step.hold("all_gather", BUFFERS, self._fetched.more_than(made), at, at + 1, stream=self.stream)
        self._fetched = Fetched(now)

    def stay(self) -> None:
        """Keep the gathered small tensors for good: no optimizer step will partition them again."""
        for tensor in [t for t in self.available if t not in self._for_good]:
            self._for_good.add(tensor)
            size = self._padded_bytes(tensor)
            self.step.hold("gathered", Category.PARAMETERS, size, self.available[tensor], module=tensor.module)

    def _release(self, tensor: StoredTensor, now: int) -> None:
        """Release a gathered tensor at instant `now`."""
        born = self.available.pop(tensor, None)
        if born is not None:
            self.elements -= tensor.numel
            category = BUFFERS if tensor.numel > self.sizes.persistence else Category.PARAMETERS
            stream = self.stream if born else 0  # small ones from the last step were gathered on the computing stream
            self.step.hold("gathered", category, self._padded_bytes(tensor), born, now, tensor.module, stream)

    def _drop_gathers(self, now: int) -> None:
        """Wait for what was gathered ahead and free it; several tensors gathered together are only then copied out."""
        for gather in {id(gather): gather for gather in self.gathers.values()}.values():
            self._hold_output(gather, now)
            born = now if gather.coalesced_bytes else gather.born
            self.available = dict.fromkeys(gather.tensors, born) | self.available
            for tensor in gather.tensors:
                self._release(tensor, now)
        self.gathers.clear()

    def end(self, now: int, *, all_of_them: bool = False) -> None:
        """Release what is left when backward ends (`release_backward_leftovers`); small tensors stay, except for the
        optimizer step (`all_of_them`)."""
        self._drop_gathers(now)
        for tensor in [t for t in self.available if all_of_them or t.numel > self.sizes.persistence]:
            self._release(tensor, now)
        self.elements = 0


def _turns_with(tensor: StoredTensor, turns: Sequence[Turn], first: int) -> Iterator[Turn]:
    """The turns that have `tensor`, from index `first` on."""
    return (turns[index] for index in range(first, len(turns)) if tensor in turns[index].tensors)
