"""Optimizers that update in backward (LOMO, AdaLomo): a gradient is used up as soon as the next one has come.

The library registers a hook on every parameter (lomo-optim 0.1.1 `fuse_update`): when its gradient comes, the one that
came before is applied and released; `fused_backward` applies the last. The hook runs when autograd's engine takes the
gradient to its parameter, which is its next task after the operation that made it: AccumulateGrad has the highest priority,
and an operation's inputs and what it kept are gone by then (torch/csrc/autograd/engine.cpp `thread_main`). So an update is
an instant of its own, between two operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from peakcast.models.analytical.template import HANDED_IN
from peakcast.timeline import Category, Phase, Timeline

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class UpdateInBackward:
    """What updating a parameter allocates."""

    bytes_per_gradient_byte: int
    summed: frozenset[str] = frozenset()
    """Gradients of weights that are used twice: what comes to the parameter is the sum, when backward ends."""


def updated_in_backward(timeline: Timeline, gradients: Ints, ends: Sequence[int], update: UpdateInBackward) -> Timeline:
    """`timeline` with an instant for every update.

    `gradients`: which entries are a parameter's gradient; `ends`: the instants at which a backward is over, one for each
    micro-batch. Shapes: `gradients` is [num_gradients].
    """
    last = np.array(ends, dtype=np.int64)
    end_of = last[np.searchsorted(last, timeline.born[gradients], side="right")]
    summed = np.array([timeline.names[index] in update.summed for index in gradients], dtype=bool)
    comes = np.where(summed, end_of - 1, timeline.born[gradients])
    # of one operation a bias comes before its matrix, whose gradient still has to be transposed
    order = np.lexsort((timeline.num_bytes[gradients], comes))
    gradients, comes, end_of = gradients[order], comes[order], end_of[order]
    before_end = end_of - 1
    after = np.minimum(np.append(comes[1:], before_end[-1:]), before_end)  # the operation after which each is applied
    applied = after + 1 + np.arange(len(after))

    def shifted(instants: Ints) -> Ints:
        return instants + np.searchsorted(after, instants, side="left")

    # what a block hands to the next one is there from the end of the operation that made it
    handed_in = np.array([name == HANDED_IN for name in timeline.names], dtype=bool)
    born = np.where(handed_in, shifted(timeline.born - 1) + 1, shifted(timeline.born))
    # a projection's input is a view, by whose backward its gradient is added to another's: the next task but one
    added = np.array([name.endswith(".gradient") and "norm" not in name for name in timeline.names], dtype=bool)
    added &= timeline.dies == timeline.born + 1
    dies = np.maximum(np.where(added, shifted(timeline.dies), shifted(timeline.dies - 1) + 1), born)
    dies[gradients] = applied
    num_bytes = timeline.num_bytes[gradients] * update.bytes_per_gradient_byte
    labels = np.insert(np.array(timeline.labels, dtype=object), after + 1, "update")
    none = np.zeros(len(after), dtype=np.int8)
    return replace(
        timeline,
        names=[*timeline.names, *["update"] * len(after)],
        modules=[*timeline.modules, *["optimizer"] * len(after)],
        categories=np.append(timeline.categories, none + np.int8(Category.OPTIMIZER_TEMPORARIES)),
        num_bytes=np.append(timeline.num_bytes, num_bytes),
        born=np.append(born, applied),
        dies=np.append(dies, applied + 1),
        phases=np.insert(timeline.phases, after + 1, int(Phase.BACKWARD)),
        labels=labels.tolist(),
        streams=None if timeline.streams is None else np.append(timeline.streams, none),
        reusable=None if timeline.reusable is None else np.append(shifted(timeline.reusable), applied + 1),
    )
