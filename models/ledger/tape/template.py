"""A template: the tensors of one block, with lifetimes that count from the start of the block's own forward and backward.
`Tape.finish` makes it, and `placing.py` places it on a step once for each run of the block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from peakcast.core.texts import Texts
from peakcast.models.allocator.rounding import MIN_BLOCK_BYTES
from peakcast.models.ledger.tape.marks import Mark
from peakcast.timelines.timeline import Category, Phase

NO_OPERATION, BLOCK_INPUT = -1, -2
"""In place of an operation's number: of a tensor that no operation of the block makes, and of the block's input, which the
last operation of the block before has made."""
OUTPUT_GRADIENT = "gradient"
"""The name of the gradient that a block receives for its output from the block after it."""


@dataclass(frozen=True, slots=True)
class BorrowedUse:
    """How a block uses a tensor that another block owns, in backward instants of this block. None: it does not."""

    kept_until: int | None
    """The instant before which autograd frees what this block saved of it."""
    gradient_from: int | None
    """The instant from which a gradient of it exists. If there is one before, this block adds to it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A tensor that the weights' backward still needs. `born` counts as in `Template`. `until`: the last instant of this
    block's weights' backward that needs it; None: it is needed until the weights' backward of all blocks has run;
    INPUTS_DONE: only until the inputs' backward of all blocks has run."""

    name: str
    category: int
    num_bytes: int
    born: int
    born_backward: bool
    until: int | None
    until_on_top: int | None = None
    """`until` for the last block of a stage, whose graph no later block keeps alive."""
    inputs_until: int = 0
    """For a layer that is recomputed for the inputs' backward alone: the instant of that backward at which the tensor is
    freed."""


INPUTS_DONE = -1


@dataclass(frozen=True, slots=True)
class Later:
    """The second half of a split backward. `weights`: one template for each weight's gradient, in the order in which they
    run. `waiting`: the tensors that they need."""

    weights: tuple[Template, ...]
    waiting: tuple[Waiting, ...]


@dataclass(frozen=True, slots=True)
class Reload:
    """What a group of operations brings back from the host: the sizes of its tensors, the backward instant from which the
    block has them, and the operation whose backward is the group's last."""

    num_bytes: tuple[int, ...]
    back: int
    last: str


class OperationInstants(NamedTuple):
    """When operations run for the first time, by their names: in forward, in a recomputation inside the block's backward,
    and in backward. (A recomputation that is a run of its own is another forward.)"""

    forward: Mapping[str, int]
    again: Mapping[str, int]
    backward: Mapping[str, int]


@dataclass(slots=True)
class Row:
    """One tensor of a template, before rows become columns. Fields mean what the columns of the same names mean in
    `Columns`."""

    name: str
    category: int
    num_bytes: int
    """Bytes as asked for; columns are rounded as the allocator does."""
    born: int
    dies: int
    born_backward: bool = False
    dies_backward: bool = False
    dies_without_graph: int = 0
    parameter: str = ""
    """If it is a parameter's gradient: the parameter's name."""
    cached: bool = False
    stream: int = 0
    through_view: bool = False
    allocated: bool = True
    operation: int = NO_OPERATION


TEMPORARIES, GRADIENTS = int(Category.TEMPORARIES), int(Category.GRADIENTS)


def backward_row(
    name: str,
    num_bytes: int,
    born: int,
    dies: int,
    stream: int = 0,
    category: int = TEMPORARIES,
    parameter: str = "",
    *,
    allocated: bool = True,
) -> Row:
    """The row of a tensor that lives from the backward instant `born` until before the backward instant `dies`."""
    return Row(name, category, num_bytes, born, dies, True, True, dies, parameter, stream=stream, allocated=allocated)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The tensors of a block, in columns. `born` and `dies` count from the block's first backward instant where
    `born_backward` and `dies_backward` are true, otherwise from its first forward instant. Shapes: every array is
    [num_entries]."""

    names: list[str]
    categories: npt.NDArray[np.int8]
    num_bytes: npt.NDArray[np.int64]
    """Rounded up to the allocator's unit."""
    born: npt.NDArray[np.int64]
    dies: npt.NDArray[np.int64]
    born_backward: npt.NDArray[np.bool_]
    dies_backward: npt.NDArray[np.bool_]
    weight_gradient: npt.NDArray[np.bool_]
    """Whether the entry is a parameter's gradient: it outlives the block, or it is added to one that exists."""
    parameters: list[str]
    """The names of those parameters as they are stored, one for each such entry."""
    dies_without_graph: npt.NDArray[np.int64]
    """`dies` when the block runs under no_grad and nothing is saved, counted from the first forward instant."""
    cached: npt.NDArray[np.bool_]
    """Results that selective checkpointing keeps: the first forward makes them and the recomputation reuses them."""
    allocated: npt.NDArray[np.bool_]
    """Whether the operation at `born` allocates the entry. Otherwise it comes from outside the block, or the operation
    before made it, in place of a tensor that was freed when that operation ended."""
    operations: npt.NDArray[np.int32]
    """The number of the operation that makes each entry, in forward or in backward; or `NO_OPERATION`, `BLOCK_INPUT`."""
    streams: npt.NDArray[np.int64] | None = None
    """The stream on which each entry is allocated; None: all on the computing stream."""
    through_view: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Indices of the gradients that exist for one instant, since they are added to another or read at once, and that no
    norm makes: they pass through the backward of a view first."""


def column_fields(rows: Sequence[Row]) -> dict[str, Any]:
    """The fields of `Columns`, by name."""
    sizes = np.array([row.num_bytes for row in rows], dtype=np.int64)
    streams = [row.stream for row in rows]
    columns = Columns(
        names=[row.name for row in rows],
        categories=np.array([row.category for row in rows], dtype=np.int8),
        num_bytes=-(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES,
        born=np.array([row.born for row in rows], dtype=np.int64),
        dies=np.array([row.dies for row in rows], dtype=np.int64),
        born_backward=np.array([row.born_backward for row in rows], dtype=bool),
        dies_backward=np.array([row.dies_backward for row in rows], dtype=bool),
        weight_gradient=np.array([bool(row.parameter) for row in rows], dtype=bool),
        parameters=[row.parameter for row in rows if row.parameter],
        dies_without_graph=np.array([row.dies_without_graph for row in rows], dtype=np.int64),
        cached=np.array([row.cached for row in rows], dtype=bool),
        allocated=np.array([row.allocated for row in rows], dtype=bool),
        operations=np.array([row.operation for row in rows], dtype=np.int32),
        streams=np.array(streams, dtype=np.int64) if any(streams) else None,
        through_view=np.flatnonzero([row.through_view for row in rows]),
    )
    return vars(columns)


@dataclass(frozen=True, kw_only=True)
class Template(Columns):
    """The tensors of a block, and what code outside the block asks about it."""

    num_forward: int
    num_recomputed: int
    """How many forward instants a recomputation runs: it stops after the last that saves a tensor."""
    num_backward: int
    forward_labels: list[str]
    backward_labels: list[str]
    input_bytes: int
    keeps_input: bool
    """Whether autograd saves the block's input."""
    gradient_bytes_at_first_saved: int
    """Bytes of the gradients that exist when backward first reads a saved tensor."""
    reads_saved_first: str
    """The operation whose backward is the first to read a saved tensor; "" if none does."""
    saved_bytes: list[int]
    """Sizes of the saved tensors, parameters too. A tensor that several operations save is listed once for each."""
    loss_from: int
    """Forward instants from this one on belong to the loss, not to the network's forward."""
    output_gradient_used_until: int
    """The backward instant at which a second gradient is first added in place to the output's gradient, or at which this
    block reads that gradient for the last time. If something else also refers to it, autograd does not add in place but
    makes a new tensor (`InputBuffer::accumulate`); the entry then means that tensor."""
    graph_bytes: list[int] = field(default_factory=list)
    """Sizes of the tensors that nodes of the graph have as attributes. They exist as long as the graph."""
    second_output_bytes: int = 0
    """Bytes of a second tensor that the block returns to a reentrant checkpoint. `CheckpointFunction.backward` keeps it,
    together with the gradient of zeros that autograd makes for it (torch `csrc/autograd/python_function.cpp`
    materialize_grads)."""
    forward_marks: Mapping[Mark, Sequence[int]] = field(default_factory=dict)
    """The forward instants of marked operations, ascending."""
    backward_marks: Mapping[Mark, Sequence[int]] = field(default_factory=dict)
    """The backward instants of marked operations that have a backward, ascending."""
    borrowed: dict[str, BorrowedUse] = field(default_factory=dict)
    """How the block uses tensors that other blocks own, by their names."""
    modules: list[str] = field(default_factory=list)
    """The module of each entry, if the block covers several modules; empty: all belong to the module under which the block
    runs."""
    reloads: tuple[Reload, ...] = ()
    """What comes back from the host, group by group in the order of backward."""
    later: Later | None = None
    """If backward is split in two: its second half. This template then has the first half, the inputs' gradients."""

    @property
    def num_entries(self) -> int:
        """How many tensors one run of the block makes."""
        return len(self.names)

    @cached_property
    def descriptions(self) -> npt.NDArray[np.int64]:
        """The columns that are the same for every run, [4, num_entries]: the first rows of `columns.py`."""
        modules = Texts.of(self.modules).numbers if self.modules else np.zeros(len(self.names), dtype=np.int64)
        return np.stack([Texts.of(self.names).numbers, modules, self.categories, self.num_bytes])

    @cached_property
    def gradient_columns(self) -> npt.NDArray[np.int64]:
        """Indices of the entries that are a parameter's gradient."""
        return np.flatnonzero(self.weight_gradient)

    @cached_property
    def parameter_numbers(self) -> npt.NDArray[np.int64]:
        """`parameters` as the numbers of `Texts`."""
        return Texts.of(self.parameters).numbers

    def made_by(self, mark: Mark) -> npt.NDArray[np.bool_]:
        """Which entries operations with this mark make, in forward or in backward. [num_entries]"""
        return np.isin(self.operations, self.forward_marks.get(mark, ()))

    @cached_property
    def in_forward(self) -> dict[str, int]:
        """The first forward instant of each label."""
        return {label: instant for instant, label in reversed(list(enumerate(self.forward_labels)))}

    @cached_property
    def in_backward(self) -> dict[str, int]:
        """The first backward instant of each label."""
        return {label: instant for instant, label in reversed(list(enumerate(self.backward_labels)))}

    @property
    def instants(self) -> OperationInstants:
        """When the operations run that read the weights of single modules."""
        return OperationInstants(self.in_forward, {}, self.in_backward)

    @cached_property
    def forward_phases(self) -> tuple[bytes, ...]:
        """The phases of the block's forward instants, as bytes, indexed by the phase in which the block runs forward."""
        loss = bytes((Phase.LOSS,)) * (self.num_forward - self.loss_from)
        return tuple(bytes((phase,)) * self.loss_from + loss for phase in Phase)

    @cached_property
    def backward_phases(self) -> tuple[bytes, ...]:
        """The phases of the block's backward instants, as bytes, indexed by the phase in which the block runs backward."""
        return tuple(bytes((phase,)) * self.num_backward for phase in Phase)

    @cached_property
    def made_bytes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Bytes that the operation at each forward instant and at each backward instant allocates, temporaries included."""
        forward = self.allocated & ~self.born_backward
        backward = self.allocated & self.born_backward
        return self._allocated_at(forward, self.num_forward), self._allocated_at(backward, self.num_backward)

    def _allocated_at(self, entries: npt.NDArray[np.bool_], num_instants: int) -> npt.NDArray[np.int64]:
        """The sum of `entries` by the instant at which they are born. [num_instants]"""
        sums = np.zeros(num_instants, dtype=np.int64)
        np.add.at(sums, self.born[entries], self.num_bytes[entries])
        return sums

    @cached_property
    def output_gradient(self) -> int | None:
        """The index of the gradient that the next block computes for this block's output; None if there is none."""
        return next((index for index, name in enumerate(self.names) if name == OUTPUT_GRADIENT), None)

    @cached_property
    def output_gradient_bytes(self) -> int:
        """Bytes of the gradient that the next block computes for this block's output; 0 if there is none."""
        return 0 if self.output_gradient is None else int(self.num_bytes[self.output_gradient])
