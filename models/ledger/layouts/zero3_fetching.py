"""How ZeRO-3 gathers and releases weights: DeepSpeed's parameter coordinator, played on the turns of one micro-batch.

Source: DeepSpeed 0.19.8 `runtime/zero/partitioned_param_coordinator.py` (`fetch_sub_module`, `release_sub_module`,
`__params_to_release`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.run_ahead import Awaited
from peakcast.models.ledger.layouts.zero3_hooks import Leaf, ModuleTurn, TurnPart
from peakcast.models.ledger.layouts.zero3_instants import Instants
from peakcast.models.ledger.layouts.zero3_order import Order
from peakcast.models.ledger.layouts.zero3_prefetching import Prefetcher
from peakcast.models.ledger.layouts.zero3_weight_users import WeightUsers
from peakcast.models.ledger.layouts.zero3_weights import Weights, Zero3Engine
from peakcast.models.ledger.tape.step import Step

LEARNING_MICRO_BATCHES = 3
"""Number of equal micro-batches after which the coordinator's knowledge of their order no longer changes."""


OUTSTANDING_REDUCTIONS = 3
"""Reductions under way when the CPU waits for the first of them (`stage3.py`: more than `max_param_reduce_events`)."""


class Coordinator:
    """Gathers and releases weights on a step, turn by turn. While DeepSpeed does not know the order of turns, it gathers
    nothing ahead, and releases a module's parameters, small ones too, as soon as the module is done.

    `viewed`: as in `WeightUsers`. `unread`: weights of modules that do not run, which another module reads. That module
    gathers such a weight when it reads it the first time, and in later steps when the module begins.
    """

    def __init__(
        self,
        step: Step,
        engine: Zero3Engine,
        *,
        viewed: Collection[StoredTensor] = (),
        unread: Collection[StoredTensor] = (),
    ) -> None:
        self.engine, self.weights = engine, Weights(step, engine)
        self._viewed = viewed
        self._unread = set(unread)
        self._order = Order()
        self._prefetcher = Prefetcher()
        self._decided: dict[tuple[str, int], tuple[StoredTensor, ...]] = {}
        """By (module, position of the turn): what it releases. `lru_cache` around `__params_to_release` keeps the first
        answer, even if the order has changed since."""

    def learn(self, turns: Sequence[ModuleTurn]) -> None:
        """Bring the coordinator into the state it has after many micro-batches of these turns."""
        if sum(turn.starts for turn in turns) == 1:  # one forward per micro-batch: the recorded order is then always right
            self._order.known = tuple(turn for turn in turns if turn.part is not TurnPart.ENDS)
        else:
            step, self.weights.step = self.weights.step, Step()
            for _ in range(LEARNING_MICRO_BATCHES):
                self.play(turns, Instants())
                self.weights.release_rest(0, small_too=True)
            self.weights.step = step
        self._unread.clear()

    def play(self, turns: Sequence[ModuleTurn], instants: Instants) -> None:
        """Play all turns of a micro-batch. `instants`: what else is allocated meanwhile."""
        users = WeightUsers(turns, self.engine, self._viewed)
        self.weights.awaited = Awaited(sorted(instants.reductions), OUTSTANDING_REDUCTIONS, instants.ends)
        for index, turn in enumerate(turns):
            self.weights.begin_instant(turn.begins, instants)
            mine = self._fetch(turn)
            if mine or turn.part is TurnPart.ENDS:
                self._release(index, turn, mine, users, instants)
        self.weights.begin_instant(-1, instants)

    def _fetch(self, turn: ModuleTurn) -> Sequence[StoredTensor]:
        """`fetch_sub_module`: gather the module's tensors, and prefetch those of the modules after it. Returns the module's
        tensors."""
        now, enters = turn.begins, turn.part is not TurnPart.ENDS
        if turn.starts:
            self._begin_forward(now)
        if enters and self._order.deviates_at(turn):
            self.weights.drop_gathers(now)
        mine = self._read_by(turn)
        if mine:
            if missing := self.weights.missing(mine):
                self.weights.gather(missing, now)
            for tensor in reversed(mine):  # DeepSpeed's order is a set's; this one keeps both buffers of two gathers
                self.weights.wait(tensor, now)
        if enters:
            if self._order.known is not None:
                self._prefetcher.run_ahead(mine, self._order.at, self.weights, now)
            self._order.at += 1
        return mine

    def _begin_forward(self, now: int) -> None:
        """`reset_step`: free what was gathered ahead and not used."""
        self.weights.drop_gathers(now)
        self._order.begin()
        self._prefetcher.begin(self._order)
        self.weights.elements = 0

    def _read_by(self, turn: ModuleTurn) -> Sequence[StoredTensor]:
        """The tensors that a module has gathered when its turn begins."""
        if turn.part is TurnPart.ENDS:
            self._unread.difference_update(turn.module.tensors)
        if turn.part is TurnPart.BEGINS and self._unread:
            return [t for t in turn.module.tensors if t not in self._unread]
        return turn.module.tensors

    def _release(
        self, index: int, turn: ModuleTurn, mine: Sequence[StoredTensor], users: WeightUsers, instants: Instants
    ) -> None:
        """`release_sub_module`: release what the module need not leave for others."""
        asked = self._to_release(turn, mine)
        users.note(turn, mine)
        for tensor in users.freed_after(asked) if turn.releases else ():
            ends = users.memory_ends(tensor, index, mine)
            if users.is_packed(tensor) and tensor in self.weights.available:
                instants.free_before_reduction(ends - 1, self.engine.padded_bytes(tensor))
            self.weights.release(tensor, ends)

    def _to_release(self, turn: ModuleTurn, mine: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        """`__params_to_release`: a turn's tensors, except small ones, those further along in the queue, and those used
        again soon."""
        if self._order.known is None:
            return mine
        at, leaf = self._order.at, isinstance(turn.module, Leaf)
        if (turn.name, at) not in self._decided:
            free = [t for t in mine if not self.engine.persists(t) and not self._prefetcher.is_queued_beyond(t, at)]
            used_soon = self._order.used_soon(free, self.engine.sizes.reuse, leaf=leaf)
            self._decided[turn.name, at] = tuple(t for t in free if t not in used_soon)
        return self._decided[turn.name, at]
