"""Tensors of a recomputed group of layers that a token dispatcher references until the group runs again, even in the next
step.

The dispatcher references the probabilities that its router returned last (`self.probs`, `self.local_probs`), and thereby
their autograd graph. Backward has freed the graph's saved tensors. But the graph still references the leaf with which the
recomputation began, the group's detached input, and that leaf's gradient. Source: megatron-core 0.16.1
`transformer/moe/token_dispatcher.py` (`dispatch_preprocess`), `tensor_parallel/random.py` (`CheckpointFunction.backward`).
The same holds for a mixture of experts that is recomputed by itself (`recompute_modules` moe). The graph of a layer that is
not recomputed leads only to parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peakcast.models.ledger.tape.step import FOREVER, Step
from peakcast.timelines.timeline import Category


@dataclass(slots=True)
class _Leaf:
    """A group's input and the input's gradient, each with the instant from which only the dispatcher references it."""

    input_from: int
    gradient_from: int = 0
    received: bool = False
    """Whether the input came from another stage; the model then holds it until its next forward begins."""


@dataclass(slots=True)
class Leaves:
    """The leaves of a rank's recomputed groups with routed layers, `num_bytes` each. A group is identified by its first
    layer."""

    num_bytes: int
    _alive: dict[int, _Leaf] = field(default_factory=dict)
    _with_shared_gradient: _Leaf | None = None
    """The leaf whose gradient the layers below it still read."""
    _first: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """When each group runs for the first time; until then a step still has the leaves of the step before."""
    _lives: list[tuple[Category, int, int]] = field(default_factory=list)

    def backward_ended(self, layers: range, now: int, *, received: bool) -> None:
        """Note that the backward of the group `layers` has ended: from now on only the dispatcher references the group's
        input."""
        leaf = self._alive[layers[0]] = _Leaf(now, now, received)
        if not received:  # a stage sends back a copy of the gradient
            self._with_shared_gradient = leaf

    def lower_backward_ended(self, now: int) -> None:
        """Note that the layers below a group have run backward: from now on only the leaf references the gradient that they
        read."""
        if self._with_shared_gradient is not None:
            self._with_shared_gradient.gradient_from = now
        self._with_shared_gradient = None

    def dispatched_anew(self, layers: range, now: int, replaced: int | None) -> None:
        """Note that the dispatchers of `layers` now reference new probabilities, so that the old leaf is freed. `replaced`:
        the instant at which the forward began; None if this is a backward."""
        self._first.setdefault(layers[0], (now, replaced))
        if leaf := self._alive.pop(layers[0], None):
            self._lives += _lives(leaf, now, replaced)

    def hold(self, step: Step, *, first: bool) -> None:
        """Hold the leaves on `step`; the `first` step of a training begins with none."""
        lives = list(self._lives)
        for group, leaf in self._alive.items():
            until, replaced = self._first[group]
            lives += _lives(leaf, FOREVER, FOREVER)
            if not first:
                lives += _lives(_Leaf(0, 0, leaf.received), until, replaced)
        for category, born, dies in lives:
            step.hold("recomputed.leaf", category, self.num_bytes, born, dies, "dispatcher")


def _lives(leaf: _Leaf, dies: int, replaced: int | None) -> list[tuple[Category, int, int]]:
    """(category, born, dies) of a leaf's input and gradient."""
    input_from = replaced if leaf.received and replaced is not None else leaf.input_from
    lives = [(Category.ACTIVATIONS, input_from, dies), (Category.TEMPORARIES, leaf.gradient_from, dies)]
    return [life for life in lives if life[1] < life[2]]
