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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from peakcast.core.units import round_up
from peakcast.models.allocator.sizes import MIN_BLOCK_BYTES
from peakcast.models.ledger.tape.template import HANDED_IN
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Alone:
    """The optimizer of one parameter. `gradient_bytes`: the size of the gradient; `num_bytes`: the most that its step
    allocates at once; `states`: (name, module, bytes) of the states that it makes."""

    module: str
    name: str
    gradient_bytes: int
    num_bytes: int
    states: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class UpdateInBackward:
    """What updating a parameter allocates."""

    bytes_per_gradient_byte: int = 0
    """Bytes of temporaries for each byte of a gradient, if each is applied when the next one is ready."""
    summed: frozenset[str] = frozenset()
    """Gradients of weights that are used twice: only their sum reaches the parameter, at the end of backward."""
    alone: tuple[Alone, ...] = ()
    """The optimizers of single parameters, if each has one: a gradient is applied as soon as it is ready."""


def updated_in_backward(timeline: Timeline, gradients: Ints, ends: Sequence[int], update: UpdateInBackward) -> Timeline:
    """`timeline` with one more instant for every update.

    `gradients`: indices of the entries that are a parameter's gradient, [num_gradients]; `ends`: the instants at which the
    backward of each micro-batch ends.
    """
    last = np.array(ends, dtype=np.int64)
    end_of = last[np.searchsorted(last, timeline.born[gradients], side="right")]
    summed = np.array([timeline.names[index] in update.summed for index in gradients], dtype=bool)
    comes = np.where(summed, end_of - 1, timeline.born[gradients])
    # of one operation, the bias's gradient is ready before the matrix's, which still has to be transposed
    order = np.lexsort((timeline.num_bytes[gradients], comes))
    gradients, comes, end_of = gradients[order], comes[order], end_of[order]
    before_end = end_of - 1
    follows = comes if update.alone else np.append(comes[1:], before_end[-1:])
    after = np.minimum(follows, before_end)  # the instant of the operation after which each is applied
    applied = after + 1 + np.arange(len(after))

    def shifted(instants: Ints) -> Ints:
        """The instants with the updates before them inserted."""
        return instants + np.searchsorted(after, instants, side="left")

    # a gradient that a block hands to the next exists from the end of the operation that made it
    handed_in = np.array([name == HANDED_IN for name in timeline.names], dtype=bool)
    born = np.where(handed_in, shifted(timeline.born - 1) + 1, shifted(timeline.born))
    # a projection's input is a view, whose backward adds its gradient to another. If an update applies the gradient before,
    # that view's backward runs after it (traced: OLMoE's); if each gradient is applied at once, it has run already
    added = np.array([name.endswith(".gradient") and "norm" not in name for name in timeline.names], dtype=bool)
    added &= (timeline.dies == timeline.born + 1) & (not update.alone)
    dies = np.maximum(np.where(added, shifted(timeline.dies), shifted(timeline.dies - 1) + 1), born)
    dies[gradients] = applied + bool(update.alone)
    made = _update_allocations(timeline, gradients, applied, update, len(timeline.phases) + len(after))
    labels = np.insert(np.array(timeline.labels, dtype=object), after + 1, "update")
    return replace(
        timeline,
        names=[*timeline.names, *made.names],
        modules=[*timeline.modules, *made.modules],
        categories=np.append(timeline.categories, made.categories),
        num_bytes=np.append(timeline.num_bytes, made.num_bytes),
        born=np.append(born, made.born),
        dies=np.append(dies, made.dies),
        phases=np.insert(timeline.phases, after + 1, int(Phase.BACKWARD)),
        labels=labels.tolist(),
        streams=None if timeline.streams is None else np.append(timeline.streams, np.zeros(len(made.born), dtype=np.int8)),
        reusable=None if timeline.reusable is None else np.append(shifted(timeline.reusable), made.dies),
    )


def _update_allocations(timeline: Timeline, gradients: Ints, applied: Ints, update: UpdateInBackward, end: int) -> Timeline:
    """What the updates allocate: temporaries, each at its own instant of `applied`, and states, until `end`."""
    entries = []
    optimizers = _optimizers(timeline, gradients, update.alone) if update.alone else [None] * len(gradients)
    for gradient, instant, own in zip(gradients.tolist(), applied.tolist(), optimizers, strict=True):
        size = _rounded(own.num_bytes) if own else int(timeline.num_bytes[gradient]) * update.bytes_per_gradient_byte
        entries.append(Entry("update", Category.OPTIMIZER_TEMPORARIES, size, instant, instant + 1, "optimizer"))
        entries += [
            Entry(name, Category.OPTIMIZER_STATES, _rounded(num_bytes), instant, end, module)
            for name, module, num_bytes in (own.states if own else ())
        ]
    return Timeline.from_entries(entries, ())


def _rounded(num_bytes: int) -> int:
    """The size of the block that the allocator gives."""
    return round_up(num_bytes, MIN_BLOCK_BYTES)


def _optimizers(timeline: Timeline, gradients: Ints, alone: Sequence[Alone]) -> list[Alone | None]:
    """The optimizer that steps on each gradient: its parameter's, by name. Where a block has another name for the parameter
    (the last norm, a table used as the head): any remaining optimizer whose gradient has the same size, in the same module
    if possible."""
    named = {(optimizer.module, f"{optimizer.name}.grad"): optimizer for optimizer in alone}
    keys = [(timeline.modules[index], timeline.names[index]) for index in gradients.tolist()]
    found = [named.pop(key, None) for key in keys]
    left = list(named.values())
    for place, (module, _) in enumerate(keys):
        if found[place] is None:
            size = int(timeline.num_bytes[gradients[place]])
            alike = [one for one in left if _rounded(one.gradient_bytes) == size]
            if alike:
                found[place] = min(alike, key=lambda one: one.module != module)
                left = [one for one in left if one is not found[place]]
    return found
