"""Places runs of blocks on a step: the lives of all tensors of all runs of a template, by a few vectorised additions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peakcast.core.texts import Texts
from peakcast.models.ledger.tape.columns import BORN, DIES, MODULE, NUM_BYTES, REUSABLE, STREAM, WIDTH
from peakcast.models.ledger.tape.template import Template

FOREVER = 2**62
"""A `dies` beyond every instant: the tensor lives to the end of the step."""

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class BlockRun:
    """One run of a block. `forward_start`: the first instant of its forward. `backward_start`: that of its backward; None:
    not placed yet; -1: it ran under no_grad, so it has none."""

    template: Template
    module: str
    forward_start: int
    backward_start: int | None = None
    keeps_gradients: bool = True
    """Whether its parameter gradients become new `.grad` tensors; otherwise they are added to existing ones."""
    recomputation: BlockRun | None = None
    """For a run under checkpointing: the run in backward that recomputes it and reuses its cached results."""
    uses_cached: bool = False
    """For such a recomputation: the cached results exist already."""
    stops_early: bool = False
    """For such a recomputation: it ends once all saved tensors exist (non-reentrant checkpointing)."""
    gradients_die: int | Ints | None = None
    """The instant at which its parameter gradients are freed, one for all or one for each; None: they stay as `.grad`."""
    gradients_reusable: int | Ints | None = None
    """The instant from which the blocks of its gradients can be reused, one for all or one for each, if that is later."""

    def take_gradients(self, instant: int, places: Ints | None = None) -> None:
        """Its parameter gradients are freed at `instant`: those at these places among them, or all."""
        self.gradients_die = self._with(self.gradients_die, FOREVER, instant, places)

    def reuse_gradients(self, instant: int, places: Ints | None = None) -> None:
        """The blocks of its gradients can be reused from `instant` on: those of the gradients at these places, or all."""
        self.gradients_reusable = self._with(self.gradients_reusable, 0, instant, places)

    def _with(self, instants: int | Ints | None, otherwise: int, instant: int, places: Ints | None) -> int | Ints:
        """`instants` with `instant` set for some gradients, or for all. `otherwise`: the value where none was set."""
        if places is None:
            return instant
        if not isinstance(instants, np.ndarray):
            instants = np.full(len(self.template.gradient_columns), instants or otherwise, dtype=np.int64)
        instants[places] = instant
        return instants


@dataclass(frozen=True, slots=True)
class Placed:
    """The entries of placed runs, template by template. Instants from the end of the step on, which is not known yet, count
    from FOREVER. `columns`: [8, num_entries], as in `columns.py`."""

    columns: Ints
    waits: bool
    """Whether any entry is born at the end of the step or later."""
    kept: Ints
    """Indices of the entries that stay as `.grad` tensors: they die at `Step.gradients_die`."""
    gradients: Ints
    """Indices of the entries that are a parameter's gradient, whether kept or added to an existing one."""
    parameters: Ints
    """The names of those parameters, as numbers of `Texts`."""
    through_view: Ints
    """Indices of the entries that are a gradient as in `Template.through_view`."""
    sources: tuple[tuple[Template, int], ...]
    """The templates of the entries and how many runs each has, in order."""

    @classmethod
    def joined(cls, parts: Sequence[Placed]) -> Placed:
        """The entries of `parts`, one part after the other."""
        parts = [part for part in parts if part.columns.shape[1]] or [place(())]
        if len(parts) == 1:
            return parts[0]
        firsts = list(itertools.accumulate((part.columns.shape[1] for part in parts), initial=0))

        def indices(of: Callable[[Placed], Ints]) -> Ints:
            return np.concatenate([first + of(part) for first, part in zip(firsts, parts, strict=False)])

        return cls(
            columns=np.concatenate([part.columns for part in parts], axis=1),
            waits=any(part.waits for part in parts),
            kept=indices(lambda part: part.kept),
            gradients=indices(lambda part: part.gradients),
            parameters=np.concatenate([part.parameters for part in parts]),
            through_view=indices(lambda part: part.through_view),
            sources=tuple(source for part in parts for source in part.sources),
        )

    def described(self, describe: Callable[[Template], Ints]) -> Ints:
        """What `describe` says of a template's entries, for the entries of all runs. [num_entries]"""
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(np.tile(describe(template), count) for template, count in self.sources)])


def place(runs: Sequence[BlockRun]) -> Placed:
    """The entries of `runs`; runs of the same template are placed together."""
    groups: dict[int, list[BlockRun]] = {}
    for run in runs:
        groups.setdefault(id(run.template), []).append(run)
    columns = np.empty((WIDTH, sum(len(of) * of[0].template.num_entries for of in groups.values())), dtype=np.int64)
    columns[STREAM : REUSABLE + 1] = 0
    kept, gradients, parameters, through_view = ([np.zeros(0, dtype=np.int64)] for _ in range(4))
    end = 0
    for members in groups.values():
        template = members[0].template
        start, end = end, end + len(members) * template.num_entries
        of_runs = columns[:, start:end].reshape(WIDTH, len(members), -1)
        of_runs[: NUM_BYTES + 1] = template.descriptions[:, None]
        if not template.modules:
            of_runs[MODULE] = Texts.of([run.module for run in members]).numbers[:, None]
        if template.streams is not None:
            of_runs[STREAM] = template.streams
        keeping = _place(template, members, of_runs[BORN], of_runs[DIES])
        for row, run in enumerate(members):
            if run.gradients_reusable is not None:
                of_runs[REUSABLE, row, template.gradient_columns] = run.gradients_reusable
        firsts = start + template.num_entries * np.arange(len(members))[:, None]
        if len(template.through_view):
            through_view.append((firsts + template.through_view).ravel())
        if len(template.gradient_columns):
            gradients.append((firsts + template.gradient_columns).ravel())
            parameters.append(np.tile(template.parameter_numbers, len(members)))
            kept.append((firsts[keeping] + template.gradient_columns).ravel())
    waits = bool(columns[BORN].max(initial=0) >= FOREVER)
    sources = tuple((members[0].template, len(members)) for members in groups.values())
    joined = {"kept": kept, "gradients": gradients, "parameters": parameters, "through_view": through_view}
    indices = {name: np.concatenate(parts) for name, parts in joined.items()}
    return Placed(columns, waits, **indices, sources=sources)


def _place(template: Template, runs: Sequence[BlockRun], born: Ints, dies: Ints) -> npt.NDArray[np.bool_]:
    """Fill in `born` and `dies` of every entry of all runs of one template, both [num_runs, num_entries]. Returns which
    runs keep their parameter gradients, [num_runs]."""
    forward = np.array([run.forward_start for run in runs], dtype=np.int64)
    backward = np.array([FOREVER if run.backward_start is None else run.backward_start for run in runs], dtype=np.int64)
    span = (backward - forward)[:, None]
    ends = (born, template.born_backward, template.born), (dies, template.dies_backward, template.dies)
    for times, in_backward, offsets in ends:
        np.multiply(span, in_backward.astype(np.int64), out=times)
        times += forward[:, None]
        times += offsets
    without_graph = backward < 0
    keeping = np.array([run.keeps_gradients for run in runs], dtype=bool) & ~without_graph
    for row, freed_at in enumerate([run.gradients_die for run in runs]):
        if freed_at is not None:
            keeping[row] = False
            dies[row, template.gradient_columns] = freed_at
    if without_graph.any():
        # under no_grad nothing is saved: a tensor dies after its last reader, and there is no backward to make any
        dies[without_graph] = forward[without_graph, None] + template.dies_without_graph
        never = without_graph[:, None] & template.born_backward
        born[never] = dies[never] = FOREVER
    stopped = np.array([run.stops_early for run in runs], dtype=bool)
    if stopped.any():
        not_run = np.ix_(stopped, ~template.born_backward & (template.born >= template.num_recomputed))
        born[not_run] = dies[not_run] = FOREVER
    if template.cached.any():
        for row, run in enumerate(runs):
            if run.uses_cached:
                born[row, template.cached] = dies[row, template.cached] = FOREVER
            elif run.recomputation is not None:
                again = run.recomputation
                starts = np.where(template.dies_backward, again.backward_start or 0, again.forward_start)
                dies[row, template.cached] = (starts + template.dies)[template.cached]
    return keeping
