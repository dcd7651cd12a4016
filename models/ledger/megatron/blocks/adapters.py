"""LoRA on a Megatron-LM layer's projections: what the adapter of one projection allocates and saves.

An adapter is two products, from the projection's input to its rank and from there to the projection's output; the scaled
result is added to the output. The two libraries split them differently over tensor-parallel ranks, and gather at different
places under sequence parallelism.

Source: Megatron-Bridge 0.3 `peft/lora_layers.py` (`LoRALinear`), `peft/utils.py` (`ParallelLinearAdapter`), which NeMo 2
and verl use; mcore-bridge `tuners/lora.py` (`LoraParallelLinear`), which ms-swift uses.
"""

from __future__ import annotations

from typing import NamedTuple

from peakcast.core.units import BOOL
from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.megatron.blocks.gradients import matrix_gradients
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient


def adapts(context: MegatronContext, name: str) -> bool:
    """Whether the projection `name` ("linear_qkv", "shared_experts.linear_fc1") has an adapter."""
    return context.adapters is not None and name.rpartition(".")[2] in context.adapters.targets


def gathers_norm(context: MegatronContext, name: str) -> bool:
    """Whether a projection's adapter reads the normed input that was gathered over the tensor-parallel ranks
    (`return_layernorm_output_gathered`)."""
    return adapts(context, name) and context.groups.sequence_parallel and _is_bridge(context)


def add_to_columns(
    tape: Tape, x: Tensor, base: Tensor, context: MegatronContext, name: str, widths: tuple[int, int], *, gathered: bool
) -> Tensor:
    """`base` [rows, out] of a column-parallel projection with what its adapter makes of `x` [stream_rows, in], or of the
    `gathered` [rows, in]. `widths`: (in, out) of this rank."""
    if context.adapters is None or not adapts(context, name):
        return base
    rank, (inside, out), tensor = context.adapters.rank, widths, context.groups.tensor_parallel_size
    x = _dropped(tape, x, context, name)
    if not _is_bridge(context):  # the first matrix is whole on every rank, the second gathers its input for the product
        low = _product(tape, x, context, f"{name}.linear_in", context.stream_rows, inside, rank)
        return _added(tape, _product(tape, low, context, f"{name}.linear_out", context.rows, rank, out), base, name)
    if context.groups.sequence_parallel and not gathered:
        x = tape.operation(f"{name}.adapter.gather", [x], context.rows * inside * context.element_bytes)
    low = _product(tape, x, context, f"{name}.linear_in", context.rows, inside, -(-rank // tensor))
    if tensor > 1:
        whole = context.rows * rank * context.element_bytes
        low = tape.operation(f"{name}.adapter.gather_rank", [low], whole, forward_temporary_bytes=whole)
    return _added(tape, _product(tape, low, context, f"{name}.linear_out", context.rows, rank, out), base, name)


def add_to_rows(
    tape: Tape, x: Tensor, base: Tensor, context: MegatronContext, name: str, widths: tuple[int, int]
) -> Tensor:
    """`base` [stream_rows, out] of a row-parallel projection with what its adapter makes of `x` [rows, in]."""
    if context.adapters is None or not adapts(context, name):
        return base
    rank, (inside, out), tensor = context.adapters.rank, widths, context.groups.tensor_parallel_size
    x = _dropped(tape, x, context, name)
    if not _is_bridge(context):
        low = _product(tape, x, context, f"{name}.linear_in", context.stream_rows, inside, rank)
        return _added(tape, _product(tape, low, context, f"{name}.linear_out", context.stream_rows, rank, out), base, name)
    low = _product(tape, x, context, f"{name}.linear_in", context.rows, inside, rank)
    high = _product(tape, low, context, f"{name}.linear_out", context.rows, rank, -(-out // tensor))
    if tensor > 1:
        whole = context.rows * out * context.element_bytes
        high = tape.operation(f"{name}.adapter.gather", [high], whole, forward_temporary_bytes=whole)
    if context.groups.sequence_parallel:  # the rank's tokens are a view of all
        high = tape.operation(f"{name}.adapter.scatter", [high], Output(base.num_bytes, view_of=high))
    return _added(tape, high, base, name)


class TokenProjection(NamedTuple):
    """A projection of tokens that does not communicate, such as an expert's. `matrices`: how many it has, each of which is
    multiplied by an equal share of the rows."""

    name: str
    in_features: int
    out_features: int
    matrices: int = 1


def add_to_tokens(
    tape: Tape, x: Tensor, base: Tensor, context: MegatronContext, projection: TokenProjection, rows: int
) -> Tensor:
    """`base`, the projection's output of `x`, plus the output of its adapter. Several matrices have an adapter each in
    mcore-bridge and share one in Megatron-Bridge."""
    name, inside, out, own = projection
    if context.adapters is None or not adapts(context, name):
        return base
    rank, matrices = context.adapters.rank, 1 if _is_bridge(context) else own
    x = _dropped(tape, x, context, name)
    low = _product(tape, x, context, f"{name}.linear_in", rows, inside, rank, matrices)
    return _added(tape, _product(tape, low, context, f"{name}.linear_out", rows, rank, out, matrices), base, name)


def _is_bridge(context: MegatronContext) -> bool:
    return context.adapters is not None and context.adapters.library == "megatron_bridge"


def _dropped(tape: Tape, x: Tensor, context: MegatronContext, name: str) -> Tensor:
    """Dropout of an adapter's input: a new tensor, and the mask is saved."""
    if context.adapters is None or not context.adapters.dropout:
        return x
    mask = x.num_bytes // context.element_bytes * BOOL
    return tape.operation(f"{name}.adapter.dropout", [x], x.num_bytes, saves=Saved(extra_bytes=[mask]))


def _product(
    tape: Tape, x: Tensor, context: MegatronContext, name: str, rows: int, inside: int, out: int, count: int = 1
) -> Tensor:
    """[rows, in] to [rows, out] with a matrix that trains; saves its input. A fused gradient has no bytes."""
    gradients = matrix_gradients(context, name, inside * out) or [WeightGradient(f"{name}.weight.grad", 0)]
    return tape.operation(
        name,
        [x],
        rows * out * context.element_bytes,
        saves=[x],
        weight_gradients=gradients * count,
    )


def _added(tape: Tape, high: Tensor, base: Tensor, name: str) -> Tensor:
    """The scaled adapter's output added to the projection's."""
    scaled = tape.operation(f"{name}.adapter.scale", [high], base.num_bytes, gradients=[(high, high.num_bytes)])
    return tape.operation(f"{name}.adapter.add", [base, scaled], base.num_bytes, gradients=[(base, None), (scaled, None)])
