"""Several pipeline stages on one rank, each sharded by itself, and when each is gathered.

Source: torch 2.13 `distributed/pipelining/schedules.py` `_add_unshard_reshard`, `_add_reduce_grad` and `stage.py`
perform_reduce_grad. The stages of the next turns are gathered, three at most, and stages that none of these turns needs are
resharded. A stage's gradients are reduced as soon as its last micro-batch is done.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from peakcast.models.ledger.layouts.base import Layout
from peakcast.models.ledger.layouts.pipeline import Turn
from peakcast.models.ledger.layouts.sharded import ShardedLayout
from peakcast.models.ledger.optimizers.rule import TrainedTensor
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.models.ledger.tape.template import Template
from peakcast.timelines.timeline import Phase

MOST_ACTIVE = 3
"""`max_active_stages` of `_add_unshard_reshard`."""


class StagedLayout(Layout):
    """A layout for each of a rank's stages: `parts`, with the modules of each in `modules`."""

    def __init__(self, parts: Sequence[Layout], modules: Sequence[Collection[str]]) -> None:
        super().__init__([tensor for part in parts for tensor in part.tensors])
        self.parts = list(parts)
        self._of_module = {module: part for part, names in zip(parts, modules, strict=True) for module in names}
        self._active: set[int] = set()
        self._at_turn = self.parts[0]

    # -- turns ------------------------------------------------------------------------------------------------------------

    def begin_turns(self) -> None:
        for part in self.parts:
            part.begin_turns()

    def before_turn(self, step: Step, turns: Sequence[Turn]) -> None:
        turn = turns[0]
        coming = list(dict.fromkeys(later.chunk for later in turns))[:MOST_ACTIVE]
        for chunk in self._active - set(coming):
            if isinstance(part := self.parts[chunk], ShardedLayout):
                part.reshard(step)
        fetched = [chunk for chunk in coming if chunk not in self._active]
        self._active = set(coming)
        phase = Phase(step.phases[-1]) if step.phases else Phase.FORWARD  # the turn's own phase begins after gathering
        for chunk in fetched:
            if isinstance(part := self.parts[chunk], ShardedLayout):
                part.unshard(step, phase)
        self._at_turn = self.parts[turn.chunk]
        self._at_turn.before_turn(step, turns)
        if isinstance(self._at_turn, ShardedLayout):
            self._at_turn.wait(step, phase)

    def after_turn(self, step: Step, turns: Sequence[Turn]) -> None:
        turn, *later = turns  # the stage is done if no later turn runs it
        if not any(other.chunk == turn.chunk for other in later):
            self.parts[turn.chunk].end_turns(step)

    # -- what a stage's own layout does -----------------------------------------------------------------------------------

    def hold_resident(self, step: Step) -> None:
        for part in self.parts:
            part.hold_resident(step)

    def before_forward(self, step: Step, module: str) -> None:
        self._of_module[module].before_forward(step, module)

    def while_forward(self, step: Step, run: BlockRun) -> None:
        self._of_module[run.module].while_forward(step, run)

    def after_forward(self, step: Step, module: str) -> None:
        self._of_module[module].after_forward(step, module)

    def before_backward(self, step: Step, module: str) -> None:
        self._of_module[module].before_backward(step, module)

    def after_backward(self, step: Step, run: BlockRun) -> None:
        self._of_module[run.module].after_backward(step, run)

    def has_gradient(self, module: str, template: Template, *, begun: bool) -> bool:
        return self._of_module[module].has_gradient(module, template, begun=begun)

    def end_forward(self, step: Step) -> None:
        self._at_turn.end_forward(step)

    def end_backward(self, step: Step) -> None:
        self._at_turn.end_backward(step)

    def optimized(self) -> list[TrainedTensor]:
        return [tensor for part in self.parts for tensor in part.optimized()]

    def release_gradients(self, step: Step) -> None:
        for part in self.parts:
            part.release_gradients(step)
