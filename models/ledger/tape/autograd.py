"""The tensors that autograd makes while it runs a tape's operations backward. The rules are listed in `tape.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.operations import Operation, Tensor
from peakcast.models.ledger.tape.storages import TapedBlock
from peakcast.models.ledger.tape.template import (
    GRADIENTS,
    NO_OPERATION,
    OUTPUT_GRADIENT,
    TEMPORARIES,
    Row,
    Waiting,
    backward_row,
)
from peakcast.timelines.timeline import Category

WORKSPACES = int(Category.WORKSPACES)


def weights_backward(operation: Operation, made_at: int, instant: int) -> list[Row]:
    """Rows of the gradients of an operation's weights, which exist from backward instant `made_at` on, and of what its
    backward at `instant` allocates for itself: the workspaces of the kernels that sum them, and temporaries."""
    after, rows = instant + 1, list[Row]()
    for weight in operation.weight_gradients:
        if weight.num_bytes > 0:
            gradient = backward_row(weight.name, weight.num_bytes, made_at, after, category=GRADIENTS, parameter=weight.of)
            gradient.allocated = made_at == instant
            rows.append(gradient)
            of_kernel = f"{weight.name}.workspace"
            rows += [backward_row(of_kernel, size, instant, after, category=WORKSPACES) for size in weight.workspaces]
    passing = f"{operation.name}.temporary"
    return rows + [backward_row(passing, size, instant, after, stream) for size, stream in operation.backward_temporaries]


class _Gradient:
    """A gradient that some operation has yet to read. `holders`: how many references to it exist, one for each tensor that
    it is the gradient of and whose operation has not yet run backward. `allocated`, `through_view`, `operation`: as in
    `Row`."""

    __slots__ = ("allocated", "born", "holders", "name", "num_bytes", "operation", "stream", "through_view")

    def __init__(self, num_bytes: int, born: int, name: str = OUTPUT_GRADIENT, holders: int = 0, stream: int = 0) -> None:
        self.num_bytes, self.born, self.name, self.holders, self.stream = num_bytes, born, name, holders, stream
        self.through_view, self.operation = False, NO_OPERATION
        self.allocated = name != OUTPUT_GRADIENT


class Backward:
    """One run of a block's operations backward; `rows` are the tensors that it makes.

    The gradient of a tensor that another block owns is added to that block's at once; `gradient_from` has the instant of
    the first addition. If backward is split, the gradients of weights are computed later, and `waiting` has what they still
    need. `output`: the tensor whose gradient comes from the next block. `second_output`: another such tensor, whose
    gradient lives until the block's backward ends. `released`: by operation, the bytes of saved tensors that its backward
    frees.
    """

    def __init__(
        self, block: TapedBlock, output: Tensor | None, second_output: Tensor | None = None, *, released: Mapping[int, int]
    ) -> None:
        self.rows: list[Row] = []
        self.gradient_from: dict[int, int] = {}
        self.output_gradient_used_until: int | None = None
        """As `Template.output_gradient_used_until`; None: this backward reads the gradient to its end."""
        self._turns, self._saves_on_cpu, self._released = block.turns, block.saves_on_cpu, released
        self._norms = frozenset(block.marks.get(Mark.NORM, ()))
        self._shared = frozenset(map(id, block.borrowed.values()))
        self._held: dict[int, _Gradient] = {}
        self._hooked: dict[_Gradient, int] = {}
        end = len(block.order)
        if output is not None and output.requires_grad:
            self._held[id(output)] = _Gradient(output.num_bytes, 0, holders=1)
        if second_output is not None:
            self._held[id(second_output)] = _Gradient(second_output.num_bytes, 0, f"{OUTPUT_GRADIENT}_beside", holders=2)
            self.rows.append(backward_row(f"{OUTPUT_GRADIENT}_beside", second_output.num_bytes, 0, end, allocated=False))
        for instant, index in enumerate(block.order):
            self._run(block.operations[index], index, instant)
        for gradient in dict.fromkeys(self._held.values()):  # the input's gradient, which goes to the block before
            if gradient not in self._hooked:
                self._free(gradient, end)
        self.waiting = [
            Waiting(one.name, TEMPORARIES, one.num_bytes, one.born, born_backward=True, until=until, until_on_top=until)
            for one, until in self._hooked.items()
        ]

    def _free(self, gradient: _Gradient, dies: int) -> None:
        """Free a gradient at the instant `dies`."""
        if gradient.num_bytes > 0:
            row = backward_row(gradient.name, gradient.num_bytes, gradient.born, dies, gradient.stream)
            row.through_view = gradient.through_view and dies == gradient.born + 1
            row.allocated, row.operation = gradient.allocated, gradient.operation
            self.rows.append(row)

    def _run(self, operation: Operation, index: int, instant: int) -> None:
        """Run one operation backward: use its incoming gradients, make those of its inputs and weights, free the rest."""
        later, after = index in self._turns, instant + 1
        incoming = [self._held.pop(id(output)) for output in operation.outputs if id(output) in self._held]
        touched = incoming.copy()
        if later:
            for gradient in incoming:
                gradient.holders += gradient not in self._hooked
                self._hooked[gradient] = max(self._turns[index], self._hooked.get(gradient, 0))
        made_at = after if operation.gradients_in_place else instant
        largest_sum, name, through_view = 0, f"{operation.name}.gradient", index not in self._norms
        for tensor, size in operation.gradients:
            if size is None and incoming:
                gradient = incoming[0]
            else:
                num_bytes = tensor.num_bytes if size is None else size
                gradient = _Gradient(num_bytes, made_at, name, stream=operation.gradients_stream)
                gradient.through_view, gradient.allocated, gradient.operation = through_view, made_at == instant, index
                touched.append(gradient)
            if summed := self._hold(tensor, gradient, instant):
                summed.name, summed.through_view, summed.allocated, summed.operation = name, through_view, False, index
                largest_sum = max(largest_sum, summed.num_bytes)
        self._add_own(operation, index, made_at, instant)
        for gradient in incoming:
            gradient.holders -= 1
        if largest_sum:  # made after incoming gradients and saved tensors are freed (engine.cpp evaluate_function)
            gone = self._released.get(index, 0) + sum(one.num_bytes for one in set(incoming) if one.holders <= 0)
            excess = _Gradient(largest_sum - gone, instant, name)
            excess.through_view, excess.operation = through_view, index
            self._free(excess, after)
        self._release(touched if len(incoming) < 2 else dict.fromkeys(touched), after)

    def _add_own(self, operation: Operation, index: int, made_at: int, instant: int) -> None:
        """Add what an operation's backward makes besides the gradients of its inputs."""
        rows = [] if index in self._turns else weights_backward(operation, made_at, instant)
        if self._saves_on_cpu:
            name, sizes = f"{operation.name}.from_cpu", (size for size in operation.saved_bytes if size > 0)
            rows += [backward_row(name, size, instant, instant + 1) for size in sizes]
        for row in rows:
            row.operation = index
        self.rows += rows

    def _release(self, gradients: Iterable[_Gradient], after: int) -> None:
        """Free the gradients with no holders at the instant `after`."""
        for gradient in gradients:
            if gradient.holders <= 0:
                if gradient.name == OUTPUT_GRADIENT and self.output_gradient_used_until is None:
                    self.output_gradient_used_until = after
                self._free(gradient, after)

    def _hold(self, tensor: Tensor, gradient: _Gradient, instant: int) -> _Gradient | None:
        """Keep `gradient` until the operation that made `tensor` runs backward, or add it to the gradient already kept.
        Returns the sum if that is a new tensor."""
        key, after = id(tensor), instant + 1
        if key in self._shared:
            self.gradient_from.setdefault(key, after)
            return None
        existing = self._held.get(key)
        if existing is None:
            gradient.holders += 1
            self._held[key] = gradient
        elif existing.holders > 1:  # another operation still reads the first one, so the sum is a new tensor
            existing.holders -= 1
            self._held[key] = summed = _Gradient(tensor.num_bytes, after, holders=1)
            return summed
        elif existing.name == OUTPUT_GRADIENT and self.output_gradient_used_until is None:
            self.output_gradient_used_until = instant
        return None
