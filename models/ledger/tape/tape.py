"""A tape: the operations of one block, from which the lifetime of every tensor follows.

A block (a decoder layer, the loss, ...) is written once, as the operations that its framework runs in forward.
`Tape.finish` applies autograd's rules for freeing tensors and returns a `Template`: tensors whose lifetimes count from the
first instant of the block's forward or backward. `step.py` places the template each time the block runs.

Autograd's rules, as in torch 2.x (torch/csrc/autograd/engine.cpp):
- a tensor is freed after its last reader or, if saved, after the backward of the last operation that saved it;
- a node's incoming gradient and its saved tensors are freed after the node has run (`release_variables`);
- nodes run in reverse order of creation; a parameter's gradient is accumulated as soon as it is computed;
- a second gradient of the same tensor is added in place if nothing else refers to the first one (`InputBuffer::add`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from peakcast.catalog.kernel_workspaces import reduction
from peakcast.core.units import round_up
from peakcast.models.allocator.sizes import MIN_BLOCK_BYTES
from peakcast.models.ledger.tape.autograd import GRADIENT, TEMPORARY, Backward, Row, workspace_rows
from peakcast.models.ledger.tape.offloading import NO_OFFLOAD, Offload
from peakcast.models.ledger.tape.operations import (
    NO_SIDE_STREAM,
    SIDE_STREAM,
    Operation,
    SideStream,
    Storage,
    Tensor,
    WeightGradient,
    temporaries,
)
from peakcast.models.ledger.tape.split_backward import waits_until, weight_turns
from peakcast.models.ledger.tape.template import HANDED_IN, Elsewhere, Later, Template, Waiting
from peakcast.timelines.timeline import Category

__all__ = ["Tape", "Tensor", "WeightGradient"]


class Tape:
    """Records the operations of one block; `finish` turns them into a `Template`.

    `saves_on_cpu`: saved tensors are copied to the host and back for their operation's backward
    (`torch.autograd.graph.save_on_cpu`, which copies parameters too). `splits_backward`: the weights' gradients come after
    the inputs' (`split_backward.py`), and hooks keep what they need. `gpu`: (multiprocessors, threads of each), or None to
    leave out what kernels allocate for themselves. `offload`: saved tensors that go to the host group by group.
    """

    def __init__(
        self,
        *,
        saves_on_cpu: bool = False,
        splits_backward: bool = False,
        gpu: tuple[int, int] | None = None,
        offload: Offload = NO_OFFLOAD,
    ) -> None:
        self._gpu, self._offload = gpu, offload
        self._saves_on_cpu, self._splits_backward = saves_on_cpu, splits_backward
        self._savers: dict[int, list[int]] = {}
        self._operations, self._storages = list[Operation](), list[Storage]()
        self._input: Tensor | None = None
        self._elsewhere: dict[str, Tensor] = {}
        self._loss_from: int | None = None

    def summed(self, name: str, columns: int, rows: int, num_bytes: int) -> WeightGradient:
        """The gradient of a vector of `columns` elements, summed over `rows`; with a `gpu`, its kernel's workspaces too."""
        workspaces: tuple[int, ...] = ()
        if self._gpu is not None and (taken := reduction(columns, rows, *self._gpu, reduced_is_contiguous=False)):
            workspaces = taken.buffer_bytes, taken.semaphore_bytes
        return WeightGradient(name, num_bytes, workspaces)

    def input(
        self, num_bytes: int, *, requires_grad: bool = True, owned: bool = True, name: str = "hidden_states"
    ) -> Tensor:
        """The block's input, which the block before made and this one owns. If not `owned`, something else keeps it alive
        for at least as long, and it has no bytes here."""
        storage = Storage(name, num_bytes if owned else 0, Category.ACTIVATIONS, 0)
        self._storages.append(storage)
        self._input = Tensor(storage, num_bytes, requires_grad)
        return self._input

    def elsewhere(self, num_bytes: int, name: str, *, requires_grad: bool = True) -> Tensor:
        """A tensor that another block owns and several read. Its gradients are added to the owner's at once.
        `Template.elsewhere` says until when this block saves it and from when its gradient exists."""
        storage = Storage(name, 0, Category.ACTIVATIONS, 0)
        self._elsewhere[name] = Tensor(storage, num_bytes, requires_grad)
        return self._elsewhere[name]

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
        forward_temporary_bytes: int | Sequence[int] = 0,
        backward_temporary_bytes: int | Sequence[int] = 0,
        view_of: Tensor | None = None,
        category: Category = Category.ACTIVATIONS,
        output_name: str | None = None,
        kind: str = "",
        gradients_in_place: bool = False,
        saved_parameter_bytes: int = 0,
        is_function: bool = False,
        side: SideStream = NO_SIDE_STREAM,
    ) -> Tensor:
        """Append an operation and return its output.

        `reads`: its inputs. `saves`: those that autograd saves; `saves_output`: its output too; `extra_saved_bytes`:
        further tensors that it makes and saves (softmax statistics, dropout masks). `gradients`: (input, bytes of its
        gradient), by default for each input that requires one. `view_of`: the output shares this storage. Temporaries exist
        during the operation only. `kind`: "matmul" or one of `KINDS`, by which selective checkpointing decides.
        `is_function`: a `torch.autograd.Function`, which saves tensors after it has run. `side`: allocations on a second
        stream.
        """
        index = len(self._operations)
        needs_grad = bool(weight_gradients)
        for tensor in reads:
            tensor.storage.last_read = index
            needs_grad = needs_grad or tensor.requires_grad
        if needs_grad:
            for tensor in saves:
                self._keep(tensor.storage, index)
            for stream, sizes in ((0, extra_saved_bytes), (SIDE_STREAM, side.saved_bytes)):
                for size in sizes:
                    extra = Storage(f"{name}.saved", size, category, index, kind)
                    extra.stream = stream
                    self._storages.append(extra)
                    self._keep(extra, index)
        if view_of is not None:
            output = Tensor(view_of.storage, output_bytes, needs_grad)
        else:
            storage = Storage(output_name or name, output_bytes, category, index, kind)
            storage.stream = SIDE_STREAM * side.result
            self._storages.append(storage)
            output = Tensor(storage, output_bytes, needs_grad)
        if needs_grad and saves_output:
            self._keep(output.storage, index)
        if gradients is None:
            needed: list[tuple[Tensor, int | None]] = [(t, t.num_bytes) for t in reads if t.requires_grad]
        else:
            needed = [pair for pair in gradients if pair[0].requires_grad]
        saved_bytes = [tensor.num_bytes for tensor in saves]
        if saves_output:
            saved_bytes.append(output_bytes)
        saved_bytes += [*extra_saved_bytes, *side.saved_bytes]
        saved_bytes.append(saved_parameter_bytes)
        self._operations.append(
            Operation(
                name,
                [output],
                needed,
                weight_gradients,
                temporaries(forward_temporary_bytes, side.forward_temporaries),
                temporaries(backward_temporary_bytes, side.backward_temporaries),
                gradients_in_place,
                saved_bytes,
                is_function or saves_output or any(extra_saved_bytes),
                SIDE_STREAM * side.gradients,
            )
        )
        return output

    def function(
        self,
        name: str,
        made: Sequence[Tensor],
        reads: Sequence[Tensor],
        *,
        saves: Sequence[Tensor],
        weight_gradients: Sequence[WeightGradient] = (),
        backward_temporary_bytes: int = 0,
        gradients_in_place: bool = False,
    ) -> list[Tensor]:
        """Append a `torch.autograd.Function` whose forward is the operations appended before, which build no graph. They
        read `reads` and make `made`. Returns its outputs, with the storages of `made`; its backward needs the gradients of
        all."""
        index = len(self._operations)
        for tensor in (*made, *reads):
            tensor.storage.last_read = max(tensor.storage.last_read, index)
        for tensor in saves:
            self._keep(tensor.storage, index)
        outputs = [Tensor(tensor.storage, tensor.num_bytes, requires_grad=True) for tensor in made]
        gradients: list[tuple[Tensor, int | None]] = [(x, x.num_bytes) for x in reads if x.requires_grad]
        saved_bytes = [tensor.num_bytes for tensor in saves]
        self._operations.append(
            Operation(
                *(name, outputs, gradients, weight_gradients, (), temporaries(backward_temporary_bytes, ())),
                gradients_in_place=gradients_in_place,
                saved_bytes=saved_bytes,
                keeps_results=True,
            )
        )
        return outputs

    def split(self, tensor: Tensor, sizes: Sequence[int], name: str = "split") -> list[Tensor]:
        """Views of `tensor` with the given sizes in bytes. In backward their gradients are concatenated into a new
        tensor."""
        index = len(self._operations)
        tensor.storage.last_read = index
        views = [Tensor(tensor.storage, size, tensor.requires_grad) for size in sizes]
        gradients: list[tuple[Tensor, int | None]] = [(tensor, tensor.num_bytes)] if tensor.requires_grad else []
        self._operations.append(Operation(name, views, gradients, (), (), ()))
        return views

    def hold(self, tensor: Tensor) -> None:
        """A variable of the calling code keeps `tensor` alive until the last appended operation has run."""
        tensor.storage.last_read = max(tensor.storage.last_read, len(self._operations) - 1)

    def keep(self, tensor: Tensor) -> None:
        """Autograd saves `tensor` for the backward of the last appended operation."""
        self._keep(tensor.storage, len(self._operations) - 1)

    @property
    def num_tensors(self) -> int:
        """How many tensors have been made so far; marks a position on the tape for `make_again`."""
        return len(self._storages)

    def make_again(self, begin: int, end: int) -> None:
        """Free the tensors made while `num_tensors` went from `begin` to `end`, and recompute them in the backward of the
        last appended operation (megatron-core's `CheckpointWithoutOutput`), without the recomputation's temporaries."""
        for storage in self._storages[begin:end]:
            storage.made_again = len(self._operations) - 1

    def keep_with_graph(self, tensor: Tensor) -> None:
        """A node of the graph has `tensor` as an attribute: it is freed with the graph."""
        tensor.storage.of_graph = True

    def begin_loss(self) -> None:
        """Operations appended from here on belong to the loss."""
        self._loss_from = len(self._operations)

    def _keep(self, storage: Storage, index: int) -> None:
        """Note that operation `index` saves `storage`."""
        self._savers.setdefault(id(storage), []).append(index)
        storage.last_saver = index if storage.last_saver is None else min(storage.last_saver, index)

    def finish(
        self,
        output: Tensor | None = None,
        *,
        cached_matmuls: int = 0,
        cached_kinds: frozenset[str] = frozenset({"attention"}),
        beside: Tensor | None = None,
    ) -> Template:
        """The block's `Template`. `output` goes to the next block, which returns its gradient. `cached_matmuls`: n if
        selective checkpointing keeps the first of every n matrix products (0: it is not used) and every operation of
        `cached_kinds`. `beside`: a second tensor that the block returns to a reentrant checkpoint
        (`Template.beside_bytes`)."""
        num_forward = len(self._operations)
        self._offload.let_go(self._operations, self._storages, self._savers)
        backward = [index for index in reversed(range(num_forward)) if self._operations[index].has_backward]
        ends = {index: instant + 1 for instant, index in enumerate(backward)}
        rows: list[Row] = [
            (f"{one.name}.temporary", TEMPORARY, size, index, False, index + 1, False, False, index + 1, False, stream)
            for index, one in enumerate(self._operations)
            for size, stream in one.forward_temporaries
        ]
        waiting: list[Waiting] = []
        trained = {index: one.name for index, one in enumerate(self._operations) if one.weight_gradients}
        turns = weight_turns(trained) if self._splits_backward else {}
        if output is not None:
            output.storage.last_read = num_forward - 1
        cached = self._cached(cached_matmuls, cached_kinds) if cached_matmuls else set()
        savers = [index for index, operation in enumerate(self._operations) if any(operation.saved_bytes)]
        last_saver = max(savers, default=0)
        released: dict[int, int] = {}
        for storage in self._storages:
            if storage.num_bytes <= 0:
                continue
            saver = None if self._saves_on_cpu or storage.last_saver is None else ends.get(storage.last_saver)
            if storage.made_again is not None:
                storage.last_read = min(storage.last_read, storage.made_again)
                if saver is not None:
                    again = ends[storage.made_again] - 1
                    self._append_recomputed(rows, storage, again, saver)
                    saver = None
            last, kept = storage.last_read + 1, id(storage) in cached
            dies, in_backward = (last, False) if saver is None else (saver, True)
            if self._splits_backward and in_backward:
                until, on_top = waits_until(self._savers[id(storage)], turns)
                life = (storage.born, False, until, on_top, dies)
                waiting.append(Waiting(storage.name, storage.category, storage.num_bytes, *life))
                continue
            if kept and storage.born >= last_saver:
                dies, in_backward = len(backward), True  # the recomputation stops before it would read this
            if storage.of_graph or (beside is not None and storage is beside.storage):
                dies, in_backward = len(backward), True
            if in_backward and dies == saver and storage.last_saver is not None:
                released[storage.last_saver] = released.get(storage.last_saver, 0) + storage.num_bytes
            rows.append(
                (
                    *(storage.name, storage.category, storage.num_bytes),
                    *(storage.born, False, dies, in_backward, False, last, kept, storage.stream),
                )
            )
        shared = frozenset(map(id, self._elsewhere.values()))
        ran = Backward(
            *(self._operations, backward, output, beside),
            shared=shared,
            turns=turns,
            saves_on_cpu=self._saves_on_cpu,
            released=released,
        )
        rows += ran.rows
        waiting += ran.waiting
        elsewhere = {
            name: Elsewhere(ends.get(-1 if saver is None else saver), ran.gradient_from.get(id(tensor)))
            for name, tensor in self._elsewhere.items()
            for saver in (tensor.storage.last_saver,)
        }
        template = self._template(rows, backward, elsewhere, ran.added_to_handed_in)
        if beside is not None:
            template = replace(template, beside_bytes=beside.num_bytes)
        return replace(template, later=self._later(turns, waiting)) if self._splits_backward else template

    def _later(self, turns: dict[int, int], waiting: list[Waiting]) -> Later:
        """The second half of a split backward: a template for each weight's gradient, and the tensors that wait for it."""
        weights = []
        for index in turns:
            operation = self._operations[index]
            rows: list[Row] = [
                (weight.name, GRADIENT, weight.num_bytes, 0, True, 1, True, True, 1, False, 0)
                for weight in operation.weight_gradients
            ]
            rows += [row for weight in operation.weight_gradients for row in workspace_rows(weight, 0)]
            for size, stream in operation.backward_temporaries:
                rows.append((f"{operation.name}.temporary", TEMPORARY, size, 0, True, 1, True, False, 1, False, stream))
            made = self._template(rows, [index], {})
            weights.append(replace(made, num_forward=0, forward_labels=[], loss_from=0, saved_bytes=[]))
        rounded = [replace(one, num_bytes=round_up(one.num_bytes, MIN_BLOCK_BYTES)) for one in waiting]
        return Later(tuple(weights), tuple(rounded))

    @staticmethod
    def _append_recomputed(rows: list[Row], storage: Storage, born: int, dies: int) -> None:
        """Add the row of a tensor that `make_again` recomputes at backward instant `born`."""
        life = (born, True, dies, True, False, dies, False)
        rows.append((storage.name, storage.category, storage.num_bytes, *life, storage.stream))

    def _cached(self, cached_matmuls: int, kept: frozenset[str]) -> set[int]:
        """Ids of the storages that selective checkpointing keeps: the first of every n products, and the kinds `kept`."""
        matmuls, cached = 0, set()
        for storage in self._storages:
            if storage.kind == "matmul":
                matmuls += 1
            if storage.kind in kept or (storage.kind == "matmul" and (matmuls - 1) % cached_matmuls == 0):
                cached.add(id(storage))
        return cached

    def _recomputed(self, backward: list[int]) -> int:
        """How many forward instants a recomputation runs, until the last saved tensor exists. Inputs are saved before an
        operation runs; its output, and what it makes beside that, after (torch tools/autograd/gen_variable_type.py)."""
        last = max((i for i in backward if any(self._operations[i].saved_bytes)), default=-1)
        return last + (last >= 0 and self._operations[last].keeps_results)

    def _template(
        self, rows: list[Row], backward: list[int], elsewhere: dict[str, Elsewhere], added: int | None = None
    ) -> Template:
        """The rows as a template. `backward`: indices of operations, in the order in which their backward runs."""
        columns = list(zip(*rows, strict=True)) if rows else [()] * 11
        names, categories, sizes, born, born_b, dies, dies_b, weights, without_graph, cached, streams = columns
        instants = np.array((sizes, born, dies, without_graph), dtype=np.int64)
        flags = np.array((born_b, dies_b, weights, cached), dtype=bool)
        asks = next((i for i, index in enumerate(backward) if any(self._operations[index].saved_bytes)), 0)
        return Template(
            names=list(names),
            categories=np.array(categories, dtype=np.int8),
            num_bytes=-(-instants[0] // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES,
            born=instants[1],
            dies=instants[2],
            born_backward=flags[0],
            dies_backward=flags[1],
            weight_gradient=flags[2],
            dies_without_graph=instants[3],
            cached=flags[3],
            streams=np.array(streams, dtype=np.int64) if any(streams) else None,
            num_forward=len(self._operations),
            num_recomputed=self._recomputed(backward),
            num_backward=len(backward),
            forward_labels=[operation.name for operation in self._operations],
            backward_labels=[self._operations[index].name for index in backward],
            input_bytes=self._input.num_bytes if self._input is not None else 0,
            keeps_input=self._input is not None and self._input.storage.last_saver is not None,
            asks_late_bytes=sum(
                size
                for name, size, since, backwards, until in zip(names, sizes, born, born_b, dies, strict=True)
                if backwards and since < asks < until and name != HANDED_IN
            ),
            saved_bytes=[size for index in backward for size in self._operations[index].saved_bytes if size],
            loss_from=len(self._operations) if self._loss_from is None else self._loss_from,
            elsewhere=elsewhere,
            added_to_handed_in=len(backward) if added is None else added,
        )
