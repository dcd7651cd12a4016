"""What autograd makes while it runs the operations of a tape backward, by its own rules (`tape.py` has them)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from peakcast.models.analytical.operations import Operation, Tensor, WeightGradient
from peakcast.models.analytical.template import HANDED_IN, Waiting
from peakcast.timeline import Category

Row = tuple[str, int, int, int, bool, int, bool, bool, int, bool, int]
"""Name, category, bytes, born, whether in backward, dies, whether in backward, whether a parameter's gradient, dies
without a graph, whether selective checkpointing keeps it, stream."""
TEMPORARY, GRADIENT = int(Category.TEMPORARIES), int(Category.GRADIENTS)


def workspace_rows(weight: WeightGradient, instant: int) -> list[Row]:
    """What the kernel that sums a parameter's gradient takes for itself, at backward instant `instant`."""
    name, kind = f"{weight.name}.workspace", int(Category.WORKSPACES)
    after = instant + 1
    return [(name, kind, size, instant, True, after, True, False, after, False, 0) for size in weight.workspaces]


class _Gradient:
    """A gradient on its way: `holders` are the tensors that it is the gradient of and that have not run backward."""

    __slots__ = ("born", "holders", "name", "num_bytes", "stream")

    def __init__(self, num_bytes: int, born: int, name: str = HANDED_IN, holders: int = 0, stream: int = 0) -> None:
        self.num_bytes, self.born, self.name, self.holders, self.stream = num_bytes, born, name, holders, stream


class Backward:
    """One run of `operations` backward, in `order`. `rows`: everything that it makes.

    `shared`: tensors (by id) that another block owns; a gradient of one is added at once to one held there, and
    `gradient_from` says from which instant. `turns`: of operations whose weights' gradients come later, their turns; what
    comes to them is `waiting`. `saves_on_cpu`: what was kept comes back from the host for each operation. `beside`: a
    second result, whose gradient comes from outside too and is held there. `released`: of operations, the bytes that were
    kept to their backward.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        order: Sequence[int],
        output: Tensor | None,
        beside: Tensor | None = None,
        *,
        shared: frozenset[int],
        turns: Mapping[int, int],
        saves_on_cpu: bool,
        released: Mapping[int, int],
    ) -> None:
        self.rows: list[Row] = []
        self.gradient_from: dict[int, int] = {}
        self.added_to_handed_in: int | None = None
        """As the template has it."""
        self._shared, self._turns, self._saves_on_cpu, self._released = shared, turns, saves_on_cpu, released
        self._held: dict[int, _Gradient] = {}
        self._hooked: dict[_Gradient, int] = {}
        if output is not None and output.requires_grad:
            self._held[id(output)] = _Gradient(output.num_bytes, 0, holders=1)
        if beside is not None:
            self._held[id(beside)] = _Gradient(beside.num_bytes, 0, f"{HANDED_IN}_beside", holders=2)
            self._live(f"{HANDED_IN}_beside", beside.num_bytes, 0, len(order))
        for instant, index in enumerate(order):
            self._run(operations[index], index, instant)
        for gradient in dict.fromkeys(self._held.values()):  # the input's gradient, handed on at the end
            if gradient not in self._hooked:
                self._live(gradient.name, gradient.num_bytes, gradient.born, len(order), gradient.stream)
        self.waiting = [
            Waiting(one.name, TEMPORARY, one.num_bytes, one.born, True, until, until) for one, until in self._hooked.items()
        ]

    def _live(self, name: str, num_bytes: int, born: int, dies: int, stream: int = 0) -> None:
        if num_bytes > 0:
            self.rows.append((name, TEMPORARY, num_bytes, born, True, dies, True, False, dies, False, stream))

    def _run(self, operation: Operation, index: int, instant: int) -> None:
        later, after = index in self._turns, instant + 1
        incoming = [self._held.pop(id(output)) for output in operation.outputs if id(output) in self._held]
        touched = incoming.copy()
        if later:
            for gradient in incoming:
                gradient.holders += gradient not in self._hooked
                self._hooked[gradient] = max(self._turns[index], self._hooked.get(gradient, 0))
        made_at = after if operation.gradients_in_place else instant
        largest_sum = 0
        for tensor, size in operation.gradients:
            if size is None and incoming:
                gradient = incoming[0]
            else:
                num_bytes = tensor.num_bytes if size is None else size
                gradient = _Gradient(
                    num_bytes, made_at, f"{operation.name}.gradient", stream=operation.gradients_stream
                )
                touched.append(gradient)
            largest_sum = max(largest_sum, self._hold(tensor, gradient, f"{operation.name}.gradient", instant))
        if not later:
            self._weights_backward(operation, instant, made_at)
        if self._saves_on_cpu:
            for size in operation.saved_bytes:
                self._live(f"{operation.name}.from_cpu", size, instant, after)
        for gradient in incoming:
            gradient.holders -= 1
        if largest_sum:  # made when what came in and what was kept has gone (engine.cpp evaluate_function)
            gone = self._released.get(index, 0) + sum(one.num_bytes for one in set(incoming) if one.holders <= 0)
            self._live(f"{operation.name}.gradient", largest_sum - gone, instant, after)
        self._release(touched if len(incoming) < 2 else dict.fromkeys(touched), after)

    def _release(self, gradients: Iterable[_Gradient], after: int) -> None:
        """Those that nobody holds any more are gone at the instant `after`."""
        for gradient in gradients:
            if gradient.holders <= 0:
                if gradient.name == HANDED_IN and self.added_to_handed_in is None:
                    self.added_to_handed_in = after
                self._live(gradient.name, gradient.num_bytes, gradient.born, after, gradient.stream)

    def _hold(self, tensor: Tensor, gradient: _Gradient, name: str, instant: int) -> int:
        """`gradient` of `tensor` waits for the operation that made `tensor`, or is added to the one that waits; bytes of
        the sum where that is a new tensor, else 0."""
        key, after = id(tensor), instant + 1
        if key in self._shared:
            self.gradient_from.setdefault(key, after)
            return 0
        existing = self._held.get(key)
        if existing is None:
            gradient.holders += 1
            self._held[key] = gradient
        elif existing.holders > 1:  # somebody else still needs the first one: the sum is a new tensor
            existing.holders -= 1
            self._held[key] = _Gradient(tensor.num_bytes, after, name, 1)
            return tensor.num_bytes
        elif existing.name == HANDED_IN and self.added_to_handed_in is None:
            self.added_to_handed_in = instant
        return 0

    def _weights_backward(self, operation: Operation, instant: int, made_at: int) -> None:
        """The gradients of an operation's weights, and what its backward needs meanwhile."""
        after = instant + 1
        for weight in operation.weight_gradients:
            if weight.num_bytes > 0:
                row = (weight.name, GRADIENT, weight.num_bytes, made_at, True, after, True, True, after, False, 0)
                self.rows.append(row)
                self.rows += workspace_rows(weight, instant)
        for size, stream in operation.backward_temporaries:
            self._live(f"{operation.name}.temporary", size, instant, after, stream)
