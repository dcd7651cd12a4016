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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from peakcast.catalog.kernel_workspaces import column_sum
from peakcast.models.ledger.tape.autograd import Backward
from peakcast.models.ledger.tape.block_template import block_template, second_half
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.offloading import NO_OFFLOAD, OffloadPlan
from peakcast.models.ledger.tape.operations import (
    SIDE_STREAM,
    InputGradient,
    Operation,
    Output,
    Saved,
    Storage,
    Tensor,
    WeightGradient,
    temporaries,
)
from peakcast.models.ledger.tape.split_backward import weight_turns
from peakcast.models.ledger.tape.storages import SelectiveCheckpoint, StorageLives, TapedBlock, forward_temporaries
from peakcast.models.ledger.tape.template import BorrowedUse, Template
from peakcast.timelines.timeline import Category

__all__ = ["Output", "Saved", "Tape", "Tensor", "WeightGradient"]


class Tape:
    """Records the operations of one block; `finish` turns them into a `Template`.

    `saves_on_cpu`: saved tensors are copied to the host and back for their operation's backward
    (`torch.autograd.graph.save_on_cpu`, which copies parameters too). `splits_backward`: the weights' gradients come after
    the inputs' (`split_backward.py`), and hooks keep what they need. `gpu`: (multiprocessors, threads of each), or None to
    leave out what kernels allocate for themselves. `offload`: saved tensors that go to the host group by group.
    `modules`: by name of an operation, the module whose parameters it uses, where that has another name.
    """

    def __init__(
        self,
        *,
        saves_on_cpu: bool = False,
        splits_backward: bool = False,
        gpu: tuple[int, int] | None = None,
        offload: OffloadPlan = NO_OFFLOAD,
        modules: Mapping[str, str] | None = None,
    ) -> None:
        self._gpu, self._offload, self._modules = gpu, offload, modules or {}
        self._saves_on_cpu, self._splits_backward = saves_on_cpu, splits_backward
        self._savers: dict[int, list[int]] = {}
        self._operations, self._storages = list[Operation](), list[Storage]()
        self._input: Tensor | None = None
        self._borrowed: dict[str, Tensor] = {}
        self._loss_from: int | None = None
        self._marks: dict[Mark, list[int]] = {}

    def summed(self, name: str, columns: int, rows: int, num_bytes: int) -> WeightGradient:
        """The gradient of a vector of `columns` elements, summed over `rows`; with a `gpu`, its kernel's workspaces too."""
        workspaces: tuple[int, ...] = ()
        if self._gpu is not None and (taken := column_sum(columns, rows, *self._gpu)):
            workspaces = taken.buffer_bytes, taken.semaphore_bytes
        return WeightGradient(name, num_bytes, workspaces)

    def input(
        self, num_bytes: int, *, requires_grad: bool = True, owned: bool = True, name: str = "hidden_states"
    ) -> Tensor:
        """The block's input, which the block before made and this one owns. If not `owned`, something else keeps it alive
        for at least as long, and this block does not count its bytes."""
        storage = Storage(name, num_bytes if owned else 0, Category.ACTIVATIONS, 0)
        self._storages.append(storage)
        self._input = Tensor(storage, num_bytes, requires_grad)
        return self._input

    def borrowed(self, num_bytes: int, name: str, *, requires_grad: bool = True) -> Tensor:
        """A borrowed tensor: another block owns it and several read it. Its gradients are added to the owner's at once.
        `Template.borrowed` says until when this block saves it and from when its gradient exists."""
        storage = Storage(name, 0, Category.ACTIVATIONS, 0)
        self._borrowed[name] = Tensor(storage, num_bytes, requires_grad)
        return self._borrowed[name]

    def operation(
        self,
        name: str,
        reads: Sequence[Tensor] = (),
        output: int | Output = 0,
        *,
        saves: Sequence[Tensor] | Saved = (),
        gradients: Sequence[InputGradient] | None = None,
        weight_gradients: Sequence[WeightGradient] = (),
        forward_temporary_bytes: int | Sequence[int] = 0,
        backward_temporary_bytes: int | Sequence[int] = 0,
    ) -> Tensor:
        """Append an operation and return its output.

        `reads`: its inputs. `output`: the bytes of a new activation, or an `Output`. `saves`: the inputs that autograd
        saves, or a `Saved` if it saves more than inputs. `gradients`: the inputs that get a gradient, with its bytes, or
        None if the incoming gradient is passed on; by default a new one for each input that requires one. Temporaries
        exist during the operation only.
        """
        made = Output(output) if isinstance(output, int) else output
        saved, side = saves if isinstance(saves, Saved) else Saved(saves), made.side
        result = self._result(name, reads, made, saved, has_weights=bool(weight_gradients))
        if gradients is None:
            gradients = [(x, x.num_bytes) for x in reads]
        self._operations.append(
            Operation(
                name,
                [result],
                [pair for pair in gradients if pair[0].requires_grad],
                self._named(weight_gradients) if weight_gradients else (),
                temporaries(forward_temporary_bytes, side.forward_temporaries),
                temporaries(backward_temporary_bytes, side.backward_temporaries),
                gradients_in_place=saved.become_gradients,
                saved_bytes=[*saved.sizes(made), *side.saved_bytes, saved.parameter_bytes],
                keeps_results=saved.results,
                gradients_stream=SIDE_STREAM * side.gradients,
            )
        )
        return result

    def _result(self, name: str, reads: Sequence[Tensor], made: Output, saved: Saved, *, has_weights: bool) -> Tensor:
        """The output of the next operation. If it requires a gradient, autograd saves what is `saved`."""
        index, needs_grad = len(self._operations), has_weights
        for tensor in reads:
            tensor.storage.last_read = index
            needs_grad = needs_grad or tensor.requires_grad
        if needs_grad:
            self._save(name, saved, made)
        result = Tensor(self._storage_of(name, made), made.num_bytes, needs_grad)
        if needs_grad and saved.output:
            self._keep(result.storage, index)
        return result

    def _storage_of(self, name: str, made: Output) -> Storage:
        """The storage of the next operation's output: a new one, unless the output is a view."""
        if made.view_of is not None:
            return made.view_of.storage
        stream = SIDE_STREAM * made.side.result
        storage = Storage(made.name or name, made.num_bytes, made.category, len(self._operations), made.kind, stream)
        self._storages.append(storage)
        return storage

    def _named(self, weights: Sequence[WeightGradient]) -> Sequence[WeightGradient]:
        """`weights` with the names of their parameters where the operation has another name than their module."""
        modules = [weight.of.rpartition(".")[0] for weight in weights]
        if self._modules.keys().isdisjoint(modules):
            return weights
        stored = [self._modules.get(module, module) for module in modules]
        names = (weight.of.removeprefix(module) for weight, module in zip(weights, modules, strict=True))
        return [
            replace(weight, parameter=module + name) for weight, module, name in zip(weights, stored, names, strict=True)
        ]

    def _save(self, name: str, saved: Saved, made: Output) -> None:
        """Record that the next operation saves inputs, and make the other tensors that it saves, on the computing stream
        and on the side stream."""
        index = len(self._operations)
        for tensor in saved.inputs:
            self._keep(tensor.storage, index)
        for stream, sizes in ((0, saved.extra_bytes), (SIDE_STREAM, made.side.saved_bytes)):
            for size in sizes:
                extra = Storage(f"{name}.saved", size, made.category, index, made.kind, stream)
                self._storages.append(extra)
                self._keep(extra, index)

    def function(
        self,
        name: str,
        made: Sequence[Tensor],
        reads: Sequence[Tensor],
        *,
        saves: Saved,
        weight_gradients: Sequence[WeightGradient] = (),
        backward_temporary_bytes: int = 0,
    ) -> list[Tensor]:
        """Append a `torch.autograd.Function` whose forward is the operations appended before, which build no graph. They
        read `reads` and make `made`. Returns its outputs, with the storages of `made`; its backward needs the gradients of
        all."""
        index = len(self._operations)
        for tensor in (*made, *reads):
            tensor.storage.last_read = max(tensor.storage.last_read, index)
        for tensor in saves.inputs:
            self._keep(tensor.storage, index)
        outputs = [Tensor(tensor.storage, tensor.num_bytes, requires_grad=True) for tensor in made]
        self._operations.append(
            Operation(
                name,
                outputs,
                [(x, x.num_bytes) for x in reads if x.requires_grad],
                weight_gradients,
                backward_temporaries=temporaries(backward_temporary_bytes),
                gradients_in_place=saves.become_gradients,
                saved_bytes=[tensor.num_bytes for tensor in saves.inputs],
                keeps_results=saves.results,
            )
        )
        return outputs

    def split(self, tensor: Tensor, sizes: Sequence[int], name: str = "split") -> list[Tensor]:
        """Views of `tensor` with the given sizes in bytes. In backward their gradients are concatenated into a new
        tensor."""
        index = len(self._operations)
        tensor.storage.last_read = index
        views = [Tensor(tensor.storage, size, tensor.requires_grad) for size in sizes]
        gradients: list[InputGradient] = [(tensor, tensor.num_bytes)] if tensor.requires_grad else []
        self._operations.append(Operation(name, views, gradients))
        return views

    def hold(self, tensor: Tensor) -> None:
        """A variable of the calling code keeps `tensor` alive until the last appended operation has run."""
        tensor.storage.last_read = max(tensor.storage.last_read, len(self._operations) - 1)

    def keep(self, tensor: Tensor) -> None:
        """Autograd saves `tensor` for the backward of the last appended operation."""
        self._keep(tensor.storage, len(self._operations) - 1)

    def keep_as_leaf(self, tensor: Tensor) -> None:
        """Like `keep`, for a tensor that is a leaf of a graph of its own: its AccumulateGrad node keeps the tensor on the
        GPU even if it is offloaded (torch `csrc/autograd/saved_variable.cpp` save_metadata)."""
        self.keep(tensor)
        tensor.storage.leaf_for = len(self._operations) - 1

    @property
    def num_tensors(self) -> int:
        """How many tensors have been made so far; marks a position on the tape for `make_again`."""
        return len(self._storages)

    def make_again(self, begin: int, end: int, *outputs: Tensor) -> None:
        """Free the tensors made while `num_tensors` went from `begin` to `end`, and recompute them in the backward of the
        last appended operation (megatron-core's `CheckpointWithoutOutput`), without the recomputation's temporaries. What
        is recomputed of the `outputs` is copied to where their readers saved them; until the part's own backward has ended
        there are both, and then their gradients (0.16.1 `tensor_parallel/random.py`: `ctx.outputs` and the arguments of
        `CheckpointWithoutOutputFunction.backward`)."""
        made = self._storages[begin:end]
        for storage in made:
            storage.made_again = len(self._operations) - 1
        for output in outputs:
            output.storage.copied_until = made[0].born

    def keep_until_dropped(self, tensor: Tensor) -> None:
        """A graph that is dropped when the last appended operation has run, without a backward, keeps `tensor`; where no
        graph is built, nothing does."""
        tensor.storage.dropped_after = len(self._operations) - 1

    def keep_with_graph(self, tensor: Tensor) -> None:
        """A node of the graph has `tensor` as an attribute: it is freed with the graph."""
        tensor.storage.of_graph = True

    @contextmanager
    def marked(self, mark: Mark) -> Iterator[None]:
        """Operations appended in this context are what `mark` says."""
        begin = len(self._operations)
        yield
        self._marks.setdefault(mark, []).extend(range(begin, len(self._operations)))

    def mark_made(self, mark: Mark, tensor: Tensor) -> None:
        """The operation that made `tensor` is what `mark` says."""
        self._marks.setdefault(mark, []).append(tensor.storage.born)

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
        second_output: Tensor | None = None,
    ) -> Template:
        """The block's `Template`. `output` goes to the next block, which returns its gradient. `cached_matmuls`: n if
        selective checkpointing keeps the first of every n matrix products (0: it is not used) and every operation of
        `cached_kinds`. `second_output`: a second tensor that the block returns to a reentrant checkpoint
        (`Template.second_output_bytes`)."""
        if output is not None:
            output.storage.last_read = len(self._operations) - 1
        block = self._block()
        reloads = self._offload.let_go(block)
        stored = StorageLives(block, SelectiveCheckpoint(cached_matmuls, cached_kinds), second_output)
        ran = Backward(block, output, second_output, released=stored.released)
        return block_template(
            block,
            [*forward_temporaries(block.operations), *stored.rows, *ran.rows],
            borrowed={name: _use_of(tensor, block, ran) for name, tensor in block.borrowed.items()},
            output_gradient_used_until=ran.output_gradient_used_until,
            second_output_bytes=0 if second_output is None else second_output.num_bytes,
            reloads=reloads,
            later=second_half(block, [*stored.waiting, *ran.waiting]) if block.splits_backward else None,
        )

    def _block(self) -> TapedBlock:
        """The recorded operations with their inputs and outputs, from which a template is made."""
        numbered = range(len(self._operations))
        return TapedBlock(
            operations=self._operations,
            storages=self._storages,
            savers=self._savers,
            order=[index for index in reversed(numbered) if self._operations[index].has_backward],
            turns=weight_turns(self._operations, self._marks.get(Mark.NORM, ())) if self._splits_backward else {},
            input=self._input,
            borrowed=self._borrowed,
            loss_from=len(self._operations) if self._loss_from is None else self._loss_from,
            marks=self._marks,
            saves_on_cpu=self._saves_on_cpu,
            splits_backward=self._splits_backward,
        )


def _use_of(tensor: Tensor, block: TapedBlock, ran: Backward) -> BorrowedUse:
    """How the block uses a tensor that another block owns."""
    saver = tensor.storage.last_saver
    kept_until = block.order.index(saver) + 1 if saver in block.order else None
    return BorrowedUse(kept_until, ran.gradient_from.get(id(tensor)))
