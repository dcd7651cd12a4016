"""A tape: the operations of one block, from which the life of every tensor follows.

A block (a decoder layer, the loss, ...) is written once, as the operations that its framework runs in forward. Each says
what it allocates, what autograd keeps of it until backward, and what its backward allocates. `Tape.finish` runs the
operations forward and then backward with autograd's own rules of life and returns a `Template`: entries relative to the
block's first forward instant and its first backward instant, which `step.py` places as often as the block occurs.

Autograd's rules, as in torch 2.x (torch/csrc/autograd/engine.cpp):
- a tensor lives until its last reader has run, or, when kept, until the backward of the operations that keep it has run;
- a node's incoming gradient and its kept tensors are released after the node has run (`release_variables`);
- nodes run in reverse order of creation; a parameter's gradient is accumulated as soon as it is computed;
- a second gradient of the same tensor is added in place when nobody else holds the first one (`InputBuffer::add`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from peakcast.timeline import Category
from peakcast.units import round_up

HANDED_IN = "gradient"
"""The name of the gradient that a block's output gets from the block after it."""
ALLOCATION_UNIT_BYTES = 512
"""CUDACachingAllocator rounds every request up to this (kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp)."""


class Storage:
    """Bytes of one allocation and how long they live on this tape."""

    __slots__ = ("born", "category", "kind", "last_read", "last_saver", "name", "num_bytes")

    def __init__(self, name: str, num_bytes: int, category: Category, born: int, kind: str = "") -> None:
        self.name = name
        self.kind = kind
        self.num_bytes = num_bytes
        self.category = category
        self.born = born
        self.last_read = born
        self.last_saver: int | None = None  # the earliest operation that keeps it: the last to run in backward


class Tensor:
    """A view of a storage: `num_bytes` are its own (the size of its gradient in its own dtype)."""

    __slots__ = ("num_bytes", "requires_grad", "storage")

    def __init__(self, storage: Storage, num_bytes: int, requires_grad: bool) -> None:
        self.storage = storage
        self.num_bytes = num_bytes
        self.requires_grad = requires_grad


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """A parameter's gradient as an operation's backward makes it."""

    name: str
    num_bytes: int


@dataclass(slots=True)
class Operation:
    """One forward operation. `gradients` pairs an input with the bytes of its new gradient, or None when the incoming
    gradient is passed on as it is."""

    name: str
    outputs: list[Tensor]
    gradients: list[tuple[Tensor, int | None]]
    weight_gradients: list[WeightGradient]
    forward_temporary_bytes: int
    backward_temporary_bytes: int
    gradients_in_place: bool = False
    """Its backward writes the gradients into what it kept: they begin where that ends."""
    saved_bytes: Sequence[int] = ()
    """Sizes of the tensors that autograd keeps for it, each counted for itself, parameters too."""

    @property
    def has_backward(self) -> bool:
        return any(output.requires_grad for output in self.outputs)


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
    num_backward: int
    forward_labels: list[str]
    backward_labels: list[str]
    input_bytes: int
    keeps_input: bool
    """Whether autograd keeps the block's input for its backward."""
    saved_bytes: list[int]
    """Sizes of the tensors that autograd keeps, each operation's counted for itself, parameters too."""
    loss_from: int
    """Forward instants from this one on belong to the loss, not to the model's forward."""

    @property
    def handed_in_bytes(self) -> int:
        """Bytes of the gradient that the block after it hands in; 0 where there is none."""
        return int(self.num_bytes[self.names.index(HANDED_IN)]) if HANDED_IN in self.names else 0


@dataclass
class _Gradient:
    num_bytes: int
    born: int
    holders: int = 0
    category: Category = Category.TEMPORARIES
    name: str = HANDED_IN


@dataclass
class _Rows:
    rows: list[tuple[str, int, int, int, bool, int, bool, bool, int, bool]] = field(default_factory=list)

    def add(
        self,
        name: str,
        category: Category,
        num_bytes: int,
        born: tuple[int, bool],
        dies: tuple[int, bool],
        weight_gradient: bool = False,
        dies_without_graph: int | None = None,
        cached: bool = False,
    ) -> None:
        if num_bytes > 0:
            size = round_up(num_bytes, ALLOCATION_UNIT_BYTES)
            without_graph = dies[0] if dies_without_graph is None else dies_without_graph
            self.rows.append((name, int(category), size, *born, *dies, weight_gradient, without_graph, cached))


class Tape:
    """Records the operations of one block; `finish` turns them into a `Template`.

    `saves_on_cpu`: what autograd keeps is copied to the host and comes back, each tensor for itself, while the operation
    that kept it runs backward (`torch.autograd.graph.save_on_cpu`, which copies parameters as well).
    """

    def __init__(self, *, saves_on_cpu: bool = False) -> None:
        self._saves_on_cpu = saves_on_cpu
        self._operations: list[Operation] = []
        self._storages: list[Storage] = []
        self._input: Tensor | None = None
        self._loss_from: int | None = None

    # -- building -----------------------------------------------------------------------------------------------------

    def input(
        self, num_bytes: int, *, requires_grad: bool = True, owned: bool = True, name: str = "hidden_states"
    ) -> Tensor:
        """The block's input: made by the block before, owned by this one from its first instant on (or, when not
        `owned`, held by somebody else for at least as long)."""
        storage = Storage(name, num_bytes if owned else 0, Category.ACTIVATIONS, 0)
        self._storages.append(storage)
        self._input = Tensor(storage, num_bytes, requires_grad)
        return self._input

    def operation(
        self,
        name: str,
        reads: Sequence[Tensor] = (),
        output_bytes: int = 0,
        *,
        saves: Sequence[Tensor] = (),
        saves_output: bool = False,
        extra_saved_bytes: Sequence[int] = (),
        gradients: Sequence[tuple[Tensor, int | None]] | None = None,
        weight_gradients: Sequence[WeightGradient] = (),
        forward_temporary_bytes: int = 0,
        backward_temporary_bytes: int = 0,
        view_of: Tensor | None = None,
        category: Category = Category.ACTIVATIONS,
        output_name: str | None = None,
        kind: str = "",
        gradients_in_place: bool = False,
        saved_parameter_bytes: int = 0,
    ) -> Tensor:
        """Append an operation and return its output.

        `reads`: tensors it reads. `saves`: those of them that autograd keeps; `saves_output`: its own result too;
        `extra_saved_bytes`: further tensors made and kept (softmax statistics, dropout masks). `gradients`: which inputs
        get a gradient, default each read that needs one, of its own size. `view_of`: the output shares that storage.
        Temporaries live during the operation only. `kind` ("matmul", "attention"): what selective checkpointing goes by.
        """
        index = len(self._operations)
        for tensor in reads:
            tensor.storage.last_read = max(tensor.storage.last_read, index)
        needs_grad = any(tensor.requires_grad for tensor in reads) or bool(weight_gradients)
        if view_of is not None:
            output = Tensor(view_of.storage, output_bytes, needs_grad)
        else:
            storage = Storage(output_name or name, output_bytes, category, index, kind)
            self._storages.append(storage)
            output = Tensor(storage, output_bytes, needs_grad)
        if needs_grad:
            for tensor in saves:
                self._keep(tensor.storage, index)
            if saves_output:
                self._keep(output.storage, index)
            for size in extra_saved_bytes:
                extra = Storage(f"{name}.saved", size, category, index, kind)
                self._storages.append(extra)
                self._keep(extra, index)
        if gradients is None:
            gradients = [(tensor, tensor.num_bytes) for tensor in reads]
        self._operations.append(
            Operation(
                name,
                [output],
                [(tensor, size) for tensor, size in gradients if tensor.requires_grad],
                list(weight_gradients),
                forward_temporary_bytes,
                backward_temporary_bytes,
                gradients_in_place,
                [
                    *(tensor.num_bytes for tensor in saves),
                    *([output_bytes] if saves_output else []),
                    *extra_saved_bytes,
                    saved_parameter_bytes,
                ],
            )
        )
        return output

    def split(self, tensor: Tensor, sizes: Sequence[int], name: str = "split") -> list[Tensor]:
        """Views of `tensor` of the given bytes; their gradients are concatenated into a new one in backward."""
        index = len(self._operations)
        tensor.storage.last_read = max(tensor.storage.last_read, index)
        views = [Tensor(tensor.storage, size, tensor.requires_grad) for size in sizes]
        gradients: list[tuple[Tensor, int | None]] = [(tensor, tensor.num_bytes)] if tensor.requires_grad else []
        self._operations.append(Operation(name, views, gradients, [], 0, 0))
        return views

    def hold(self, tensor: Tensor) -> None:
        """A variable of the calling code keeps `tensor` alive until the operation appended last."""
        tensor.storage.last_read = max(tensor.storage.last_read, len(self._operations) - 1)

    def keep(self, tensor: Tensor) -> None:
        """Autograd keeps `tensor` until the backward of the operation that was appended last has run."""
        self._keep(tensor.storage, len(self._operations) - 1)

    def begin_loss(self) -> None:
        """The operations from here on are the loss."""
        self._loss_from = len(self._operations)

    @staticmethod
    def _keep(storage: Storage, index: int) -> None:
        storage.last_saver = index if storage.last_saver is None else min(storage.last_saver, index)

    # -- finishing ----------------------------------------------------------------------------------------------------

    def finish(self, output: Tensor | None = None, *, cached_matmuls: int = 0) -> Template:
        """The block's entries. `output` is handed to the next block and its gradient comes from there. `cached_matmuls`:
        selective checkpointing keeps the results of attention and of one in so many matrix products (0: nothing)."""
        num_forward = len(self._operations)
        backward = [index for index in reversed(range(num_forward)) if self._operations[index].has_backward]
        position = {operation: instant for instant, operation in enumerate(backward)}
        rows = _Rows()
        if output is not None:
            output.storage.last_read = num_forward - 1
        cached = self._cached(cached_matmuls) if cached_matmuls else set()
        savers = [index for index, operation in enumerate(self._operations) if any(operation.saved_bytes)]
        last_saver = max(savers, default=0)
        for storage in self._storages:
            if storage.last_saver is not None and storage.last_saver in position and not self._saves_on_cpu:
                dies = (position[storage.last_saver] + 1, True)
            else:
                dies = (storage.last_read + 1, False)
            if id(storage) in cached and storage.born >= last_saver:
                dies = (len(backward), True)  # a recomputation stops there and never asks for it
            born = (storage.born, False)
            rows.add(
                storage.name,
                storage.category,
                storage.num_bytes,
                born,
                dies,
                dies_without_graph=storage.last_read + 1,
                cached=id(storage) in cached,
            )
        for index, operation in enumerate(self._operations):
            if operation.forward_temporary_bytes:
                rows.add(
                    f"{operation.name}.temporary",
                    Category.TEMPORARIES,
                    operation.forward_temporary_bytes,
                    (index, False),
                    (index + 1, False),
                )
        self._run_backward(backward, output, rows)
        return self._template(rows, backward)

    def _cached(self, cached_matmuls: int) -> set[int]:
        matmuls, cached = 0, set()
        for storage in self._storages:
            if storage.kind == "matmul":
                matmuls += 1
            if storage.kind == "attention" or (storage.kind == "matmul" and (matmuls - 1) % cached_matmuls == 0):
                cached.add(id(storage))
        return cached

    def _run_backward(self, backward: list[int], output: Tensor | None, rows: _Rows) -> None:
        held: dict[int, _Gradient] = {}
        if output is not None and output.requires_grad:
            held[id(output)] = _Gradient(output.num_bytes, 0, holders=1)
        for instant, index in enumerate(backward):
            operation = self._operations[index]
            incoming = [held.pop(id(tensor)) for tensor in operation.outputs if id(tensor) in held]
            made: list[_Gradient] = []
            made_at = instant + operation.gradients_in_place
            for tensor, size in operation.gradients:
                if size is None and incoming:
                    gradient = incoming[0]
                else:
                    num_bytes = tensor.num_bytes if size is None else size
                    gradient = _Gradient(num_bytes, made_at, name=f"{operation.name}.gradient")
                    made.append(gradient)
                existing = held.get(id(tensor))
                if existing is None:
                    gradient.holders += 1
                    held[id(tensor)] = gradient
                elif existing.holders > 1:  # somebody else still needs the first one: the sum is a new tensor
                    existing.holders -= 1
                    total = _Gradient(tensor.num_bytes, instant, holders=1, name=f"{operation.name}.gradient")
                    made.append(total)
                    held[id(tensor)] = total
            for weight in operation.weight_gradients:
                rows.add(weight.name, Category.GRADIENTS, weight.num_bytes, (made_at, True), (instant + 1, True), True)
            if operation.backward_temporary_bytes:
                rows.add(
                    f"{operation.name}.temporary",
                    Category.TEMPORARIES,
                    operation.backward_temporary_bytes,
                    (instant, True),
                    (instant + 1, True),
                )
            if self._saves_on_cpu:
                for size in operation.saved_bytes:
                    name = f"{operation.name}.from_cpu"
                    rows.add(name, Category.TEMPORARIES, size, (instant, True), (instant + 1, True))
            for gradient in incoming:
                gradient.holders -= 1
            for gradient in {id(g): g for g in [*incoming, *made]}.values():
                if gradient.holders <= 0:
                    rows.add(
                        gradient.name,
                        gradient.category,
                        gradient.num_bytes,
                        (gradient.born, True),
                        (instant + 1, True),
                    )
        for gradient in {id(g): g for g in held.values()}.values():  # the input's gradient, handed on at the end
            rows.add(gradient.name, gradient.category, gradient.num_bytes, (gradient.born, True), (len(backward), True))

    def _template(self, rows: _Rows, backward: list[int]) -> Template:
        columns = list(zip(*rows.rows, strict=True)) if rows.rows else [()] * 10
        names, categories, sizes, born, born_b, dies, dies_b, weights, without_graph, cached = columns
        return Template(
            names=list(names),
            categories=np.array(categories, dtype=np.int8),
            num_bytes=np.array(sizes, dtype=np.int64),
            born=np.array(born, dtype=np.int64),
            dies=np.array(dies, dtype=np.int64),
            born_backward=np.array(born_b, dtype=bool),
            dies_backward=np.array(dies_b, dtype=bool),
            weight_gradient=np.array(weights, dtype=bool),
            dies_without_graph=np.array(without_graph, dtype=np.int64),
            cached=np.array(cached, dtype=bool),
            num_forward=len(self._operations),
            num_backward=len(backward),
            forward_labels=[operation.name for operation in self._operations],
            backward_labels=[self._operations[index].name for index in backward],
            input_bytes=self._input.num_bytes if self._input is not None else 0,
            keeps_input=self._input is not None and self._input.storage.last_saver is not None,
            saved_bytes=[size for index in backward for size in self._operations[index].saved_bytes if size],
            loss_from=len(self._operations) if self._loss_from is None else self._loss_from,
        )
