"""What FSDP1 and FSDP2 share: units are gathered when a block needs them, and reduced when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peakcast.models.analytical.layouts.base import Layout, StoredTensor
from peakcast.models.analytical.layouts.units import Unit
from peakcast.models.analytical.step import Run, Step
from peakcast.models.analytical.template import Template
from peakcast.timeline import Phase


class ShardedLayout(Layout):
    """Units that are gathered when a block needs them: the order of events that FSDP1 and FSDP2 share.

    Subclasses say what a gather (`gather`) and a reduction (`reduce`) allocate.
    """

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
        self.reshards = True
        """Whether a unit is resharded when it is done; under pipelining, once for all micro-batches (`end_turns`)."""
        self.last = True
        self._fetched_for: set[Unit] = set()
        """Units that have fetched the next in this backward; both ends of an encoder-decoder are one, and do so once."""
        self._of_module: dict[str, list[Unit]] = {}
        self._of_operations: dict[str, list[Unit]] = {}
        """Units of one operation, by module."""
        for unit in self.units:
            for module in unit.modules:
                (self._of_operations if unit.operation else self._of_module).setdefault(module, []).append(unit)

    def by_module(self) -> list[Unit]:
        """The units in the order of the modules that have them (`_state_ctx.all_states`): what has the table is first."""
        *others, last = self.units
        return [last, *others] if "embedding" in last.modules else self.units

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        self.last = last
        self._fetched_for.clear()

    def before_forward(self, step: Step, module: str) -> None:
        units = self._of_module.get(module, [])
        for unit in (*units[-1:], *units[:-1]):  # the root, if it is among them, is the last and comes first
            if not unit.gathered:
                self.gather(step, unit, Phase.FORWARD)

    def after_forward(self, step: Step, module: str) -> None:
        for unit in self._of_module.get(module, []):
            if self.reshards and not (self.stays_after_forward or unit.stays_after_forward):
                self.let_go(step, unit, Phase.FORWARD)

    def before_backward(self, step: Step, module: str) -> None:
        for unit in self._of_module.get(module, []):
            if not unit.gathered and not unit.fetched_in_vain:
                self.gather(step, unit)
            if unit in self._fetched_for:
                continue
            if self.prefetches and not unit.hook and unit.modules[-1] == module and (following := self.unit_before(unit)):
                self.prefetch(step, following)
                self._fetched_for.add(unit)

    def after_backward(self, step: Step, run: Run) -> None:
        added = self.has_gradient(run.module, run.template, begun=False)
        for unit in self._of_module.get(run.module, []):
            following = self.unit_before(unit) if self.prefetches and unit.hook else None
            if following is not None and unit.modules[-1] == run.module and run.module not in following.modules:
                labels = run.template.backward_labels  # a fused loss has no backward of the lm_head left: its first
                hooked = next((index for index, label in enumerate(labels) if label.startswith(unit.hook)), 0)
                at = (run.backward_start or 0) + hooked
                self.prefetch(step, following, born=at)
            if len(run.template.gradient_columns) and not added:
                unit.runs.append(run)  # else added in place to what is there
            if run.template.num_forward and not unit.reduces_at_end:  # a weight's backward for itself passes no hook
                self.finish(step, unit)

    def has_gradient(self, module: str, template: Template, *, begun: bool) -> bool:
        runs = [run for unit in self._of_module.get(module, []) for run in unit.runs]
        return any(run.module == module and run.template is template for run in runs)

    def end_backward(self, step: Step) -> None:
        for unit in self.by_module():
            if unit.reduces_at_end:
                self.finish(step, unit)
            if unit.fetched_in_vain:
                step.free(unit.sent)

    def begin_turns(self) -> None:
        """Before the turns of a pipeline: units stay gathered and full gradients wait until they have all been taken."""
        self.reshards, self.waits, self.last = False, True, False

    def end_turns(self, step: Step) -> None:
        self.reshards, self.last = True, True
        for unit in self.by_module():
            self.finish(step, unit)

    def unshard(self, step: Step, phase: Phase) -> None:
        """Begin to gather every unit, as a pipeline does for a stage that comes soon."""
        for unit in self.by_module():
            self.prefetch(step, unit, phase=phase)

    def wait(self, step: Step, phase: Phase) -> None:
        """Every unit that is being gathered is there."""
        for unit in self.by_module():
            if not unit.gathered:
                self.gather(step, unit, phase)
                self.end_forward(step)  # which waits for nobody: a forward would keep a while what it has copied out

    def reshard(self, step: Step) -> None:
        """Let go of what is gathered."""
        for unit in self.units:
            step.free(unit.gathered)

    def finish(self, step: Step, unit: Unit) -> None:
        """The unit's backward is done: reshard it, and reduce its gradients or let them wait."""
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
        """The unit's backward is done and its gradients are about to be reduced."""

    def reshards_in_backward(self) -> bool:
        """Whether a unit is resharded when its backward is done."""
        return self.reshards

    def take_parts(self, step: Step, unit: Unit) -> None:
        """Of gradients that are larger than their tensors, this rank's parts."""

    def take_gradients(self, step: Step, unit: Unit) -> None:
        """The full gradients of the unit's runs are gone from the next instant on."""
        for run in unit.runs:
            run.take_gradients(step.now, unit.operation)
        unit.runs.clear()

    def gather(self, step: Step, unit: Unit, phase: Phase = Phase.BACKWARD) -> None:
        """All-gather the unit's tensors."""
        raise NotImplementedError

    def prefetch(self, step: Step, unit: Unit, *, born: int | None = None, phase: Phase = Phase.BACKWARD) -> None:
        """Begin to all-gather the unit's tensors, if they are not there; `born`: at an instant of the past."""
        raise NotImplementedError

    def reduce(self, step: Step, unit: Unit) -> None:
        """Turn the unit's full gradients into this rank's part."""
        raise NotImplementedError

    def keep_full(self, step: Step, unit: Unit) -> None:
        """A micro-batch that does not reduce: the full gradients stay."""
        raise NotImplementedError

    def release_gradients(self, step: Step) -> None:
        for unit in self.units:
            step.free(unit.gradient)

    def unit_before(self, unit: Unit) -> Unit | None:
        """The unit that backward comes to next: the one before it in forward."""
        index = self.units.index(unit)
        return self.units[index - 1] if index else None
