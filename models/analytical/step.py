"""Assembles a step: places block templates on the instants of a step and gives the `Timeline`.

A ledger reserves instants in the order in which the framework runs them (`run_forward`, `run_backward`, `moment`) and
says what else lives when (`hold`, or `allocate` now and `free` later). What happens around each run of a block is left to
`Hooks`, which data-parallel layouts fill in. Everything of a template is placed by one vectorised addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from peakcast.models.analytical.tape import ALLOCATION_UNIT_BYTES, Template
from peakcast.timeline import Category, Phase, Timeline
from peakcast.units import round_up

FOREVER = 2**62
"""A `dies` beyond every instant: alive to the end of the step."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors in columns, each [num_tensors]; `num_bytes` rounded as the allocator does. Made once, held as often as asked:
    a ledger caches those that many jobs share, such as a network's parameters."""

    names: list[str]
    modules: list[str]
    num_bytes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, int]]) -> Tensors:
        """The tensors of (name, module, bytes); those without bytes are none."""
        rows = [row for row in tensors if row[2] > 0]
        sizes = np.array([row[2] for row in rows], dtype=np.int64)
        return cls(
            names=[row[0] for row in rows],
            modules=[row[1] for row in rows],
            num_bytes=-(-sizes // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES,
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """A part of a step, to be run again on others (`Step.record`, `Step.run_again`). `columns` [5, num_tensors]: category,
    bytes, born, dies, stream."""

    names: list[str]
    modules: list[str]
    columns: npt.NDArray[np.int64]
    phases: bytes = b""
    labels: tuple[str, ...] = ()


_Row = tuple[str, str, int, int, int, int, int]
"""Name, module, category, bytes, born, dies, stream of a single tensor."""


@dataclass(slots=True)
class Run:
    """One run of a block: `forward_start` is where it ran forward with a graph, until its backward is placed."""

    template: Template
    module: str
    forward_start: int
    backward_start: int | None = None
    keeps_gradients: bool = True
    """Whether its parameter gradients become new `.grad` tensors (else they are added to ones that exist)."""
    recomputation: Run | None = None
    """Of a run under checkpointing: the run in backward that uses what the template says is cached."""
    uses_cached: bool = False
    """Of that recomputation: what is cached is there already."""
    gradients_die: int | None = None
    """The instant at which somebody takes its parameter gradients away; None: they stay as `.grad`."""


class Hooks:
    """What happens around each run of a block: nothing, here. `module` is the name under which the block was run."""

    def before_forward(self, step: Step, module: str) -> None:
        """Before the block's first instant of forward."""

    def after_forward(self, step: Step, module: str) -> None:
        """After its last instant of forward."""

    def before_backward(self, step: Step, module: str) -> None:
        """Before its backward, or the recomputation that belongs to it."""

    def after_backward(self, step: Step, run: Run) -> None:
        """After its backward; may set `run.gradients_die`, also later."""


@dataclass
class Step:
    """The instants and entries of one step, in the making."""

    phases: bytearray = field(default_factory=bytearray)
    labels: list[str] = field(default_factory=list)
    _runs: list[Run] = field(default_factory=list)
    _held: list[Recording | list[_Row]] = field(default_factory=list)
    """In the order in which they were held, single ones in lists."""
    gradients_die: int = FOREVER
    """The instant at which `zero_grad(set_to_none=True)` releases every `.grad`."""
    update_bytes_per_gradient_byte: int | None = None
    """Where an optimizer updates in backward: a gradient dies when the next one is born, and its update takes so much."""
    summed_gradients: frozenset[str] = frozenset()
    """Of weights that are used twice: there is no gradient to update with before backward ends."""
    _backward_ends: list[int] = field(default_factory=list)
    hooks: Hooks = field(default_factory=Hooks)
    _allocated: dict[int, tuple[str, Category, int, int, str]] = field(default_factory=dict)
    _next_handle: int = 0
    _handed_on: int | None = None
    """The instant from which hooks have run since the last block: what it hands to the next one lives on meanwhile."""

    @property
    def now(self) -> int:
        """The instant that comes next."""
        return len(self.phases)

    def moment(self, label: str, phase: Phase) -> int:
        """Reserve one instant; returns it."""
        self.phases.append(int(phase))
        self.labels.append(label)
        return len(self.phases) - 1

    def _span(self, labels: Sequence[str], phase: Phase) -> int:
        start = len(self.phases)
        self.phases += bytes((phase,)) * len(labels)
        self.labels.extend(labels)
        return start

    def run_forward(
        self, template: Template, module: str, phase: Phase = Phase.FORWARD, *, keeps_gradients: bool = True
    ) -> Run:
        """Run a block forward, keeping what autograd keeps; place its backward later with `run_backward`."""
        since = self._since()
        if phase == Phase.BACKWARD:
            self._carry("gradient", Category.TEMPORARIES, template.input_bytes, since, module)
            self.hooks.before_backward(self, module)
        else:
            self.hooks.before_forward(self, module)
            self._carry("hidden_states", Category.ACTIVATIONS, template.input_bytes, since, module)
        start = self._span(template.forward_labels, phase)
        for instant in range(start + template.loss_from, start + template.num_forward):
            self.phases[instant] = int(Phase.LOSS)
        run = Run(template, module, start, None, keeps_gradients)
        self._runs.append(run)
        ended = self.now
        if phase != Phase.BACKWARD:
            self.hooks.after_forward(self, module)
        self._hand_on(ended)
        return run

    def run_backward(self, run: Run, phase: Phase = Phase.BACKWARD) -> None:
        """Run the backward of an earlier forward."""
        since = self._since()
        self.hooks.before_backward(self, run.module)
        self._carry("gradient", Category.TEMPORARIES, run.template.handed_in_bytes, since, run.module)
        run.backward_start = self._span(run.template.backward_labels, phase)
        ended = self.now
        self.hooks.after_backward(self, run)
        self._hand_on(ended)

    def _since(self) -> int:
        since, self._handed_on = self._handed_on, None
        return self.now if since is None else since

    def _carry(self, name: str, category: Category, num_bytes: int, since: int, module: str) -> None:
        """What a block hands to the next one, while hooks run between them."""
        if since < self.now:
            self.hold(name, category, num_bytes, since, self.now, module)

    def _hand_on(self, ended: int) -> None:
        if self.now > ended:
            self._handed_on = ended

    def end_backward(self) -> None:
        """`loss.backward()` returns."""
        self._backward_ends.append(self.moment("backward ends", Phase.BACKWARD))

    def run_without_graph(self, template: Template, module: str, phase: Phase = Phase.FORWARD) -> Run:
        """Run a block forward under checkpointing: nothing outlives it but its input, which the caller holds (`hold`),
        and what the template says is cached, until `recomputation` is set and done with it."""
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
        """One tensor alive from `born` until before `dies`; its bytes are rounded as the allocator does."""
        if num_bytes > 0:
            size = round_up(num_bytes, ALLOCATION_UNIT_BYTES)
            if not self._held or isinstance(self._held[-1], Recording):
                self._held.append([])
            rows = self._held[-1]
            assert isinstance(rows, list)
            rows.append((name, module, int(category), size, born, dies, stream))

    def hold_all(
        self, tensors: Tensors | Iterable[tuple[str, str, int]], category: Category, born: int = 0, dies: int = FOREVER
    ) -> None:
        """Tensors, or (name, module, bytes) of tensors, of one category with one life, such as all parameters."""
        tensors = tensors if isinstance(tensors, Tensors) else Tensors.of(tensors)
        num = len(tensors.names)
        columns = np.array([int(category), 0, born, dies, 0]).repeat(num).reshape(5, num)
        columns[1] = tensors.num_bytes
        self._held.append(Recording(tensors.names, tensors.modules, columns))

    def record(self) -> Recording:
        """What this step holds and runs, blocks apart. Instant 0 stands for the beginning of any step; further instants
        follow where it is run again."""
        parts = [_columns(held) for held in self._held]
        return Recording(
            names=[name for names, _, _ in parts for name in names],
            modules=[module for _, modules, _ in parts for module in modules],
            columns=np.concatenate([columns for _, _, columns in parts], axis=1) if parts else np.zeros((5, 0), np.int64),
            phases=bytes(self.phases[1:]),
            labels=tuple(self.labels[1:]),
        )

    def run_again(self, recorded: Recording) -> None:
        """Hold and run here what was recorded on another step."""
        columns = recorded.columns
        if recorded.phases:
            columns = columns.copy()
            times = columns[2:4]
            times[(times > 0) & (times < FOREVER)] += self.now - 1
        self._held.append(Recording(recorded.names, recorded.modules, columns))
        self.phases += recorded.phases
        self.labels += recorded.labels

    def allocate(
        self, name: str, category: Category, sizes: Iterable[int], module: str = "", *, born: int | None = None
    ) -> list[int]:
        """Tensors of the given bytes from `born` (the next instant) on, until `free`d or to the end of the step; returns
        their handles."""
        handles = []
        for num_bytes in sizes:
            handle = self._next_handle
            self._next_handle += 1
            self._allocated[handle] = (name, category, num_bytes, self.now if born is None else born, module)
            handles.append(handle)
        return handles

    def free(self, handles: list[int]) -> None:
        """Tensors of `allocate` are gone from the next instant on; empties the list."""
        for handle in handles:
            name, category, num_bytes, since, module = self._allocated.pop(handle)
            self.hold(name, category, num_bytes, since, self.now, module)
        handles.clear()

    def _update_in_backward(
        self,
        names: Sequence[str],
        gradients: npt.NDArray[np.bool_],
        sizes: npt.NDArray[np.int64],
        born: npt.NDArray[np.int64],
        dies: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """`dies` of all entries when a gradient is used up as soon as the next one is there; appends what its update
        allocates. Shapes: all [num_entries]."""
        mine = gradients & (born < len(self.phases))
        whole = np.array([name not in self.summed_gradients for name in names], dtype=bool)
        last = np.array(self._backward_ends, dtype=np.int64)
        instants = np.unique(np.concatenate([born[mine & whole], last]))
        updated = instants[np.searchsorted(instants, born[mine], side="right")]
        ends = last[np.searchsorted(last, born[mine], side="right")]
        updated = np.where(whole[mine], updated, ends)
        for size, instant in zip(sizes[mine].tolist(), updated.tolist(), strict=True):
            temporary = size * (self.update_bytes_per_gradient_byte or 0)
            self.hold("update", Category.OPTIMIZER_TEMPORARIES, temporary, instant, instant + 1, "optimizer")
        dies = dies.copy()
        dies[mine] = updated
        return dies

    def fork(self, first: Recording) -> Step:
        """A step that goes on from here, with what `first` holds before anything that is held here. This one stays as it
        is; blocks whose backward is still to come must not go on in both."""
        return replace(
            self,
            phases=bytearray(self.phases),
            labels=self.labels.copy(),
            _runs=self._runs.copy(),
            _backward_ends=self._backward_ends.copy(),
            _held=[first, *(held if isinstance(held, Recording) else held.copy() for held in self._held)],
        )

    def timeline(self) -> Timeline:
        """The finished `Timeline`."""
        n = len(self.phases)
        for name, category, num_bytes, since, module in self._allocated.values():
            self.hold(name, category, num_bytes, since, FOREVER, module)
        self._allocated.clear()
        groups: dict[int, list[Run]] = {}
        for run in self._runs:
            groups.setdefault(id(run.template), []).append(run)
        names: list[str] = []
        modules: list[str] = []
        categories: list[npt.NDArray[np.generic]] = []
        sizes: list[npt.NDArray[np.int64]] = []
        born: list[npt.NDArray[np.int64]] = []
        dies: list[npt.NDArray[np.int64]] = []
        gradients: list[npt.NDArray[np.bool_]] = []
        for runs in groups.values():
            template = runs[0].template
            start, end = _place(template, runs, self.gradients_die, n)
            gradients.append(np.tile(template.weight_gradient, len(runs)))
            born.append(start.ravel())
            dies.append(end.ravel())
            categories.append(np.tile(template.categories, len(runs)))
            sizes.append(np.tile(template.num_bytes, len(runs)))
            names.extend(template.names * len(runs))
            for run in runs:
                modules += [run.module] * len(template.names)
        if self.update_bytes_per_gradient_byte is not None and groups:
            dies_in_turn = self._update_in_backward(
                names, np.concatenate(gradients), np.concatenate(sizes), np.concatenate(born), np.concatenate(dies)
            )
            dies = [dies_in_turn]
        streams = [np.zeros(len(names), dtype=np.int8)]
        for held in self._held:
            held_names, held_modules, columns = _columns(held)
            names += held_names
            modules += held_modules
            categories.append(columns[0])
            sizes.append(columns[1])
            born.append(columns[2])
            dies.append(columns[3])
            streams.append(columns[4])
        return Timeline(
            names=names,
            modules=modules,
            categories=np.concatenate(categories).astype(np.int8),
            num_bytes=np.concatenate(sizes),
            born=np.concatenate(born),
            dies=np.minimum(np.concatenate(dies), n),
            phases=np.frombuffer(bytes(self.phases), dtype=np.int8),
            labels=self.labels,
            streams=np.concatenate(streams).astype(np.int8),
        )


def _columns(held: Recording | list[_Row]) -> tuple[list[str], list[str], npt.NDArray[np.int64]]:
    if isinstance(held, Recording):
        return held.names, held.modules, held.columns
    columns = np.array([row[2:] for row in held], dtype=np.int64).T
    return [row[0] for row in held], [row[1] for row in held], columns


def _place(
    template: Template, runs: list[Run], gradients_die: int, end_of_step: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`born` and `dies` of every entry of every run of one template, each [num_runs, num_entries]."""
    forward = np.array([run.forward_start for run in runs], dtype=np.int64)[:, None]
    backward = np.array(
        [end_of_step if run.backward_start is None else run.backward_start for run in runs], dtype=np.int64
    )[:, None]
    without_graph = backward < 0
    keeps = np.array([run.keeps_gradients for run in runs], dtype=bool)[:, None]
    born = np.where(template.born_backward, backward, forward) + template.born
    dies = np.where(template.dies_backward, backward, forward) + template.dies
    dies = np.where(keeps & template.weight_gradient, gradients_die, dies)
    taken = np.array([-1 if run.gradients_die is None else run.gradients_die for run in runs], dtype=np.int64)[:, None]
    dies = np.where((taken >= 0) & template.weight_gradient, taken, dies)
    # under no_grad nothing is kept for backward: it dies after its last reader, and the backward's entries never are
    dies = np.where(without_graph, forward + template.dies_without_graph, dies)
    never = without_graph & template.born_backward
    born = np.where(never, end_of_step, born)
    dies = np.where(never, end_of_step, dies)
    if template.cached.any():
        for row, run in enumerate(runs):
            if run.uses_cached:
                born[row, template.cached] = dies[row, template.cached] = end_of_step
            elif run.recomputation is not None:
                again = run.recomputation
                starts = np.where(template.dies_backward, again.backward_start or 0, again.forward_start)
                dies[row, template.cached] = (starts + template.dies)[template.cached]
    return born, dies
