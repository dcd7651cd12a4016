"""Optimizers that update during backward: a gradient is applied and freed as soon as it, or the next one, exists.

LOMO and AdaLomo register a hook on every parameter (lomo-optim 0.1.1 `fuse_update`): when its gradient is ready, the hook
applies and frees the gradient that was ready before; `fused_backward` applies the last. If each parameter has an optimizer
of its own (`register_post_accumulate_grad_hook`, torchtune 0.6 `OptimizerInBackward`), the hook steps that optimizer and
frees the gradient. Autograd's engine runs either hook when it accumulates the gradient, which is the next task after the
operation that computed it: AccumulateGrad has the highest priority, and by then the operation's incoming gradient and saved
tensors are freed (torch/csrc/autograd/engine.cpp `thread_main`). So an update is an instant of its own, between two
operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from peakcast.core.units import round_up
from peakcast.models.allocator.rounding import MIN_BLOCK_BYTES
from peakcast.models.ledger.tape.template import OUTPUT_GRADIENT
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

Ints = npt.NDArray[np.int64]


class ParameterKey(NamedTuple):
    """A parameter, by its module and its name there as they are stored (`layouts.base.StoredTensor`)."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients among the entries of a timeline."""

    entries: Ints
    """Indices of the entries that are a parameter's gradient, [num_gradients]."""
    parameters: Sequence[ParameterKey]
    """Their parameters, [num_gradients]."""
    through_view: Ints
    """Indices of the entries that are a gradient as in `Template.through_view`."""

    @classmethod
    def of(cls, timeline: Timeline, entries: Ints, names: Sequence[str], through_view: Ints) -> Gradients:
        """Gradients of parameters of these names, in the modules that the entries belong to."""
        modules = (timeline.modules[index] for index in entries.tolist())
        return cls(entries, [ParameterKey(*both) for both in zip(modules, names, strict=True)], through_view)


@dataclass(frozen=True, slots=True)
class ParameterOptimizer:
    """The optimizer of one parameter. `num_bytes`: the most that its step allocates at once; `states`: (name, module,
    bytes) of the states that it makes."""

    parameter: ParameterKey
    num_bytes: int
    states: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class UpdateInBackward:
    """What updating a parameter allocates."""

    bytes_per_gradient_byte: int = 0
    """Bytes of temporaries for each byte of a gradient, if each is applied when the next one is ready."""
    tied: Mapping[ParameterKey, ParameterKey] = field(default_factory=dict)
    """Parameter -> the parameter whose tensor it shares. The optimizer gets only the sum of both gradients, at the end of
    backward."""
    alone: tuple[ParameterOptimizer, ...] = ()
    """The optimizers of single parameters, if each has one: a gradient is applied as soon as it is ready."""


def updated_in_backward(
    timeline: Timeline, gradients: Gradients, ends: Sequence[int], update: UpdateInBackward
) -> Timeline:
    """`timeline` with one more instant for every update. `ends`: the instants at which the backward of each micro-batch
    ends."""
    updates = _Updates.of(timeline, gradients, ends, update)
    made = _update_allocations(timeline, updates, update)
    born, dies = _lives(timeline, gradients.through_view, updates, at_once=bool(update.alone))
    return replace(
        timeline,
        names=[*timeline.names, *made.names],
        modules=[*timeline.modules, *made.modules],
        categories=np.append(timeline.categories, made.categories),
        num_bytes=np.append(timeline.num_bytes, made.num_bytes),
        born=np.append(born, made.born),
        dies=np.append(dies, made.dies),
        phases=np.insert(timeline.phases, updates.after + 1, int(Phase.BACKWARD)),
        labels=np.insert(np.array(timeline.labels, dtype=object), updates.after + 1, "update").tolist(),
        streams=None if timeline.streams is None else np.append(timeline.streams, np.zeros(len(made.born), dtype=np.int8)),
        reusable=None if timeline.reusable is None else np.append(updates.shifted(timeline.reusable), made.dies),
    )


@dataclass(frozen=True, slots=True)
class _Updates:
    """The updates of a step in the order in which they run, [num_updates]."""

    entries: Ints
    """The entry of the timeline that is the gradient of each."""
    parameters: Sequence[ParameterKey]
    after: Ints
    """The instant of the operation after which each runs, as the timeline counts without the updates."""
    added: Ints
    """Entries that are gradients which are only added to an earlier one, [num_added]."""

    @classmethod
    def of(cls, timeline: Timeline, gradients: Gradients, ends: Sequence[int], update: UpdateInBackward) -> _Updates:
        """The updates of `timeline`, the backward of whose micro-batches ends at `ends`."""
        last, entries = np.array(ends, dtype=np.int64), gradients.entries
        end_of = last[np.searchsorted(last, timeline.born[entries], side="right")]
        summed = np.array([parameter in update.tied for parameter in gradients.parameters], dtype=bool)
        comes = np.where(summed, end_of - 1, timeline.born[entries])
        added = _added_to_earlier(gradients.parameters, comes, end_of, update)
        # of one operation, the bias's gradient is ready before the matrix's, which still has to be transposed
        order = np.lexsort((timeline.num_bytes[entries], comes))
        order = order[~added[order]]
        comes, before_end = comes[order], end_of[order] - 1
        follows = comes if update.alone else np.append(comes[1:], before_end[-1:])
        parameters = [gradients.parameters[index] for index in order]
        return cls(entries[order], parameters, np.minimum(follows, before_end), entries[added])

    @property
    def instants(self) -> Ints:
        """The instant of each, as a timeline with all of them counts."""
        return self.after + 1 + np.arange(len(self.after))

    def shifted(self, instants: Ints) -> Ints:
        """The instants of the timeline with the updates before them inserted."""
        return instants + np.searchsorted(self.after, instants, side="left")


def _lives(timeline: Timeline, through_view: Ints, updates: _Updates, *, at_once: bool) -> tuple[Ints, Ints]:
    """From when and until when the timeline's tensors live with the updates between its instants. `at_once`: each gradient
    is applied as soon as it is ready, not when the next one is."""
    # a gradient that a block hands to the next exists from the end of the operation that made it
    output_gradient = np.array([name == OUTPUT_GRADIENT for name in timeline.names], dtype=bool)
    born = np.where(output_gradient, updates.shifted(timeline.born - 1) + 1, updates.shifted(timeline.born))
    # a projection's input is a view, whose backward adds its gradient to another. If an update applies the gradient before,
    # that view's backward runs after it (traced: OLMoE's); if each gradient is applied at once, it has run already
    dies = updates.shifted(timeline.dies - 1) + 1
    if not at_once:
        dies[through_view] = updates.shifted(timeline.dies[through_view])
    dies = np.maximum(dies, born)
    dies[updates.added] = born[updates.added] + 1
    dies[updates.entries] = updates.instants + at_once
    return born, dies


def _added_to_earlier(
    parameters: Sequence[ParameterKey], comes: Ints, end_of: Ints, update: UpdateInBackward
) -> npt.NDArray[np.bool_]:
    """Which gradients are added to an earlier one of the same parameter and micro-batch: autograd runs a parameter's hook
    on their sum, so `comes` of the earlier one becomes that of the last. Only parameters with an optimizer each are
    considered; other names need not be unique."""
    added, first = np.zeros(len(comes), dtype=bool), dict[tuple[ParameterKey, int], int]()
    alone = {one.parameter for one in update.alone}
    for index in np.argsort(comes, kind="stable").tolist():
        parameter = update.tied.get(parameters[index], parameters[index])
        if parameter in alone:
            earlier = first.setdefault((parameter, int(end_of[index])), index)
            added[index] = earlier != index
            comes[earlier] = comes[index]
    return added


def _update_allocations(timeline: Timeline, updates: _Updates, update: UpdateInBackward) -> Timeline:
    """What the updates allocate: temporaries, each at its own instant, and states, until the end of the step."""
    made, end = [], len(timeline.phases) + len(updates.after)
    optimizers = {one.parameter: one for one in update.alone}
    for entry, parameter, instant in zip(
        updates.entries.tolist(), updates.parameters, updates.instants.tolist(), strict=True
    ):
        own = optimizers.pop(update.tied.get(parameter, parameter), None)
        size = _rounded(own.num_bytes) if own else int(timeline.num_bytes[entry]) * update.bytes_per_gradient_byte
        made.append(Entry("update", Category.OPTIMIZER_TEMPORARIES, size, instant, instant + 1, "optimizer"))
        made += [
            Entry(name, Category.OPTIMIZER_STATES, _rounded(num_bytes), instant, end, module)
            for name, module, num_bytes in (own.states if own else ())
        ]
    return Timeline.from_entries(made, ())


def _rounded(num_bytes: int) -> int:
    """The size of the block that the allocator gives."""
    return round_up(num_bytes, MIN_BLOCK_BYTES)
