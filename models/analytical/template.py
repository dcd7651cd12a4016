"""A template: the tensors of one block, with lives relative to its own forward and backward, to be placed as often as the
block occurs. `Tape.finish` makes it, `placing.py` places it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from peakcast.texts import Texts
from peakcast.timeline import Phase

HANDED_IN = "gradient"
"""The name of the gradient that a block's output gets from the block after it."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a block does to a tensor that another one owns, in backward instants of this block; None: it does not."""

    kept_until: int | None
    """Autograd has let go of it when this instant begins."""
    gradient_from: int | None
    """A gradient of it exists when this instant begins; any that exists already is added to."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A tensor that waits for the weights' backward. `born` counts as in `Template`; `until`: the instant of the weights'
    backward that is the last to need it, None: all of it, of all the blocks; INPUTS_DONE: the inputs' backward of all."""

    name: str
    category: int
    num_bytes: int
    born: int
    born_backward: bool
    until: int | None
    until_on_top: int | None = None
    """`until` in the highest block of a stage, where only its own operations hold the graph."""
    inputs_until: int = 0
    """Of a layer computed anew for the inputs' backward alone, it dies when this instant of that begins."""


INPUTS_DONE = -1


@dataclass(frozen=True, slots=True)
class Later:
    """The second half of a backward in two: the weights' gradients, which `weights` make, one turn each."""

    weights: tuple[Template, ...]
    waiting: tuple[Waiting, ...]


@dataclass(frozen=True)
class Template:
    """The entries of a block in columns. `born`/`dies` count from the block's first forward or backward instant,
    as `born_backward`/`dies_backward` say. Shapes: every array is [num_entries]."""

    names: list[str]
    categories: npt.NDArray[np.int8]
    num_bytes: npt.NDArray[np.int64]
    born: npt.NDArray[np.int64]
    dies: npt.NDArray[np.int64]
    born_backward: npt.NDArray[np.bool_]
    dies_backward: npt.NDArray[np.bool_]
    weight_gradient: npt.NDArray[np.bool_]
    """Entries that are a parameter's gradient: they live on after the block, or are added to one that exists."""
    dies_without_graph: npt.NDArray[np.int64]
    """As `dies`, from the first forward instant, when the block runs under no_grad and nothing is kept."""
    cached: npt.NDArray[np.bool_]
    """Results that selective checkpointing keeps: made in the first forward, used again by the recomputation."""
    num_forward: int
    num_recomputed: int
    """Forward instants up to the last at which autograd keeps something: a recomputation stops there."""
    num_backward: int
    forward_labels: list[str]
    backward_labels: list[str]
    input_bytes: int
    keeps_input: bool
    """Whether autograd keeps the block's input for its backward."""
    asks_late_bytes: int
    """Bytes of gradients that backward has made by the time it first asks for something that was kept."""
    saved_bytes: list[int]
    """Sizes of the tensors that autograd keeps, each operation's counted for itself, parameters too."""
    loss_from: int
    """Forward instants from this one on belong to the loss, not to the model's forward."""
    added_to_handed_in: int
    """The backward instant at which a second gradient is first added in place to the one that was handed in, or from which
    nothing here reads that one. Where somebody else holds it, a sum is a new tensor (`InputBuffer::accumulate`), for which
    the entry then stands."""
    beside_bytes: int = 0
    """Bytes of what the block returns beside its output to a reentrant checkpoint: `CheckpointFunction.backward` keeps it
    beside a gradient of zeros that autograd makes for it (torch `csrc/autograd/python_function.cpp` materialize_grads)."""
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)
    """By name, what becomes here of the tensors that other blocks own."""
    streams: npt.NDArray[np.int64] | None = None
    """Of every entry, the stream on which it is allocated; None: all are of the stream that computes."""
    modules: list[str] = field(default_factory=list)
    """Of every entry, where the block is more than one module; empty: all are of the module as which it is placed."""
    later: Later | None = None
    """Of a backward in two halves: this template has the first, the inputs' gradients."""

    @property
    def num_entries(self) -> int:
        """Entries of one run."""
        return len(self.names)

    @cached_property
    def descriptions(self) -> npt.NDArray[np.int64]:
        """What no run changes, [4, num_entries]: the first rows of `columns.py`."""
        modules = Texts.of(self.modules).numbers if self.modules else np.zeros(len(self.names), dtype=np.int64)
        return np.stack([Texts.of(self.names).numbers, modules, self.categories, self.num_bytes])

    @cached_property
    def gradient_columns(self) -> npt.NDArray[np.int64]:
        """Which entries are a parameter's gradient."""
        return np.flatnonzero(self.weight_gradient)

    @cached_property
    def gradients_of(self) -> dict[str, npt.NDArray[np.int64]]:
        """By operation, which of `gradient_columns` it makes ("q_proj" makes "q_proj.weight.grad")."""
        found: dict[str, list[int]] = {}
        for place, column in enumerate(self.gradient_columns.tolist()):
            found.setdefault(self.names[column].rsplit(".", 2)[0], []).append(place)
        return {operation: np.array(places, dtype=np.int64) for operation, places in found.items()}

    @cached_property
    def in_forward(self) -> dict[str, int]:
        """The first forward instant of each label."""
        return {label: instant for instant, label in reversed(list(enumerate(self.forward_labels)))}

    @cached_property
    def in_backward(self) -> dict[str, int]:
        """The first backward instant of each label."""
        return {label: instant for instant, label in reversed(list(enumerate(self.backward_labels)))}

    @cached_property
    def forward_phases(self) -> tuple[bytes, ...]:
        """By the number of the phase in which the block runs forward, those of its instants."""
        loss = bytes((Phase.LOSS,)) * (self.num_forward - self.loss_from)
        return tuple(bytes((phase,)) * self.loss_from + loss for phase in Phase)

    @cached_property
    def backward_phases(self) -> tuple[bytes, ...]:
        """By the number of the phase in which the block runs backward, those of its instants."""
        return tuple(bytes((phase,)) * self.num_backward for phase in Phase)

    @cached_property
    def made_bytes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of each forward, then of each backward instant, the bytes that its operation allocates, passing ones too. What
        takes the place of another tensor when the operation is over bears the name of the one before."""
        made = np.zeros(self.num_forward, dtype=np.int64), np.zeros(self.num_backward, dtype=np.int64)
        labels = self.forward_labels, self.backward_labels
        for name, size, at, half in zip(self.names, self.num_bytes, self.born, self.born_backward.astype(int), strict=True):
            if at < len(made[half]) and name.startswith(labels[half][at]):
                made[half][at] += size
        return made

    @cached_property
    def handed_in_bytes(self) -> int:
        """Bytes of the gradient that the block after it hands in; 0 where there is none."""
        return int(self.num_bytes[self.names.index(HANDED_IN)]) if HANDED_IN in self.names else 0
