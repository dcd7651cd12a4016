"""The operations of a block as a tape records them: what each allocates, what autograd saves for its backward, and what
that backward allocates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peakcast.timelines.timeline import Category

KINDS = ("attention", "flex", "reduce_scatter", "topk", "all_to_all")
"""Kinds of operations, other than matrix products ("matmul"), whose results selective checkpointing may keep. Which of them
it keeps is a convention, `selective_checkpointing_keeps`."""


class HostCopy(NamedTuple):
    """A saved tensor that is offloaded: the backward instants at which it is back on the GPU, and at which the operation
    that saved it has run."""

    back: int
    freed: int


class Storage:
    """One allocation, and what keeps it alive on this tape. Instants are numbers of operations."""

    __slots__ = (
        "born",
        "category",
        "copied_until",
        "dropped_after",
        "kind",
        "last_read",
        "last_saver",
        "leaf_for",
        "made_again",
        "name",
        "num_bytes",
        "of_graph",
        "on_host",
        "stays_for",
        "stream",
    )

    def __init__(self, name: str, num_bytes: int, category: Category, born: int, kind: str = "", stream: int = 0) -> None:
        self.name = name
        self.kind = kind
        self.num_bytes = num_bytes
        self.category = int(category)
        self.born = born
        self.last_read = born
        self.last_saver: int | None = None  # the first operation that saves it; that one's backward comes last
        self.dropped_after = 0  # a graph that is dropped, without a backward, after this operation keeps it until then
        self.of_graph = False  # an attribute of a graph node, not a saved tensor: it lives as long as the graph
        self.stream = stream
        self.made_again: int | None = None  # after this operation it is freed; the backward of the same one recomputes it
        self.copied_until: int | None = None  # if recomputed: this one's backward frees a copy and its gradient
        self.leaf_for: int | None = None  # it is a leaf, on the GPU even if offloaded, until this one's backward is done
        self.on_host: tuple[HostCopy, ...] = ()  # its copies on the host, for operations that do not keep it on the GPU
        self.stays_for: int | None = None  # if it has such copies: the first operation that also keeps it on the GPU


class Tensor:
    """A view of a storage. `num_bytes` is the view's own size, which is also the size of its gradient."""

    __slots__ = ("num_bytes", "requires_grad", "storage")

    def __init__(self, storage: Storage, num_bytes: int, requires_grad: bool) -> None:
        self.storage = storage
        self.num_bytes = num_bytes
        self.requires_grad = requires_grad


InputGradient = tuple[Tensor, int | None]
"""An input of an operation and the bytes of its gradient; None: the operation's incoming gradient is passed on as it is."""


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """A parameter's gradient that an operation's backward makes. `workspaces`: bytes of each block of memory that the
    kernel which sums it allocates for itself. `parameter`: the parameter's name in its module, as it is stored; by default
    that of the gradient without ".grad"."""

    name: str
    num_bytes: int
    workspaces: tuple[int, ...] = ()
    parameter: str = ""

    @property
    def of(self) -> str:
        """The parameter's name."""
        return self.parameter or self.name.removesuffix(".grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideStream:
    """What an operation allocates on a second stream. The allocator never gives one stream's cached blocks to another."""

    saved_bytes: Sequence[int] = ()
    """Sizes of further tensors that it makes and saves."""
    forward_temporaries: Sequence[int] = ()
    backward_temporaries: Sequence[int] = ()
    result: bool = False
    """Whether its output is allocated there."""
    gradients: bool = False
    """Whether the gradients of its inputs are allocated there."""


NO_SIDE_STREAM = SideStream()
SIDE_STREAM = 1
"""The number of that stream; the computing stream is 0."""


class Output(NamedTuple):
    """The output of an operation that is not simply a new activation of `num_bytes`."""

    num_bytes: int
    view_of: Tensor | None = None
    """A tensor whose storage it shares; None: it has one of its own."""
    category: Category = Category.ACTIVATIONS
    """The category of the output and of the other tensors that the operation makes and saves."""
    kind: str = ""
    """"matmul" or one of `KINDS`, by which selective checkpointing decides, for the output and the other tensors alike."""
    name: str = ""
    """The name of its storage; "": the operation's."""
    side: SideStream = NO_SIDE_STREAM
    """What of the operation is allocated on a second stream."""

    @classmethod
    def view(cls, tensor: Tensor) -> Output:
        """All of `tensor`: an operation in place, or another shape of it."""
        return cls(tensor.num_bytes, view_of=tensor)


class Saved(NamedTuple):
    """The tensors that autograd saves for an operation's backward, if they are not just its inputs."""

    inputs: Sequence[Tensor] = ()
    output: bool = False
    """Whether it saves the operation's output."""
    extra_bytes: Sequence[int] = ()
    """Sizes of further tensors that the operation makes and saves (softmax statistics, dropout masks)."""
    parameter_bytes: int = 0
    """Bytes of the parameters that it saves, which exist anyway."""
    by_function: bool = False
    """Whether the operation is a `torch.autograd.Function`, which saves tensors after it has run."""
    become_gradients: bool = False
    """Whether its backward writes the gradients into its saved tensors. A gradient then begins when a saved tensor ends."""

    @property
    def results(self) -> bool:
        """Whether one of these tensors exists only after the operation has run."""
        return self.by_function or self.output or any(self.extra_bytes)

    def sizes(self, made: Output) -> list[int]:
        """Bytes of each of these tensors, of an operation whose output is `made`; without the parameters."""
        return [*(x.num_bytes for x in self.inputs), *([made.num_bytes] if self.output else []), *self.extra_bytes]


class Temporary(NamedTuple):
    """A tensor that exists only while its operation runs."""

    num_bytes: int
    stream: int


@dataclass(slots=True)
class Operation:
    """One forward operation. `gradients`: for each input that gets a gradient, the input and the bytes of the new gradient,
    or None if the incoming gradient is passed on unchanged."""

    name: str
    outputs: list[Tensor]
    gradients: Sequence[InputGradient]
    weight_gradients: Sequence[WeightGradient] = ()
    forward_temporaries: Sequence[Temporary] = ()
    backward_temporaries: Sequence[Temporary] = ()
    gradients_in_place: bool = False
    """Its backward writes the gradients into its saved tensors, so they begin when those end."""
    saved_bytes: Sequence[int] = ()
    """Sizes of all tensors that autograd saves for it, parameters too."""
    keeps_results: bool = False
    """Whether a tensor that it saves exists only after it has run: its output, another tensor that it makes or, for a
    `torch.autograd.Function`, any."""
    gradients_stream: int = 0

    @property
    def has_backward(self) -> bool:
        """Whether any of its outputs requires a gradient."""
        return self.outputs[0].requires_grad or any(output.requires_grad for output in self.outputs)


def temporaries(own: int | Sequence[int], aside: Sequence[int] = ()) -> Sequence[Temporary]:
    """Temporaries of these bytes: `own` on the computing stream, `aside` on the side stream."""
    if not (own or aside):
        return ()
    sizes = (own,) if isinstance(own, int) else own
    here = [Temporary(size, 0) for size in sizes if size > 0]
    return [*here, *(Temporary(size, SIDE_STREAM) for size in aside if size > 0)]
