"""A recipe's step on one rank: its blocks placed on a `Step`, with the layouts, optimizers and allocator that all blocks
use, whether written by hand or recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from peakcast.catalog import Device
from peakcast.core.texts import Texts
from peakcast.jobs.spec import TrainingJob
from peakcast.models.allocator.rounding import MIN_BLOCK_BYTES
from peakcast.models.ledger.layouts import layout_of
from peakcast.models.ledger.layouts.base import Layout
from peakcast.models.ledger.layouts.fsdp_units import ADAPTER_MATRICES
from peakcast.models.ledger.layouts.module_tree import ModulePath, module_of
from peakcast.models.ledger.layouts.optimizer_step import hand_updates, place_optimizer_step
from peakcast.models.ledger.recorded.outside_layers import ends_of
from peakcast.models.ledger.recorded.parameters import recorded_parameters, with_recorded_network
from peakcast.models.ledger.recorded.zero3_modules import RecordedModules
from peakcast.models.ledger.tape import columns as step_columns
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import FOREVER, BlockRun, Step
from peakcast.models.ledger.tape.template import NO_OPERATION, OperationInstants, Template
from peakcast.models.ledger.tape.workspaces import training_workspaces
from peakcast.models.recipes.depth import Deep, place_of
from peakcast.models.recipes.recipe import Recipe
from peakcast.models.recipes.regime import point_of
from peakcast.models.recipes.walk import BORN_AT, BORN_STRETCH, DIES_AT, DIES_STRETCH, HANDED_ON_AT, PLACE, Ints, Walk
from peakcast.timelines.places import block_name
from peakcast.timelines.timeline import Category, Phase, Timeline

PRODUCTS = ("mm.", "addmm.", "bmm.")
"""Prefixes of the labels of matrix products."""


def recipe_ledger(
    job: TrainingJob, recipe: Recipe, *, device: Device | None = None, rank: int | None = None, step: str = "steady"
) -> Timeline:
    """As `peakcast.models.baseline.ledger.ledger`, for the network that `recipe` was recorded from."""
    job = with_recorded_network(job, recipe)
    network = _network_of(recipe, job)
    tensors = network.tensors
    modules = RecordedModules(recipe.walk, network.deep, network.names, tensors)
    returned = network.num_bytes[list(recipe.walk.returned)].tolist()
    layout = layout_of(job, tensors, returned, rank, modules, ends_of(recipe.walk, network.deep, network.names, tensors))
    layout.first_step = step == "first"
    hand_updates(job, layout, step)
    timeline = Step(hooks=layout)
    layout.hold_resident(timeline)
    timeline.hold_all(training_workspaces(device, job), Category.WORKSPACES)
    runs = network.run(timeline, layout, min(job.gradient_accumulation_steps, layout.different_micro_batches))
    place_optimizer_step(timeline, job, layout, step)
    network.hold_across(timeline, runs, first_step=step == "first")
    return timeline.timeline()


@dataclass(frozen=True, kw_only=True)
class RecordedTemplate(Template):
    """A place's template. Its entries have the names of modules, not of operations; what autograd saves is not recorded."""

    input_bytes: int = 0
    keeps_input: bool = False
    gradient_bytes_at_first_saved: int = 0
    reads_saved_first: str = ""
    saved_bytes: list[int] = field(default_factory=list)
    made: tuple[Ints, Ints]
    of_adapters: OperationInstants

    @property
    def instants(self) -> OperationInstants:
        """When adapters' matrices are read, by the names of their modules."""
        return self.of_adapters

    @property
    def made_bytes(self) -> tuple[Ints, Ints]:
        """Bytes that the operation at each forward instant and at each backward instant allocates, for other places too."""
        return self.made


class _Network:
    """The weights and places of a deep network, with the places' templates."""

    def __init__(self, recipe: Recipe, job: TrainingJob) -> None:
        self.walk, self.tensors = recipe.walk, recorded_parameters(job, recipe)
        self.deep: Deep = recipe.deep()
        raw = recipe.bytes_at(*point_of(job))
        self.num_bytes: Ints = -(-raw // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        self.names = [block_name(place, self.deep.num_places) for place in range(self.deep.num_places)]
        self.templates = [self._template(place) for place in range(self.walk.num_places)]

    def run(self, timeline: Step, layout: Layout, num_micro_batches: int) -> list[list[BlockRun]]:
        """Run the recorded micro-batch this many times. Returns the runs of each."""
        runs_of_all = []
        for micro_batch in range(num_micro_batches):
            first, last = micro_batch == 0, micro_batch == num_micro_batches - 1
            layout.begin_micro_batch(timeline, first=first, last=last)
            runs = []
            for place, source in enumerate(self.deep.sources.tolist()):
                runs.append(timeline.run_forward(self.templates[source], self.names[place], keeps_gradients=first))
            for run in reversed(runs):
                timeline.run_backward(run)
            timeline.end_backward()
            layout.end_backward(timeline)
            runs_of_all.append(runs)
        return runs_of_all

    def hold_across(self, timeline: Step, runs: Sequence[Sequence[BlockRun]], *, first_step: bool) -> None:
        """Hold what lives in more than one place, or longer than its micro-batch. `runs`: those of each micro-batch."""
        lives = self.deep.lives
        crosses = ~self._local()[self.deep.entries]
        before, after = lives[BORN_STRETCH] < 0, lives[DIES_STRETCH] < 0
        stays, leaves = crosses & before & after, crosses & before & ~after
        if first_step:  # what an earlier step made does not exist
            stays, leaves = stays & (lives[BORN_AT] == 0), leaves & (lives[BORN_AT] == 0)
        starts = _starts(runs)
        self._hold(timeline, np.flatnonzero(stays | leaves), starts[0])
        found, left = self._same_tensors(
            np.flatnonzero(crosses & before & ~after), np.flatnonzero(crosses & ~before & after)
        )
        for micro_batch, own in enumerate(starts):
            if micro_batch:
                born = starts[micro_batch - 1][lives[BORN_STRETCH, left]] + lives[BORN_AT, left]
                self._hold(timeline, found, own, born)
            ends = ~after if micro_batch < len(starts) - 1 else True
            self._hold(timeline, np.flatnonzero(crosses & ~before & ends), own)

    def _same_tensors(self, found: Ints, left: Ints) -> tuple[Ints, Ints]:
        """Pairs of entries that are the same tensor: of those that a micro-batch has `found` and frees, and of those that
        the micro-batch before has made and `left`."""
        names = self.walk.names
        made: dict[tuple[str, int], list[int]] = {}
        for entry in left.tolist():
            source = self.deep.entries[entry]
            made.setdefault((names[source], int(self.num_bytes[source])), []).append(entry)
        pairs = []
        for entry in found.tolist():
            source = self.deep.entries[entry]
            if makers := made.get((names[source], int(self.num_bytes[source]))):
                pairs.append((entry, makers.pop(0)))
        both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def _hold(self, timeline: Step, which: Ints, starts: Ints, born: Ints | int = 0) -> None:
        """Hold some entries of the deep network, for a micro-batch whose stretches begin at `starts`. Entries that it did
        not make itself exist since `born`."""
        lives, entries = self.deep.lives, self.deep.entries[which]
        born_in, dies_in = lives[BORN_STRETCH, which], lives[DIES_STRETCH, which]
        num_bytes = self.num_bytes[entries]
        columns = np.zeros((step_columns.WIDTH, len(which)), dtype=np.int64)
        columns[step_columns.NAME] = Texts.of(self.walk.names).numbers[entries]
        columns[step_columns.MODULE] = Texts.of(self.names).numbers[lives[PLACE, which]]
        columns[step_columns.CATEGORY] = self.walk.categories[entries]
        columns[step_columns.NUM_BYTES] = num_bytes
        columns[step_columns.BORN] = np.where(born_in < 0, born, starts[born_in] + lives[BORN_AT, which])
        columns[step_columns.DIES] = np.where(dies_in < 0, FOREVER, starts[dies_in] + lives[DIES_AT, which])
        timeline.run_again(step_columns.RecordedColumns(columns[:, num_bytes > 0]))

    def _local(self) -> npt.NDArray[np.bool_]:
        """Which of the recipe's entries live in one place only, counting parameters' gradients."""
        lives = self.walk.lives
        born, dies = lives[BORN_STRETCH], lives[DIES_STRETCH]
        one_place = place_of(born, self.walk.num_places) == place_of(dies, self.walk.num_places)
        local: npt.NDArray[np.bool_] = (born >= 0) & (one_place | self.walk.gradients)
        return local

    def _template(self, place: int) -> Template:
        """The template of what lives in `place` of the recipe's network during one micro-batch."""
        walk = self.walk
        forward, backward = place, 2 * walk.num_places - 1 - place
        born = walk.lives[BORN_STRETCH]
        own = np.flatnonzero(self._local() & ((born == forward) | (born == backward)))
        lives, gradients, names = walk.lives[:, own], walk.gradients[own], [walk.names[i] for i in own]
        dies = np.where(gradients, np.maximum(lives[BORN_AT] + 1, lives[HANDED_ON_AT]), lives[DIES_AT])
        parameters = [name.removesuffix(".grad") for name, trained in zip(names, gradients, strict=True) if trained]
        made = {module_of(name): at - 1 for name, at in zip(parameters, dies[gradients].tolist(), strict=True)}
        phases = walk.phases[forward]
        loss = phases.find(int(Phase.LOSS))
        return RecordedTemplate(
            names=names,
            categories=walk.categories[own].astype(np.int8),
            num_bytes=self.num_bytes[own],
            born=lives[BORN_AT],
            dies=dies,
            born_backward=lives[BORN_STRETCH] == backward,
            dies_backward=(lives[DIES_STRETCH] == backward) | gradients,
            weight_gradient=gradients,
            parameters=parameters,
            dies_without_graph=dies,
            cached=np.zeros(len(own), dtype=bool),
            allocated=np.ones(len(own), dtype=bool),
            operations=np.full(len(own), NO_OPERATION, dtype=np.int32),
            num_forward=len(phases),
            num_recomputed=len(phases),
            num_backward=len(walk.phases[backward]),
            forward_labels=list(walk.labels[forward]),
            backward_labels=list(walk.labels[backward]),
            backward_marks=_head_marks(walk.labels[backward]) if place == walk.num_places - 1 else {},
            loss_from=len(phases) if loss < 0 else loss,
            output_gradient_used_until=len(walk.phases[backward]),
            of_adapters=_adapter_instants(walk, (forward, backward), made),
            made=(self._allocated_bytes(forward), self._allocated_bytes(backward)),
        )

    def _allocated_bytes(self, stretch: int) -> Ints:
        """Bytes that each operation of a stretch allocates."""
        born = self.walk.lives[:, self.walk.lives[BORN_STRETCH] == stretch][BORN_AT]
        made = self.num_bytes[self.walk.lives[BORN_STRETCH] == stretch]
        return np.bincount(born, made, len(self.walk.phases[stretch])).astype(np.int64)


@lru_cache(maxsize=2)
def _network_of(recipe: Recipe, job: TrainingJob) -> _Network:
    """The network of a recipe for `job`, of which a training's first step and later ones are made."""
    return _Network(recipe, job)


def _starts(runs: Sequence[Sequence[BlockRun]]) -> list[Ints]:
    """For the runs of each micro-batch, the first instant of each stretch."""
    return [
        np.array([*(run.forward_start for run in own), *(run.backward_start or 0 for run in reversed(own))], dtype=np.int64)
        for own in runs
    ]


def _adapter_instants(walk: Walk, stretches: tuple[int, int], made: Mapping[ModulePath, int]) -> OperationInstants:
    """The operations for which FSDP1 gathers an adapter's matrix: the first that reads it (also in a recomputation), and in
    backward the last before its gradient exists. `stretches`: a place's forward and backward; `made`: the instants of those
    gradients."""
    found: dict[str, dict[str, int]] = {"forward": {}, "again": {}, "backward": {}}
    for stretch in stretches:
        for visit in walk.visits[stretch]:
            matrix = visit.module.removesuffix(".default")  # peft's name of an adapter that was given none
            if not visit.enters or matrix.rpartition(".")[2] not in ADAPTER_MATRICES:
                continue
            at = made.get(ModulePath.of(matrix), visit.instant) if visit.runs == "backward" else visit.instant
            if at < len(walk.labels[stretch]):
                found[visit.runs].setdefault(matrix, at)
    return OperationInstants(**found)


def _head_marks(labels: Sequence[str]) -> dict[Mark, list[int]]:
    """The marks of the head's backward. The first product is the lm_head's own, at which its layout's hooks run; what runs
    before belongs to the loss."""
    first = next((index for index, label in enumerate(labels) if label.startswith(PRODUCTS)), None)
    return {} if first is None else {Mark.LM_HEAD: [first]}
