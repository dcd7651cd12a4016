"""The operations of which Megatron-LM layers consist: parallel projections, norms, bias-dropout-add.

Sources: megatron-core 0.13.1 `tensor_parallel/layers.py`, `fusions/`; Transformer Engine 2.8 `pytorch/module/`. A weight
gradient is a new tensor in the parameters' dtype that is added to the persistent main gradient at once, except under
gradient-accumulation fusion, where the product is written directly into the main gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from peakcast.core.units import BOOL, FP8, FP32
from peakcast.models.ledger.megatron.blocks.adapters import adapts, add_to_columns, add_to_rows, gathers_norm
from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.megatron.blocks.gradients import (
    fused_weight_gradient_bytes,
    norm_gradients,
    trained,
    weight_gradients,
)
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Saved, Tape, Tensor, WeightGradient


def norm_statistics(context: MegatronContext, rows: int) -> list[int]:
    """Bytes of the fp32 mean and reciprocal deviation of each row (RMSNorm saves only the latter)."""
    return [rows * FP32] if context.normalization == "rmsnorm" else [rows * FP32, rows * FP32]


def norm(
    tape: Tape, x: Tensor, context: MegatronContext, rows: int, width: int, name: str, *, copied_bytes: int = 0
) -> Tensor:
    """LayerNorm or RMSNorm: saves its input and the statistics. `copied_bytes`: of a copy of the input that the kernel
    reads, in both directions."""
    return tape.operation(
        name,
        [x],
        rows * width * context.element_bytes,
        saves=Saved([x], extra_bytes=norm_statistics(context, rows)),
        weight_gradients=norm_gradients(context, name, width),
        forward_temporary_bytes=copied_bytes,
        backward_temporary_bytes=copied_bytes,
    )


def own_norm(tape: Tape, x: Tensor, context: MegatronContext, name: str) -> Tensor:
    """The norm before a projection if it is a module of its own; `x` itself if the projection contains it."""
    return x if context.transformer_engine else norm(tape, x, context, context.stream_rows, context.hidden, name)


def column_linear_of_norm(
    tape: Tape, x: Tensor, context: MegatronContext, out_features: int, name: str, bias: bool
) -> Tensor:
    """The projection of the output of `own_norm`: [stream_rows, hidden] in, [rows, out_features] out."""
    return (norm_column_linear if context.transformer_engine else column_linear)(tape, x, context, out_features, name, bias)


def norm_column_linear(
    tape: Tape,
    x: Tensor,
    context: MegatronContext,
    out_features: int,
    name: str,
    bias: bool,
    *,
    in_features: int | None = None,
) -> Tensor:
    """Norm and column-parallel projection: [stream_rows, in_features (hidden)] in, [rows, out_features] out.

    Transformer Engine's LayerNormLinear saves the input, the norm's output (not gathered) and the statistics; the local
    implementation saves the same in two modules. Under sequence parallelism the norm's output is gathered for the product
    and again in backward (Transformer Engine: into a temporary each time, which in FP8 has both layouts until the gradient
    is reduce-scattered; local: into the global memory buffer).
    """
    width = context.hidden if in_features is None else in_features
    output = context.rows * out_features * context.element_bytes
    if not context.transformer_engine or context.frozen:  # a frozen projection does not save the norm's output
        normalized = norm(tape, x, context, context.stream_rows, width, f"{name}.norm")
        return column_linear(
            tape, normalized, context, out_features, name, bias, in_features=in_features, of_norm=context.transformer_engine
        )
    normed = _normed_in_fp8(context, width, output) if context.fp8_recipe else _normed(context, width)
    return tape.operation(
        name,
        [x],
        output,
        saves=Saved([x], extra_bytes=[normed.saved, *norm_statistics(context, context.stream_rows)]),
        weight_gradients=[
            *weight_gradients(context, name, out_features * width, out_features if bias else 0),
            *norm_gradients(context, f"{name}.norm", width),
        ],
        forward_temporary_bytes=normed.forward,
        backward_temporary_bytes=normed.backward,
    )


class _NormedBytes(NamedTuple):
    """Bytes of a norm's output in the projection that includes the norm."""

    saved: int
    """What autograd saves of it."""
    forward: int
    """Its temporaries in forward."""
    backward: int


def _normed(context: MegatronContext, width: int) -> _NormedBytes:
    """Of a norm's output in the dtype of all activations."""
    token = width * context.element_bytes
    gathered = context.rows * token if context.groups.sequence_parallel else 0
    # the norm's output is freed before the norm's own backward (`clear_tensor_data`)
    return _NormedBytes(context.stream_rows * token, gathered, 2 * gathered)


def _normed_in_fp8(context: MegatronContext, width: int, output_bytes: int) -> _NormedBytes:
    """Of a norm's output that is quantised to FP8. In backward so is the gradient of the projection's output, which has
    `output_bytes`."""
    token = width * context.element_bytes
    backward = context.rows * token + quantized_gradient_bytes(context, output_bytes)
    layouts = quantized_bytes(context, context.rows * width)
    if context.groups.sequence_parallel:  # columns of blocks are gathered and then rearranged, without their scales
        columns = context.rows * width * FP8 if context.fp8_recipe == "blockwise" else 0
        backward += layouts + (columns or layouts)
    else:  # the norm's output is freed before the norm's own backward
        backward -= layouts
    narrow = quantized_bytes(context, context.stream_rows * width)
    # its other layout, and the whole norm's output if the kernel does not quantise it directly
    forward = narrow + (context.stream_rows * token if context.fp8_recipe != "delayed" else 0)
    if context.groups.sequence_parallel:
        forward += context.rows * width
    return _NormedBytes(0 if context.runs.without_graph else narrow, forward, backward)


def quantized_bytes(context: MegatronContext, elements: int) -> int:
    """Bytes of an FP8 tensor in one layout with the scales of its blocks: fp32 per 128 elements (blockwise), a byte per 32
    (mxfp8). Source: Transformer Engine 2.8 `pytorch/tensor/float8_blockwise_tensor.py`, `mxfp8_tensor.py`."""
    scales = {"blockwise": elements * FP32 // 128, "mxfp8": elements // 32}
    return elements * FP8 + scales.get(context.fp8_recipe, 0)


def saved_input(context: MegatronContext, x: Tensor, elements: int) -> tuple[list[Tensor], list[int]]:
    """What a projection of Transformer Engine saves of its input `x`, which has `elements`: ([`x` itself], []), or in FP8
    ([], [bytes of a copy in the layout for the weight's gradient]), a copy that it does not make without a graph. A
    projection with a frozen weight saves nothing."""
    if context.frozen:
        return [], []
    if not context.fp8_recipe:
        return [x], []
    return [], [] if context.runs.without_graph else [quantized_bytes(context, elements)]


def other_layout_bytes(context: MegatronContext, elements: int) -> int:
    """Bytes of an input in FP8, in the layout for the forward product; 0 without FP8."""
    return quantized_bytes(context, elements) if context.fp8_recipe else 0


def quantized_gradient_bytes(context: MegatronContext, num_bytes: int) -> int:
    """Bytes of a gradient of `num_bytes` in FP8, by rows and by columns, for both products of a projection's backward; 0
    without FP8."""
    return 2 * quantized_bytes(context, num_bytes // context.element_bytes) if context.fp8_recipe else 0


def column_linear(
    tape: Tape,
    x: Tensor,
    context: MegatronContext,
    out_features: int,
    name: str,
    bias: bool,
    *,
    in_features: int | None = None,
    of_norm: bool = False,
) -> Tensor:
    """ColumnParallelLinear: saves its input (not gathered) if its weight trains. megatron-core's own, which the output
    layer always is, gathers it into the global memory buffer; Transformer Engine's into a new tensor each time. `of_norm`:
    its module contains the norm that made `x`."""
    own = not context.transformer_engine or name == "output_layer"
    width = context.hidden if in_features is None else in_features
    output = context.rows * out_features * context.element_bytes
    gradients = weight_gradients(context, name, out_features * width, out_features if bias else 0)
    gathered = context.rows * width * context.element_bytes if context.groups.sequence_parallel else 0
    if context.frozen:
        return _frozen_column_linear(tape, x, context, (width, out_features), name, of_norm=of_norm)
    if context.fp8_recipe and not own:
        return _column_linear_in_fp8(tape, x, context, output, name, width, gradients)
    return tape.operation(
        name,
        [x],
        output,
        saves=[x],
        weight_gradients=gradients,
        forward_temporary_bytes=output * bias if own else gathered,  # the product before `+ bias`
        backward_temporary_bytes=gathered * (1 if own else 2) + fused_weight_gradient_bytes(context, out_features * width),
    )


def _frozen_column_linear(
    tape: Tape, x: Tensor, context: MegatronContext, widths: tuple[int, int], name: str, *, of_norm: bool
) -> Tensor:
    """`column_linear` of a frozen weight, with its adapter if it has one: backward only needs the weight. Under sequence
    parallelism the input is gathered into a temporary, which Megatron-Bridge's adapter of a projection with a norm gets.
    A module that returns its norm's output to an adapter saves it too.

    Source: Transformer Engine 2.8 `pytorch/module/layernorm_linear.py` (`return_layernorm_output`), `linear.py`
    (`saved_inputmat`); megatron-core 0.17.1 `tensor_parallel/layers.py` (`linear_with_frozen_weight`).
    """
    width, out_features = widths
    whole = context.rows * width * context.element_bytes if context.groups.sequence_parallel else 0
    shared = of_norm and gathers_norm(context, name)
    saves = [x] if of_norm and adapts(context, name) else []
    if shared:
        x = tape.operation(f"{name}.gather", [x], whole)
    base = tape.operation(
        name,
        [x],
        context.rows * out_features * context.element_bytes,
        saves=saves,
        forward_temporary_bytes=0 if shared else whole,
        backward_temporary_bytes=0 if shared else whole,
    )
    return add_to_columns(tape, x, base, context, name, widths, gathered=shared)


def _column_linear_in_fp8(
    tape: Tape,
    x: Tensor,
    context: MegatronContext,
    output: int,
    name: str,
    width: int,
    gradients: Sequence[WeightGradient],
) -> Tensor:
    """`column_linear` in FP8: saves this rank's part of its input in FP8 and, under sequence parallelism, gathers it in
    FP8; the gathered input's gradient is reduce-scattered (as in `norm_column_linear`, without the norm). Unless scaling is
    delayed, a shared expert saves the input itself, which the router saves too (megatron-core 0.16.1
    `moe/shared_experts.py`)."""
    saves, saved_bytes = saved_input(context, x, context.stream_rows * width)
    backward = quantized_gradient_bytes(context, output)
    if name == "shared_experts.linear_fc1" and context.fp8_recipe != "delayed":
        layouts = 2 if context.fp8_recipe == "tensorwise" else 1
        saves, saved_bytes, backward = [x], [], backward + layouts * quantized_bytes(context, context.stream_rows * width)
    gathered = other_layout_bytes(context, context.stream_rows * width)
    if context.groups.sequence_parallel:
        layouts = quantized_bytes(context, context.rows * width)
        columns = context.rows * width * FP8 if context.fp8_recipe == "blockwise" else 0
        backward += layouts + (columns or layouts) + context.rows * width * context.element_bytes
        gathered += context.rows * width * FP8
    return tape.operation(
        name,
        [x],
        output,
        saves=Saved(saves, extra_bytes=saved_bytes),
        weight_gradients=gradients,
        forward_temporary_bytes=gathered,
        backward_temporary_bytes=backward,
    )


def row_linear(tape: Tape, x: Tensor, context: MegatronContext, in_features: int, name: str) -> Tensor:
    """Row-parallel projection: [rows, in_features] in, [stream_rows, hidden] out; the caller adds its bias.

    Saves its input if its weight trains. Under sequence parallelism the product is made whole and reduce-scattered, and its
    gradient is gathered in backward.
    """
    full = context.gathered_bytes if context.groups.sequence_parallel else 0
    placeholder = fused_weight_gradient_bytes(context, in_features * context.hidden)
    if context.fp8_recipe:
        return _row_linear_in_fp8(tape, x, context, in_features, name, full)
    base = tape.operation(
        name,
        [x],
        context.stream_bytes,
        saves=[] if context.frozen else [x],
        weight_gradients=weight_gradients(context, name, in_features * context.hidden, 0),
        forward_temporary_bytes=full,
        backward_temporary_bytes=full + placeholder,
    )
    return add_to_rows(tape, x, base, context, name, (in_features, context.hidden))


def _row_linear_in_fp8(tape: Tape, x: Tensor, context: MegatronContext, in_features: int, name: str, full: int) -> Tensor:
    """`row_linear` in FP8: saves its input in FP8. Unless scaling is delayed, attention's output projection saves the input
    itself, which attention saves too (megatron-core 0.16.1 `attention.py`, `set_save_original_input`); with one scale for
    the whole tensor, backward quantises it in both layouts. Under sequence parallelism the gradient is gathered in FP8
    (Transformer Engine 2.8 `pytorch/module/base.py`, `grad_output_preprocess`)."""
    narrow = quantized_bytes(context, context.rows * in_features)
    original = name == "linear_proj" and context.fp8_recipe != "delayed"
    again = narrow * (2 if context.fp8_recipe == "tensorwise" else 1) if original else 0
    return tape.operation(
        name,
        [x],
        context.stream_bytes,
        saves=Saved([x] if original else [], extra_bytes=[] if original or context.runs.without_graph else [narrow]),
        weight_gradients=weight_gradients(context, name, in_features * context.hidden, 0),
        forward_temporary_bytes=full + narrow,
        backward_temporary_bytes=quantized_gradient_bytes(context, context.gathered_bytes) + again,
    )


def dropout_mask_bytes(context: MegatronContext) -> int:
    """Bytes of the dropout mask of a layer's output: a bool per element."""
    return context.stream_rows * context.hidden * BOOL


def bias_dropout_add(tape: Tape, x: Tensor, residual: Tensor, context: MegatronContext, name: str) -> Tensor:
    """residual + dropout(x + bias). Fused (compiled): saves only the 1-byte mask; without a graph, even that stays inside
    the kernel (but a bias, as a parameter, gives it a graph: `transformer_layer.py` adds residuals under `enable_grad`).
    Unfused: the same and two temporaries."""
    drops = context.hidden_dropout > 0
    inside = context.runs.without_graph and context.bias_dropout_fusion and not context.linear_bias
    bias = [WeightGradient(f"{name}.bias.grad", context.hidden * context.element_bytes)] if context.linear_bias else []
    unfused = 0 if context.bias_dropout_fusion else context.stream_bytes * (int(context.linear_bias) + int(drops))
    with tape.marked(Mark.RESIDUAL_ADD):
        return tape.operation(
            name,
            [x, residual],
            context.stream_bytes,
            saves=Saved(extra_bytes=[dropout_mask_bytes(context)] if drops and not inside else []),
            gradients=[(x, context.stream_bytes if drops else None), (residual, None)],
            weight_gradients=trained(context, *bias),
            forward_temporary_bytes=unfused,
        )


def gated_activation(tape: Tape, gate: Tensor, up: Tensor, context: MegatronContext, names: tuple[str, str]) -> Tensor:
    """act(gate) · up without a fused kernel: saves all three factors; an offset (of 0) is first added to up."""
    activated = tape.operation(names[0], [gate], gate.num_bytes, saves=[gate])
    if context.feed_forward.glu_adds_offset:
        up = tape.operation(f"{names[1]}.offset", [up], up.num_bytes, gradients=[(up, None)])
    product = tape.operation(names[1], [activated, up], gate.num_bytes, saves=[activated, up])
    tape.hold(gate)  # both are parts of the argument of `glu`, which refers to it
    return product
