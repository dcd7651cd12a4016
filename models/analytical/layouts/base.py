"""What a data-parallel layout is: where each tensor of the network stands on one rank, and what happens to it around the
runs of the blocks. `Layout` is the one rank that holds everything; the other layouts say what they do differently."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from peakcast.fields import HashedOnce
from peakcast.models.analytical.optimizer_rules.rule import TrainedTensor
from peakcast.models.analytical.pipeline import Turn
from peakcast.models.analytical.step import Hooks, Run, Step
from peakcast.models.analytical.template import Template
from peakcast.models.analytical.update_in_backward import Alone
from peakcast.timeline import Category, Phase


@dataclass(frozen=True)
class StoredTensor(HashedOnce):
    """A tensor of the network as it is stored, unsharded. `shape[0]` counts its rows (dimension 0).

    `gathered_bytes`: of one element when it is used; narrower than `element_bytes` under FSDP's mixed precision.
    """

    __hash__ = HashedOnce.__hash__

    name: str
    module: str
    shape: tuple[int, ...]
    element_bytes: int
    gathered_bytes: int
    trains: bool
    decays: bool = True
    gradient_parts: int = 1
    """How many times as large its gradient is until it is reduced: that of a split table is whole on every rank."""
    parts_in_optimizer: int = 1
    """The same when the optimizer takes it: nothing has reduced it."""
    sums_gradient: bool = False
    """Whether its gradient is then a part of the sum over tensor-parallel ranks."""
    expert_ranks: int = 1
    """Ranks that have other experts: data parallelism is over as many fewer."""
    sharded: bool = True
    """Whether FSDP shards it: what is a parameter, and not what hangs on one (the constants of quantised weights)."""

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """Whether it is the matrices of all experts of a layer, which no nn.Linear has."""
        return len(self.shape) > 2

    @property
    def quantized(self) -> bool:
        """Whether it is counted in bytes: several elements of the network's weight make one."""
        return self.element_bytes == 1 and not self.trains

    def optimized(self, shape: tuple[int, ...]) -> TrainedTensor:
        """The part of `shape` of it, as the optimizer sees it."""
        parts, sums = self.parts_in_optimizer, self.sums_gradient
        return TrainedTensor(self.name, self.module, shape, self.element_bytes, self.decays, parts, sums)


class Layout(Hooks):
    """One rank that holds every tensor in full; gradients stay as backward makes them."""

    holds_main_parameters = False
    """Whether the layout itself keeps the wide copies that its optimizer updates."""
    updates_as_reduced = False
    """Whether what updates in backward does so where the layout reduces a gradient, and not where autograd makes it."""
    first_step = False
    """Whether this is the first step of the training: a library may not have seen the network run yet."""

    def __init__(self, tensors: Sequence[StoredTensor]) -> None:
        self.tensors = tensors
        self.updates: Mapping[tuple[str, str], Alone] = {}
        """The optimizers of single parameters, by module and name, if so."""

    def build(self, step: Step) -> None:
        """What the layout does with the network before the first step, where that is known."""

    def hold_resident(self, step: Step) -> None:
        """What stands in memory from before the step to its end."""
        step.hold_all(((t.name, t.module, t.numel * t.element_bytes) for t in self.tensors), Category.PARAMETERS)

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        """Before a micro-batch that is the first, the last, or both, of the step."""

    def end_backward(self, step: Step) -> None:
        """When autograd has finished a micro-batch."""

    def has_gradient(self, module: str, template: Template, *, begun: bool) -> bool:
        """Whether gradients that `template` makes of `module` are there, to be added to; `begun`: they were made before."""
        return begun

    def end_forward(self, step: Step) -> None:
        """When the whole network, or a pipeline stage, has run forward."""

    def begin_turns(self) -> None:
        """Before the forward and backward turns of a pipeline stage."""

    def before_turn(self, step: Step, turns: Sequence[Turn]) -> None:
        """Before the first of `turns`, which are all that are left."""

    def after_turn(self, step: Step, turns: Sequence[Turn]) -> None:
        """After the first of them."""

    def end_turns(self, step: Step) -> None:
        """After them."""

    def optimized(self) -> list[TrainedTensor]:
        """What the optimizer updates on this rank."""
        return [t.optimized(t.shape) for t in self.tensors if t.trains]

    def clip(self, step: Step) -> None:
        """What gradient clipping makes beside a norm per gradient."""

    def update_groups(self, trained: list[TrainedTensor], *, by_decay: bool) -> list[list[TrainedTensor]]:
        """The tensors that the optimizer updates at a time; its temporaries live as long."""
        if not by_decay:
            return [trained]
        return [group for group in ([t for t in trained if t.decays], [t for t in trained if not t.decays]) if group]

    def before_update(self, step: Step, group: list[TrainedTensor]) -> None:
        """Before the optimizer updates a group."""

    def after_update(self, step: Step) -> None:
        """After the optimizer has updated a group."""

    def release_gradients(self, step: Step) -> None:
        """`zero_grad(set_to_none=True)`, from the next instant on. (Gradients of blocks die with `Step.gradients_die`.)"""


@dataclass(slots=True, eq=False)
class Unit:
    """Tensors that are gathered and reduced together, and their state as the step goes. A unit equals itself only."""

    name: str
    modules: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]
    stays_after_forward: bool = False
    """Not resharded after forward."""
    reduces_at_end: bool = False
    """Its gradients wait for the end of backward: nothing that enters it has a gradient."""
    fetched_in_vain: bool = False
    """The unit after it fetches it ahead in backward, which never comes to it: what it makes has no gradient."""
    operation: str = ""
    """The one operation of a block that its tensors are for, and are gathered for alone; "": the whole block."""
    hook: str = ""
    """The operation whose backward waits for it to be gathered, and lets the next be fetched; "": the block's first."""
    sent: list[int] = field(default_factory=list)
    """Handles of an all-gather's output that has not been copied out."""
    gathered: list[int] = field(default_factory=list)
    """Handles of the unsharded tensors."""
    gradient: list[int] = field(default_factory=list)
    """Handles of what waits for the optimizer."""
    runs: list[Run] = field(default_factory=list)
    """Backward runs whose full gradients are still there."""
    accumulated: list[int] = field(default_factory=list)
    """Handles of full gradients of earlier micro-batches that are no longer where backward put them."""
    trained: list[StoredTensor] = field(init=False)
    """Its tensors that get a gradient."""

    def __post_init__(self) -> None:
        self.trained = [tensor for tensor in self.tensors if tensor.trains]


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


def units_by_layer(
    tensors: Iterable[StoredTensor],
    *,
    ends_apart: bool = False,
    adapters_apart: bool = False,
    first_layer_without_gradient: bool = False,
    tied: bool = False,
) -> list[Unit]:
    """A unit per decoder layer, and the rest: the root, which is gathered first and stays; or, with `ends_apart`, the token
    table as a unit, final norm and lm_head as another (one for both where they share the table), and the root what is left.
    `adapters_apart`: each adapter matrix is a unit of its own. `first_layer_without_gradient`: no gradient enters it.
    `tied`: the head uses the table, also where it has no tensor of its own.

    In the order in which their forward ends; the root is the last.
    """
    groups: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.module, []).append(tensor)
    embedding, head = groups.pop("embedding", []), groups.pop("head", [])
    layers: list[Unit] = []
    for index, (name, group) in enumerate(groups.items()):
        apart = [tensor for tensor in group if adapters_apart and tensor.name.endswith((".lora_A", ".lora_B"))]
        layers += [Unit(f"{name}.{tensor.name}", (name,), (tensor,), operation=tensor.name) for tensor in apart]
        rest = [tensor for tensor in group if tensor not in apart]
        layers.append(Unit(name, (name,), tuple(rest), reduces_at_end=first_layer_without_gradient and index == 0))
    if not ends_apart:
        root = Unit("root", ("embedding", "head"), (*embedding, *head), stays_after_forward=True, reduces_at_end=True)
        return [*layers, root]
    table = [tensor for tensor in embedding if tensor.name == "embed_tokens.weight"]
    left = [tensor for tensor in embedding if tensor.name != "embed_tokens.weight"]
    # without tensors it may be a pipeline's stage that has no end, or a final norm without weights (OLMo)
    tied = (tied or bool(head)) and not any(tensor.name == "lm_head.weight" for tensor in head)
    if not all(tensor.trains for tensor in head):  # with adapters accelerate does not find the final norm
        left += [tensor for tensor in head if not tensor.name.startswith("lm_head")]
        head = [tensor for tensor in head if tensor.name.startswith("lm_head")]
    if tied:  # gathered for the embedding; no input of it has a gradient
        tail = Unit("tail", ("embedding", "head"), (*table, *head), True, reduces_at_end=True, hook="lm_head")
        units = [*layers, tail]
    else:
        in_vain = first_layer_without_gradient
        first = Unit("embedding", ("embedding",), tuple(table), reduces_at_end=True, fetched_in_vain=in_vain)
        tail = Unit("tail", ("head",), tuple(head), True, hook="lm_head")
        units = [*([first] if table else []), *layers, *([tail] if head else [])]  # of a pipeline stage
    if left:
        units.append(Unit("root", ("embedding", "head"), tuple(left), stays_after_forward=True, reduces_at_end=True))
    return units
