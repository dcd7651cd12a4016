"""The gradient of the token table: the embedding's alone, or summed with the lm_head's if both use one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peakcast.core.units import FP32, INT64
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Tape, Tensor, WeightGradient

NAME = "embed_tokens.weight.grad"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGradient:
    """What the backward of the lookup makes for the table."""

    weights: Sequence[WeightGradient] = ()
    """The table's gradient, if the lookup's is all of it."""
    added: Sequence[tuple[Tensor, int | None]] = ()
    """The operation that adds this gradient to another, and its bytes."""
    temporary_bytes: int = 0


def table_bytes(context: HFContext) -> int:
    """Bytes of the whole table, and of its gradient."""
    architecture = context.architecture
    return architecture.vocab_size * architecture.hidden_size * context.precision.end_weight_bytes


def tied_in_graph(context: HFContext) -> bool:
    """Whether embedding and lm_head share a table inside one compiled graph. Inductor fuses the lm_head's product and the
    sum with the embedding's gradient into one `addmm` (torch 2.13 `_inductor/fx_passes/post_grad.py` addmm). So it runs
    last, and the logits' gradient and the final norm's output live until then."""
    tied = context.trainable and context.architecture.tie_word_embeddings
    # else no product of its own makes the logits
    whole = context.loss.kind == "cross_entropy" and not context.kernels.fused_loss and context.kernels.loss != "tiles"
    return tied and whole and context.compiled.issuperset(("embedding", "loss"))


def table_gradient(tape: Tape, context: HFContext) -> TableGradient:
    """How the table gets its gradient. An operation that follows the lookup's backward is appended to `tape` here, before
    the lookup."""
    if not context.table_trains:
        return TableGradient()
    whole, kernel = table_bytes(context), 0
    if context.gpu:
        kernel = lookup_backward_bytes(context.rows, context.architecture.hidden_size, context.architecture.vocab_size)
    if tied_in_graph(context):  # backward ends with the lm_head's product, which adds the embedding's gradient
        product = tape.operation("lm_head.addmm", [], 0, weight_gradients=[WeightGradient(NAME, whole)])
        return TableGradient(added=[(product, whole)], temporary_bytes=kernel)
    if context.trainable and context.architecture.tie_word_embeddings:
        _add_to_gradient_of_head(tape, context)
    elif context.group.table_reduced:
        part = WeightGradient(NAME, _part_bytes(context))
        tape.operation("embed_tokens.rows", [], 0, weight_gradients=[part], backward_temporary_bytes=whole)
    else:
        return TableGradient(weights=[WeightGradient(NAME, whole)], temporary_bytes=kernel)
    return TableGradient(temporary_bytes=whole + kernel)


def _add_to_gradient_of_head(tape: Tape, context: HFContext) -> None:
    """The lm_head's gradient exists; it and this one (or this rank's part of it) are summed into a third."""
    whole = table_bytes(context)
    summed = 2 * whole if context.group.ranks == 1 else whole + 2 * _part_bytes(context)
    with tape.marked(Mark.TIED_TABLE):
        tape.operation("tied_weight", [], 0, gradients=[], backward_temporary_bytes=summed).requires_grad = True


def _part_bytes(context: HFContext) -> int:
    """Bytes of this rank's part of the table."""
    architecture = context.architecture
    part = context.group.part(architecture.vocab_size)
    return part * architecture.hidden_size * context.precision.end_weight_bytes


def lookup_backward_bytes(rows: int, width: int, vocabulary: int) -> int:
    """Bytes that an embedding's CUDA backward allocates for itself, above 3072 looked-up rows: fp32 partial sums and index
    arrays. Source: aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu (where-memory-goes F5)."""
    if rows <= 3072:
        return 0
    return FP32 * width * (rows // 10 + min(rows, vocabulary)) + 4 * INT64 * rows
