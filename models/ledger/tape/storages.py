"""When a block's storages are freed: after their last reader in forward or, if autograd saved them, in backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.operations import Operation, Storage, Tensor
from peakcast.models.ledger.tape.split_backward import waits_until
from peakcast.models.ledger.tape.template import BLOCK_INPUT, TEMPORARIES, Row, Waiting, backward_row


@dataclass(frozen=True, slots=True)
class TapedBlock:
    """A block as its tape recorded it, and the order of its backward."""

    operations: Sequence[Operation]
    storages: Sequence[Storage]
    savers: Mapping[int, Sequence[int]]
    """By `id` of a storage, the operations that save it."""
    order: Sequence[int]
    """The operations in the order in which their backward runs: the reverse of the order in which forward made them."""
    turns: Mapping[int, int]
    """If backward is split in two: by operation, the position of its weights in the second half. Else empty."""
    input: Tensor | None
    borrowed: Mapping[str, Tensor]
    """Tensors that other blocks own."""
    loss_from: int
    """The first operation of the loss."""
    marks: Mapping[Mark, Sequence[int]]
    """The operations that are marked."""
    saves_on_cpu: bool
    splits_backward: bool


@dataclass(frozen=True, slots=True)
class SelectiveCheckpoint:
    """What selective checkpointing keeps: the first of every `matmuls` matrix products (0: it is not used) and every
    operation of `kinds`."""

    matmuls: int = 0
    kinds: frozenset[str] = frozenset({"attention"})

    def kept(self, storages: Sequence[Storage]) -> set[int]:
        """Ids of the storages that it keeps."""
        if not self.matmuls:
            return set()
        products = [storage for storage in storages if storage.kind == "matmul"]
        return {id(one) for one in products[:: self.matmuls]} | {id(one) for one in storages if one.kind in self.kinds}


def num_recomputed(block: TapedBlock) -> int:
    """How many forward instants a recomputation runs, until the last saved tensor exists. Inputs are saved before an
    operation runs, its output and other tensors that it makes after it (torch tools/autograd/gen_variable_type.py)."""
    last = max((index for index in block.order if any(block.operations[index].saved_bytes)), default=-1)
    return last + (last >= 0 and block.operations[last].keeps_results)


def forward_temporaries(operations: Sequence[Operation]) -> list[Row]:
    """Rows of the tensors that live while one operation runs forward."""
    return [
        Row(f"{one.name}.temporary", TEMPORARIES, size, at, at + 1, dies_without_graph=at + 1, stream=stream, operation=at)
        for at, one in enumerate(operations)
        for size, stream in one.forward_temporaries
    ]


class StorageLives:
    """The lives of a block's storages. `rows`: of those that the block frees itself; `waiting`: of those that the second
    half of a split backward still needs; `released`: by operation, the bytes of saved tensors that its backward frees."""

    def __init__(self, block: TapedBlock, checkpoint: SelectiveCheckpoint, second_output: Tensor | None) -> None:
        self.rows: list[Row] = []
        self.waiting: list[Waiting] = []
        self.released: dict[int, int] = {}
        self._block, self._second_output = block, second_output
        self._ran = {operation: instant + 1 for instant, operation in enumerate(block.order)}
        """By operation, the instant after its backward."""
        self._cached = checkpoint.kept(block.storages)
        self._num_recomputed = num_recomputed(block)
        for storage in block.storages:
            if storage.num_bytes > 0:
                self._add(storage)

    def _add(self, storage: Storage) -> None:
        """Add the rows of one storage."""
        last, freed = storage.last_read, self._saved_until(storage)
        if storage.made_again is not None:
            last = min(last, storage.made_again)
            if freed is not None:
                again = self._ran[storage.made_again] - 1
                self._add_again(storage, again, freed)
                self._copy(storage, again)
                freed = None
        for copy in storage.on_host:
            self._add_again(storage, copy.back, copy.freed)
        if self._block.splits_backward and freed is not None:
            self._wait(storage, freed)
        else:
            self._free(storage, last + 1, freed)

    def _maker(self, storage: Storage) -> int:
        """`Row.operation` of a storage."""
        of_input = self._block.input is not None and storage is self._block.input.storage
        return BLOCK_INPUT if of_input else storage.born

    def _add_again(self, storage: Storage, born: int, dies: int, name: str = "") -> None:
        """Add a row for a tensor of backward that has the contents of a storage. `name`: the storage's, by default."""
        row = backward_row(name or storage.name, storage.num_bytes, born, dies, storage.stream, storage.category)
        row.operation = self._maker(storage)
        self.rows.append(row)

    def _copy(self, storage: Storage, again: int) -> None:
        """Add the second copy of an output that is recomputed at the backward instant `again`, and its gradient."""
        if storage.copied_until is None:
            return
        until, name = self._ran[storage.copied_until], storage.name
        self._add_again(storage, again, until, f"{name}.recomputed")
        since = self._ran[storage.born]
        if since < until:
            gradient = backward_row(f"{name}.gradient", storage.num_bytes, since, until, storage.stream)
            gradient.operation = self._maker(storage)
            self.rows.append(gradient)

    def _saved_until(self, storage: Storage) -> int | None:
        """The backward instant at which the last operation that saved it has run and autograd frees it (engine.cpp
        `release_variables`); None if autograd does not keep it on the GPU."""
        saver = storage.stays_for if storage.on_host else storage.last_saver
        if self._block.saves_on_cpu or saver is None:
            return None
        return self._ran.get(saver)

    def _wait(self, storage: Storage, freed: int) -> None:
        """The first half of a split backward retains the graph, so the storage waits for the second half."""
        until, on_top = waits_until(self._block.savers[id(storage)], self._block.turns)
        self.waiting.append(
            Waiting(
                *(storage.name, storage.category, storage.num_bytes, storage.born),
                born_backward=False,
                until=until,
                until_on_top=on_top,
                inputs_until=freed,
            )
        )

    def _free(self, storage: Storage, read_until: int, saved_until: int | None) -> None:
        """Add its row: it dies after its last reader or, if saved, in backward. These live to the end of backward:
        attributes of graph nodes, what a reentrant checkpoint's backward holds, and results that selective checkpointing
        keeps for an operation that the recomputation does not reach."""
        num_bytes, cached = storage.num_bytes, id(storage) in self._cached
        in_backward = saved_until is not None
        dropped = 0 if self._block.saves_on_cpu else storage.dropped_after + 1
        dies = max(read_until, dropped) if saved_until is None else saved_until
        not_read_again = cached and storage.born >= self._num_recomputed
        is_second_output = self._second_output is not None and storage is self._second_output.storage
        if not_read_again or storage.of_graph or is_second_output:
            in_backward, dies = True, len(self._block.order)
        if dies == saved_until and storage.last_saver is not None:
            self.released[storage.last_saver] = self.released.get(storage.last_saver, 0) + num_bytes
        self.rows.append(
            Row(
                *(storage.name, storage.category, num_bytes, storage.born, dies),
                dies_backward=in_backward,
                dies_without_graph=read_until,
                cached=cached,
                stream=storage.stream,
                allocated=self._maker(storage) != BLOCK_INPUT,
                operation=self._maker(storage),
            )
        )
