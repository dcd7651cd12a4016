"""The operations of a block as a tape records them: what each allocates, what autograd saves, what its backward makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peakcast.timelines.timeline import Category

KINDS = ("attention", "flex", "reduce_scatter", "topk", "all_to_all")
"""Kinds of operations, other than matrix products ("matmul"), whose results selective checkpointing may keep. Which of them
it keeps is a convention, `selective_checkpointing_keeps`."""


class Storage:
    """One allocation, and what decides how long it lives on this tape."""

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
        self.last_saver: int | None = None  # of the operations that save it, the first in forward, so the last in backward
        self.of_graph = False  # an attribute of a graph node, not a saved tensor: it lives as long as the graph
        self.stream = 0
        self.made_again: int | None = None  # it is freed after this operation and recomputed in that one's backward


class Tensor:
    """A view of a storage. `num_bytes` is the view's own size, which is also the size of its gradient."""

    __slots__ = ("num_bytes", "requires_grad", "storage")

    def __init__(self, storage: Storage, num_bytes: int, requires_grad: bool) -> None:
        self.storage = storage
        self.num_bytes = num_bytes
        self.requires_grad = requires_grad


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """A parameter's gradient that an operation's backward makes. `workspaces`: bytes of each block of memory that the
    kernel which sums it allocates for itself."""

    name: str
    num_bytes: int
    workspaces: tuple[int, ...] = ()


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


@dataclass(slots=True)
class Operation:
    """One forward operation. `gradients`: for each input that gets a gradient, the input and the bytes of the new gradient,
    or None if the incoming gradient is passed on unchanged."""

    name: str
    outputs: list[Tensor]
    gradients: list[tuple[Tensor, int | None]]
    weight_gradients: Sequence[WeightGradient]
    forward_temporaries: Sequence[tuple[int, int]]
    """(bytes, stream) of each."""
    backward_temporaries: Sequence[tuple[int, int]]
    gradients_in_place: bool = False
    """Its backward writes the gradients into its saved tensors, so they begin when those end."""
    saved_bytes: Sequence[int] = ()
    """Sizes of all tensors that autograd saves for it, parameters too."""
    keeps_results: bool = False
    """Whether a tensor that it saves exists only after it has run: its output, one that it makes beside that or, for a
    `torch.autograd.Function`, any."""
    gradients_stream: int = 0

    @property
    def has_backward(self) -> bool:
        """Whether any of its outputs requires a gradient."""
        return self.outputs[0].requires_grad or any(output.requires_grad for output in self.outputs)


def temporaries(own: int | Sequence[int], aside: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(bytes, stream) of temporaries: `own` on the computing stream, `aside` on the side stream."""
    sizes = (own,) if isinstance(own, int) else own
    return (*((size, 0) for size in sizes if size > 0), *((size, SIDE_STREAM) for size in aside if size > 0))
