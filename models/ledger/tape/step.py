"""Assembles a step: places block templates on the instants of a step and returns the `Timeline`.

A ledger reserves instants in the order in which the framework runs its operations (`run_forward`, `run_backward`, `moment`)
and says what else exists when (`hold`, or `allocate` and later `free`). What a data-parallel layout does around each run of
a block is in its `Hooks`. `placing.py` turns the runs into columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from peakcast.core.texts import Texts, number_of
from peakcast.models.allocator.rounding import MIN_BLOCK_BYTES
from peakcast.models.ledger.tape.columns import (
    BORN,
    CATEGORY,
    DIES,
    MODULE,
    NAME,
    NUM_BYTES,
    REUSABLE,
    STREAM,
    WIDTH,
    OpenTensor,
    RecordedColumns,
    tensors_held,
)
from peakcast.models.ledger.tape.placing import FOREVER, BlockRun, Placed, place
from peakcast.models.ledger.tape.template import Template
from peakcast.models.ledger.tape.update_in_backward import Gradients, UpdateInBackward, updated_in_backward
from peakcast.timelines.timeline import Category, Phase, Timeline

IntTable = npt.NDArray[np.int64]
__all__ = ["FOREVER", "BlockRun", "Hooks", "Step"]


class Hooks:
    """What happens around each run of a block; nothing by default. `module` is the name under which the block runs."""

    def before_forward(self, step: Step, module: str) -> None:
        """Called before the block's first forward instant."""

    def while_forward(self, step: Step, run: BlockRun) -> None:
        """Called when the block's forward instants have been reserved, also those of a recomputation, to add what happens
        at some of them (`Step.within`)."""

    def after_forward(self, step: Step, module: str) -> None:
        """Called after the block's last forward instant."""

    def before_backward(self, step: Step, module: str) -> None:
        """Called before the block's backward, and before its recomputation if it has one."""

    def after_backward(self, step: Step, run: BlockRun) -> None:
        """Called after the block's backward; may set `run.gradients_die`, now or later."""


_MOMENTS = ("before_forward", "while_forward", "after_forward", "before_backward", "after_backward")


@dataclass
class Step:
    """The instants and tensors of one step while they are being written down."""

    phases: bytearray = field(default_factory=bytearray)
    labels: list[str] = field(default_factory=list)
    _runs: list[BlockRun] = field(default_factory=list)
    _placed: list[Placed] = field(default_factory=list)
    """Placed runs of the steps from which this one was forked."""
    _own: tuple[int, Placed] | None = None
    """(number of `_runs`, those runs placed), so that all forks share the placing."""
    _held: list[IntTable] = field(default_factory=list)
    """Columns of the tensors held, in the order in which they were held; layout as `RecordedColumns.columns`."""
    _single: array[int] = field(default_factory=lambda: array("q"))
    """Tensors that were held one by one since then: eight numbers each, in the order of `columns.py`."""
    _differing_parts: dict[int, tuple[bytearray, Callable[[Step, bool], None]]] = field(default_factory=dict)
    """Place in `_held` -> the phases until then, and the function that `differs` was given there."""
    _columns_of_parts: dict[tuple[int, bool], IntTable] = field(default_factory=dict)  # (place, first step) -> columns
    gradients_die: int = FOREVER
    """The instant at which `zero_grad(set_to_none=True)` releases every `.grad`."""
    update_in_backward: UpdateInBackward | None = None
    """Set if an optimizer updates parameters during backward."""
    _backward_ends: list[int] = field(default_factory=list)
    hooks: Hooks = field(default_factory=Hooks)
    _allocated: dict[int, OpenTensor] = field(default_factory=dict)
    _freed_not_reusable: dict[int, tuple[OpenTensor, int]] = field(default_factory=dict)
    """Tensors that were freed while another stream still uses their blocks, and the instant of the free."""
    _next_handle: int = 0
    _within: int | None = None
    """While `within` is active: its instant."""
    _block_ended: int | None = None
    """The instant at which the last block ended, if hooks have run since: its output lives on while they do."""

    def __post_init__(self) -> None:
        self._watched = any(getattr(type(self.hooks), name) is not getattr(Hooks, name) for name in _MOMENTS)

    @property
    def now(self) -> int:
        """The next instant to be reserved or, while `within` is active, its instant."""
        return len(self.phases) if self._within is None else self._within

    @contextmanager
    def within(self, instant: int) -> Iterator[None]:
        """For the time of this context, `now` is an instant of a block that has been run, just before the operation at that
        instant. A tensor made and freed before the operation runs is not counted: it is smaller than what the operation
        itself makes or than what the one before has freed."""
        self._within = instant
        try:
            yield
        finally:
            self._within = None

    def moment(self, label: str, phase: Phase) -> int:
        """Reserve one instant and return it."""
        if self._within is not None:
            return self._within
        self.phases.append(int(phase))
        self.labels.append(label)
        return len(self.phases) - 1

    def run_forward(
        self, template: Template, module: str, phase: Phase = Phase.FORWARD, *, keeps_gradients: bool = True
    ) -> BlockRun:
        """Run a block forward with a graph; place its backward later with `run_backward`. Returns the run."""
        if self._watched:
            self._enter(template, module, phase)
        start = len(self.phases)
        self.phases += template.forward_phases[phase]
        self.labels += template.forward_labels
        run = BlockRun(template, module, start, None, keeps_gradients)
        self._runs.append(run)
        if self._watched:
            self.hooks.while_forward(self, run)
        if self._watched and phase != Phase.BACKWARD:
            ended = self.now
            self.hooks.after_forward(self, module)
            self._note_block_end(ended)
        return run

    def run_forward_in_turn(
        self, template: Template, modules: Sequence[str], *, keeps_gradients: bool = True
    ) -> list[BlockRun]:
        """Run a block forward once for each name in `modules`, one after the other. Returns the runs."""
        if self._watched:
            return [self.run_forward(template, module, keeps_gradients=keeps_gradients) for module in modules]
        start, length = len(self.phases), template.num_forward
        self.phases += template.forward_phases[Phase.FORWARD] * len(modules)
        self.labels += template.forward_labels * len(modules)
        runs = [BlockRun(template, module, start + i * length, None, keeps_gradients) for i, module in enumerate(modules)]
        self._runs += runs
        return runs

    def run_backward(self, run: BlockRun, phase: Phase = Phase.BACKWARD) -> None:
        """Run the backward of a run of `run_forward`."""
        if self._watched:
            since = self._take_block_end()
            self.hooks.before_backward(self, run.module)
            size = run.template.output_gradient_bytes
            self._hold_between_blocks("gradient", Category.TEMPORARIES, size, since, run.module)
        run.backward_start = len(self.phases)
        self.phases += run.template.backward_phases[phase]
        self.labels += run.template.backward_labels
        if self._watched:
            ended = self.now
            self.hooks.after_backward(self, run)
            self._note_block_end(ended)

    def run_backward_in_turn(self, runs: Sequence[BlockRun]) -> None:
        """Run the backward of several runs of one template, the last run first."""
        if self._watched:
            for run in reversed(runs):
                self.run_backward(run)
            return
        template, start = runs[0].template, len(self.phases)
        length = template.num_backward
        for run in reversed(runs):
            run.backward_start = start
            start += length
        self.phases += template.backward_phases[Phase.BACKWARD] * len(runs)
        self.labels += template.backward_labels * len(runs)

    def made_bytes(self) -> IntTable:
        """Bytes that a block's operation allocates at each instant so far, temporaries included. [now]"""
        made = np.zeros(self.now, dtype=np.int64)
        for run in self._runs:
            forward, backward = run.template.made_bytes
            made[run.forward_start : run.forward_start + len(forward)] = forward
            if run.backward_start is not None and run.backward_start >= 0:
                made[run.backward_start : run.backward_start + len(backward)] = backward
        return made

    def _enter(self, template: Template, module: str, phase: Phase) -> None:
        """Call the hooks that come before a block runs forward, for the first time or as a recomputation."""
        since = self._take_block_end()
        if phase == Phase.BACKWARD:
            self._hold_between_blocks("gradient", Category.TEMPORARIES, template.input_bytes, since, module)
            self.hooks.before_backward(self, module)
        else:
            self.hooks.before_forward(self, module)
            self._hold_between_blocks("hidden_states", Category.ACTIVATIONS, template.input_bytes, since, module)

    def _take_block_end(self) -> int:
        """The instant at which the last block ended if hooks have run since, else `now`."""
        since, self._block_ended = self._block_ended, None
        return self.now if since is None else since

    def _hold_between_blocks(self, name: str, category: Category, num_bytes: int, since: int, module: str) -> None:
        """Keep the tensor that one block hands to the next alive while hooks run between them."""
        if since < self.now:
            self.hold(name, category, num_bytes, since, self.now, module)

    def _note_block_end(self, ended: int) -> None:
        """Note that the last block ended at `ended`, if hooks have run since."""
        if self.now > ended:
            self._block_ended = ended

    def end_backward(self) -> None:
        """Reserve the instant at which `loss.backward()` returns."""
        self._backward_ends.append(self.moment("backward ends", Phase.BACKWARD))

    def free_gradients(self) -> None:
        """Free every `.grad` that runs have made, from the next instant on, unless its end is already set."""
        for run in self._runs:
            if run.keeps_gradients and run.backward_start is not None and run.gradients_die is None:
                run.gradients_die = self.now

    def run_without_graph(self, template: Template, module: str, phase: Phase = Phase.FORWARD) -> BlockRun:
        """Run a block forward under checkpointing and return the run. Only two things outlive it: its input, which the
        caller must `hold`, and the results that selective checkpointing keeps, until the run in `recomputation` has used
        them."""
        run = self.run_forward(template, module, phase)
        run.backward_start = -1
        return run

    def hold(
        self,
        name: str,
        category: Category,
        num_bytes: int,
        born: int,
        dies: int = FOREVER,
        module: str = "",
        stream: int = 0,
    ) -> None:
        """Add one tensor that lives from `born` until before `dies`; its bytes are rounded as the allocator does."""
        if num_bytes > 0 and born < dies:
            self._single.extend((number_of(name), number_of(module), category, num_bytes, born, dies, stream, 0))

    def _gather(self) -> list[IntTable]:
        """The columns of everything held so far."""
        if self._single:
            columns = np.frombuffer(self._single, dtype=np.int64).reshape(-1, WIDTH).T
            columns[NUM_BYTES] = -(-columns[NUM_BYTES] // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
            self._held.append(columns)
            self._single = array("q")
        return self._held

    def hold_all(
        self, tensors: Iterable[tuple[str, str, int]], category: Category, born: int = 0, dies: int = FOREVER
    ) -> None:
        """Add tensors, given as (name, module, bytes), that share a category and a lifetime, such as all parameters."""
        self._gather().append(tensors_held(tensors, int(category), born, dies))

    def record(self) -> RecordedColumns:
        """What this step holds and runs outside of blocks, for `run_again` on another step. Instant 0 is the beginning of
        any step; later instants are shifted to where it is repeated."""
        columns = np.concatenate([np.zeros((WIDTH, 0), np.int64), *self._gather()], axis=1)
        return RecordedColumns(columns, phases=bytes(self.phases[1:]), labels=tuple(self.labels[1:]))

    def run_again(self, recorded: RecordedColumns) -> None:
        """Hold and run here what was recorded on another step."""
        columns = recorded.columns
        if recorded.phases:
            columns = columns.copy()
            times = columns[BORN : DIES + 1]
            times[(times > 0) & (times < FOREVER)] += self.now - 1
            columns[REUSABLE][columns[REUSABLE] > 0] += self.now - 1
        self._gather().append(columns)
        self.phases += recorded.phases
        self.labels += recorded.labels

    def allocate(
        self,
        name: str,
        category: Category,
        sizes: Iterable[int],
        module: str = "",
        *,
        born: int | None = None,
        stream: int = 0,
    ) -> list[int]:
        """Add tensors of the given bytes that live from `born` (default: the next instant) until they are freed, or to the
        end of the step. Returns their handles. `stream`: where they are allocated; 0 is the computing stream."""
        since = self.now if born is None else born
        named, of_module, kind = number_of(name), number_of(module), int(category)
        made = [OpenTensor(named, of_module, kind, num_bytes, since, stream) for num_bytes in sizes]
        handles = list(range(self._next_handle, self._next_handle + len(made)))
        self._next_handle += len(made)
        self._allocated.update(zip(handles, made, strict=True))
        return handles

    def free(self, handles: list[int]) -> None:
        """Free tensors of `allocate` from the next instant on; empties the list of handles."""
        now = self.now
        for handle in handles:
            self._single.extend(self._allocated.pop(handle).until(now))
        handles.clear()

    def let_go(self, handles: list[int]) -> list[int]:
        """Free tensors of `allocate` from the next instant on, while another stream still uses their blocks
        (`record_stream`). The blocks can be reused once the returned handles are given to `reuse`. Empties the list of
        handles."""
        for handle in handles:
            self._freed_not_reusable[handle] = (self._allocated.pop(handle), self.now)
        waiting = handles.copy()
        handles.clear()
        return waiting

    def reuse(self, handles: Iterable[int]) -> None:
        """The blocks of tensors that were `let_go` can be reused from the next instant on."""
        for handle in handles:
            one, gone = self._freed_not_reusable.pop(handle)
            self._single.extend(one.until(gone, self.now))

    def differs(self, held: Callable[[Step, bool], None]) -> None:
        """Hold what differs between a training's first step and later ones: `held(step, first_step)` holds it on `step`,
        which has the instants so far. It is called when a fork first needs it, in the order of these calls."""
        self._differing_parts[len(self._gather())] = self.phases.copy(), held
        self._held.append(np.zeros((WIDTH, 0), dtype=np.int64))

    def _held_in(self, *, first_step: bool) -> list[IntTable]:
        """The columns of everything held so far, in the training's first step or in a later one."""
        held = self._gather().copy()
        for at, (phases, hold) in self._differing_parts.items():
            if (at, first_step) not in self._columns_of_parts:
                hold(apart := Step(phases), first_step)
                self._columns_of_parts[at, first_step] = np.concatenate([held[at], *apart._gather()], axis=1)
            held[at] = self._columns_of_parts[at, first_step]
        return held

    def fork(self, *before: RecordedColumns, first_step: bool = False) -> Step:
        """A copy of this step from which to go on; `before` comes before everything that is held here. This step stays
        unchanged. A block whose backward is still to come may be continued in only one of the two. `first_step`: the copy
        is of the training's first step."""
        if self._own is None or self._own[0] != len(self._runs):
            self._own = len(self._runs), place(self._runs)
        forked = copy(self)
        forked.phases, forked.labels = bytearray(self.phases), self.labels.copy()
        forked._placed, forked._own, forked._runs = [*self._placed, self._own[1]], None, []
        forked._held = [*(part.columns for part in before), *self._held_in(first_step=first_step)]
        forked._single, forked._differing_parts, forked._columns_of_parts = array("q"), {}, {}
        forked._backward_ends, forked._allocated = self._backward_ends.copy(), self._allocated.copy()
        forked._freed_not_reusable = self._freed_not_reusable.copy()
        return forked

    def placed(self) -> Placed:
        """The entries of all runs so far, which come first in the timeline."""
        return Placed.joined([*self._placed, place(self._runs)])

    def timeline(self) -> Timeline:
        """The `Timeline` of the finished step."""
        n = len(self.phases)
        for one in self._allocated.values():
            self._single.extend(one.until(FOREVER))
        self._allocated.clear()
        self.reuse(list(self._freed_not_reusable))
        placed = self.placed()
        columns = np.concatenate([placed.columns, *self._gather()], axis=1)
        born, dies = columns[BORN], columns[DIES]
        dies[placed.kept] = self.gradients_die
        if placed.waits:
            born[born >= FOREVER] += n - FOREVER
        timeline = Timeline(
            names=Texts(columns[NAME]),
            modules=Texts(columns[MODULE]),
            categories=columns[CATEGORY].astype(np.int8),
            num_bytes=columns[NUM_BYTES],
            born=born,
            dies=np.minimum(dies, n, out=dies),
            phases=np.frombuffer(bytes(self.phases), dtype=np.int8),
            labels=self.labels,
            streams=columns[STREAM].astype(np.int8),
            reusable=np.maximum(columns[REUSABLE], dies) if columns[REUSABLE].any() else None,
        )
        if self.update_in_backward is None:
            return timeline
        made = timeline.born[placed.gradients] < n
        entries, names = placed.gradients[made], Texts(placed.parameters[made])
        gradients = Gradients.of(timeline, entries, names, placed.through_view)
        return updated_in_backward(timeline, gradients, self._backward_ends, self.update_in_backward)
