"""The operations of a block as a tape records them: what each allocates, what autograd keeps, what its backward makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peakcast.timeline import Category

KINDS = ("attention", "flex", "reduce_scatter", "topk", "all_to_all")
"""Operations beside matrix products ("matmul") whose results selective checkpointing may keep: which of them it does is a
convention, `selective_checkpointing_keeps`."""


class Storage:
    """Bytes of one allocation and how long they live on this tape."""

    __slots__ = (
        "born",
        "category",
        "kind",
        "last_read",
        "last_saver",
        "made_again",
        "name",
        "num_bytes",
        "of_graph",
        "stream",
    )

    def __init__(self, name: str, num_bytes: int, category: Category, born: int, kind: str = "") -> None:
        self.name = name
        self.kind = kind
        self.num_bytes = num_bytes
        self.category = int(category)
        self.born = born
        self.last_read = born
        self.last_saver: int | None = None  # the earliest operation that keeps it: the last to run in backward
        self.of_graph = False  # an attribute of a node, not among what autograd keeps for it: there as long as the graph
        self.stream = 0
        self.made_again: int | None = None  # the operation in whose backward it is made again, having been let go after it


class Tensor:
    """A view of a storage: `num_bytes` are its own (the size of its gradient in its own dtype)."""

    __slots__ = ("num_bytes", "requires_grad", "storage")

    def __init__(self, storage: Storage, num_bytes: int, requires_grad: bool) -> None:
        self.storage = storage
        self.num_bytes = num_bytes
        self.requires_grad = requires_grad


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """A parameter's gradient as an operation's backward makes it. `workspaces`: bytes of each block of memory that the
    kernel which sums it takes for itself."""

    name: str
    num_bytes: int
    workspaces: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SideStream:
    """What an operation allocates while a second stream is the current one, from whose memory the first cannot take."""

    saved_bytes: Sequence[int] = ()
    """Of further tensors that it makes and keeps."""
    forward_temporaries: Sequence[int] = ()
    backward_temporaries: Sequence[int] = ()
    result: bool = False
    """Whether its result is."""
    gradients: bool = False
    """Whether the gradients of its inputs are."""


NO_SIDE_STREAM = SideStream()
SIDE_STREAM = 1
"""The number of that stream; 0 is the one that computes."""


@dataclass(slots=True)
class Operation:
    """One forward operation. `gradients` pairs an input with the bytes of its new gradient, or None when the incoming
    gradient is passed on as it is."""

    name: str
    outputs: list[Tensor]
    gradients: list[tuple[Tensor, int | None]]
    weight_gradients: Sequence[WeightGradient]
    forward_temporaries: Sequence[tuple[int, int]]
    """(bytes, stream) of each."""
    backward_temporaries: Sequence[tuple[int, int]]
    gradients_in_place: bool = False
    """Its backward writes the gradients into what it kept: they begin where that ends."""
    saved_bytes: Sequence[int] = ()
    """Sizes of the tensors that autograd keeps for it, each counted for itself, parameters too."""
    keeps_results: bool = False
    """Whether something of that is there only when it has run: its result, what it makes beside that, or, of a
    `torch.autograd.Function`, anything."""
    gradients_stream: int = 0

    @property
    def has_backward(self) -> bool:
        return self.outputs[0].requires_grad or any(output.requires_grad for output in self.outputs)


def temporaries(own: int | Sequence[int], aside: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(bytes, stream) of an operation's temporaries on the stream that computes and on the side stream."""
    sizes = (own,) if isinstance(own, int) else own
    return (*((size, 0) for size in sizes if size > 0), *((size, SIDE_STREAM) for size in aside if size > 0))
