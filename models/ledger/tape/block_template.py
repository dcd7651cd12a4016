"""A block's rows as its template, with what layouts and checkpoints ask about the block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from peakcast.core.units import round_up
from peakcast.models.allocator.rounding import MIN_BLOCK_BYTES
from peakcast.models.ledger.tape.autograd import weights_backward
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.operations import Operation
from peakcast.models.ledger.tape.storages import TapedBlock, num_recomputed
from peakcast.models.ledger.tape.template import (
    OUTPUT_GRADIENT,
    BorrowedUse,
    Later,
    Reload,
    Row,
    Template,
    Waiting,
    column_fields,
)


def block_template(
    block: TapedBlock,
    rows: Sequence[Row],
    *,
    borrowed: Mapping[str, BorrowedUse],
    output_gradient_used_until: int | None,
    second_output_bytes: int = 0,
    reloads: tuple[Reload, ...] = (),
    later: Later | None = None,
) -> Template:
    """The template of `rows`. `output_gradient_used_until`: None if backward reads the output's gradient to its end."""
    backward = [block.operations[index] for index in block.order]
    return Template(
        **column_fields(rows),
        num_forward=len(block.operations),
        num_recomputed=num_recomputed(block),
        num_backward=len(backward),
        forward_labels=[operation.name for operation in block.operations],
        backward_labels=[operation.name for operation in backward],
        input_bytes=_input_bytes(block),
        keeps_input=block.input is not None and block.input.storage.last_saver is not None,
        gradient_bytes_at_first_saved=_gradient_bytes_at_first_saved(block, rows),
        reads_saved_first=next((operation.name for operation in backward if any(operation.saved_bytes)), ""),
        saved_bytes=[size for operation in backward for size in operation.saved_bytes if size],
        graph_bytes=[storage.num_bytes for storage in block.storages if storage.of_graph],
        loss_from=block.loss_from,
        output_gradient_used_until=len(backward) if output_gradient_used_until is None else output_gradient_used_until,
        forward_marks={mark: sorted(marked) for mark, marked in block.marks.items()},
        backward_marks=_backward_marks(block),
        second_output_bytes=second_output_bytes,
        borrowed=dict(borrowed),
        reloads=reloads,
        later=later,
    )


def _input_bytes(block: TapedBlock) -> int:
    """Bytes of the block's input."""
    return 0 if block.input is None else block.input.num_bytes


def _backward_marks(block: TapedBlock) -> dict[Mark, list[int]]:
    """The backward instants of marked operations."""
    instants = {index: instant for instant, index in enumerate(block.order)} if block.marks else {}
    marks = (
        (mark, sorted(instants[index] for index in marked if index in instants)) for mark, marked in block.marks.items()
    )
    return {mark: found for mark, found in marks if found}


def _gradient_bytes_at_first_saved(block: TapedBlock, rows: Sequence[Row]) -> int:
    """Bytes of the block's own gradients that exist when backward first reads a saved tensor."""
    asks = next((instant for instant, index in enumerate(block.order) if any(block.operations[index].saved_bytes)), 0)
    own = (row for row in rows if row.born_backward and row.name != OUTPUT_GRADIENT)
    return sum(row.num_bytes for row in own if row.born < asks < row.dies)


def second_half(block: TapedBlock, waiting: Sequence[Waiting]) -> Later:
    """The second half of a split backward: for each operation with weights, a template of one instant that makes their
    gradients; and the tensors that live until then."""
    weights = tuple(_weights_template(block, block.operations[index]) for index in block.turns)
    return Later(weights, tuple(replace(one, num_bytes=round_up(one.num_bytes, MIN_BLOCK_BYTES)) for one in waiting))


def _weights_template(block: TapedBlock, operation: Operation) -> Template:
    """The template of an instant in which `operation` makes the gradients of its weights, and nothing else."""
    return Template(
        **column_fields(weights_backward(operation, 0, 0)),
        num_forward=0,
        num_recomputed=0,
        num_backward=1,
        forward_labels=[],
        backward_labels=[operation.name],
        input_bytes=_input_bytes(block),
        keeps_input=False,
        gradient_bytes_at_first_saved=0,
        reads_saved_first="",
        saved_bytes=[],
        loss_from=0,
        output_gradient_used_until=1,
    )
