"""What FSDP1 and FSDP2 share: units are gathered when a block needs them, and reduced after its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peakcast.models.ledger.layouts.base import Layout, StoredTensor
from peakcast.models.ledger.layouts.fsdp_units import Unit, UnitPlace
from peakcast.models.ledger.layouts.module_tree import BlockKind
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.models.ledger.tape.template import Template
from peakcast.timelines.timeline import Phase


class ShardedLayout(Layout):
    """Units that are gathered when a block needs them: the order of events that FSDP1 and FSDP2 share. Subclasses define
    what a gather (`gather`) and a reduction (`reduce`) allocate."""

    stays_after_forward = False
    """Whether every unit stays gathered from its forward to its backward (`reshard_after_forward=False`)."""

    def __init__(
        self, tensors: Sequence[StoredTensor], units: Sequence[Unit], *, prefetches: bool, waits: bool, **more: Any
    ) -> None:
        super().__init__(tensors, **more)
        self.units = list(units)
        self.prefetches = prefetches
        self.waits = waits
        """Whether micro-batches before the last keep full gradients instead of reducing them."""
        self.different_micro_batches = 3 if waits else 2
        """Those between the first and the last then find full gradients, as the last does, and leave them full, as the
        first does."""
        self.reshards = True
        """Whether a unit is resharded after each use; under pipelining only after all micro-batches (`end_turns`)."""
        self.last = True
        self._fetched_for: set[Unit] = set()
        """Units that have prefetched the next one in this backward. An encoder-decoder's two ends are one unit, which does
        so once."""
        self._of_module: dict[str, list[Unit]] = {}
        self._of_operations: dict[str, list[Unit]] = {}
        """Units that serve one operation, by module."""
        for unit in self.units:
            for module in unit.modules:
                (self._of_operations if unit.operation else self._of_module).setdefault(module, []).append(unit)

    def by_module(self) -> list[Unit]:
        """The units in the order of their modules (`_state_ctx.all_states`): the one with the token table comes first."""
        *others, last = self.units
        return [last, *others] if BlockKind.EMBEDDING.value in last.modules else self.units

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        self.last = last
        self._fetched_for.clear()

    def before_forward(self, step: Step, module: str) -> None:
        units = self._of_module.get(module, [])
        for unit in sorted(units, key=lambda unit: (unit.place is not UnitPlace.ROOT, unit.hook is None)):
            if not unit.gathered:
                self.gather(step, unit, Phase.FORWARD)

    def after_forward(self, step: Step, module: str) -> None:
        for unit in self._of_module.get(module, []):
            if self.reshards and not (self.stays_after_forward or unit.stays_after_forward):
                self.let_go(step, unit, Phase.FORWARD)

    def before_backward(self, step: Step, module: str) -> None:
        for unit in self._of_module.get(module, []):
            if not unit.gathered and not unit.prefetched_unused:
                self.gather(step, unit)
            if unit in self._fetched_for:
                continue
            if (
                self.prefetches
                and unit.hook is None
                and unit.modules[-1] == module
                and (following := self.unit_before(unit))
            ):
                self.prefetch(step, following)
                self._fetched_for.add(unit)

    def after_backward(self, step: Step, run: BlockRun) -> None:
        added = self.has_gradient(run.module, run.template, begun=False)
        for unit in self._of_module.get(run.module, []):
            hook, following = unit.hook, self.unit_before(unit) if self.prefetches and unit.hook else None
            if hook and following and unit.modules[-1] == run.module and run.module not in following.modules:
                hooked = run.template.backward_marks.get(hook, (0,))[0]  # in a fused loss no lm_head runs backward
                self.prefetch(step, following, born=(run.backward_start or 0) + hooked)
            if len(run.template.gradient_columns) and not added:
                unit.runs.append(run)  # else added in place to the existing gradients
            done = unit.modules[0] == run.module and not unit.reduces_at_end
            if done and run.template.num_forward:  # the weights' half of a split backward runs no hook
                self.finish(step, unit)

    def has_gradient(self, module: str, template: Template, *, begun: bool) -> bool:
        runs = [run for unit in self._of_module.get(module, []) for run in unit.runs]
        return any(run.module == module and run.template is template for run in runs)

    def end_backward(self, step: Step) -> None:
        for unit in self.by_module():
            if unit.reduces_at_end:
                self.finish(step, unit)
            if unit.prefetched_unused:
                step.free(unit.sent)

    def begin_turns(self) -> None:
        """Before the turns of a pipeline: units stay gathered, and full gradients are not reduced before all turns are
        done."""
        self.reshards, self.waits, self.last = False, True, False

    def end_turns(self, step: Step) -> None:
        self.reshards, self.last = True, True
        for unit in self.by_module():
            self.finish(step, unit)

    def unshard(self, step: Step, phase: Phase) -> None:
        """Start gathering every unit, as a pipeline does for a stage whose turn comes soon."""
        for unit in self.by_module():
            self.prefetch(step, unit, phase=phase)

    def wait(self, step: Step, phase: Phase) -> None:
        """Finish gathering every unit."""
        for unit in self.by_module():
            if not unit.gathered:
                self.gather(step, unit, phase)
                self.end_forward(step)  # a forward would keep the buffer that it has copied out; this frees it at once

    def reshard(self, step: Step) -> None:
        """Free what is gathered."""
        for unit in self.units:
            step.free(unit.gathered)

    def finish(self, step: Step, unit: Unit) -> None:
        """The unit's backward is done: reshard it, and reduce its gradients or keep them for later."""
        if self.reshards:
            self.take_parts(step, unit)
        if self.reshards_in_backward():
            self.let_go(step, unit, Phase.BACKWARD)
        self.fetch_after(step, unit)
        if not unit.trained:
            unit.runs.clear()
        elif self.waits and not self.last:
            self.keep_full(step, unit)
        else:
            self.reduce(step, unit)

    def let_go(self, step: Step, unit: Unit, phase: Phase) -> None:
        """Reshard a unit that is done in this phase."""
        step.free(unit.gathered)

    def fetch_after(self, step: Step, unit: Unit) -> None:
        """Called when the unit's backward is done, before its gradients are reduced."""

    def reshards_in_backward(self) -> bool:
        """Whether a unit is resharded when its backward is done."""
        return self.reshards

    def take_parts(self, step: Step, unit: Unit) -> None:
        """If gradients are larger than their tensors, replace them by this rank's parts."""

    def take_gradients(self, step: Step, unit: Unit) -> None:
        """Free the full gradients of the unit's runs from the next instant on."""
        for run in unit.runs:
            run.take_gradients(step.now, unit.gradients_in(run.template))
        unit.runs.clear()

    def gather(self, step: Step, unit: Unit, phase: Phase = Phase.BACKWARD) -> None:
        """All-gather the unit's tensors."""
        raise NotImplementedError

    def prefetch(self, step: Step, unit: Unit, *, born: int | None = None, phase: Phase = Phase.BACKWARD) -> None:
        """Start to all-gather the unit's tensors, unless they are gathered. `born`: a past instant at which this
        happened."""
        raise NotImplementedError

    def reduce(self, step: Step, unit: Unit) -> None:
        """Reduce the unit's full gradients to this rank's part."""
        raise NotImplementedError

    def keep_full(self, step: Step, unit: Unit) -> None:
        """Keep the full gradients of a micro-batch that does not reduce."""
        raise NotImplementedError

    def release_gradients(self, step: Step) -> None:
        for unit in self.units:
            step.free(unit.gradient.copy())

    def unit_before(self, unit: Unit) -> Unit | None:
        """The unit whose backward comes next: the one before it in forward; None for the first."""
        index = self.units.index(unit)
        return self.units[index - 1] if index else None
