"""Products with frozen quantised matrices, which are dequantised whole for each use.

Source: bitsandbytes 0.50.2 `nn/modules.py` (Linear4bit.forward), `autograd/_functions.py` (MatMul4Bit),
`backends/cuda/ops.py` (_dequant_linear_fallback); 0.46.1 and 0.49.0 for what they do otherwise. transformers 5.17
`utils/quantization_config.py`: a BitsAndBytesConfig without `bnb_4bit_compute_dtype` computes in float32.
"""

from __future__ import annotations

from typing import NamedTuple

from peakcast.core.units import DTYPE_BYTES, FP32
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.tape import Output, Tape, Tensor


class ProductSizes(NamedTuple):
    """The sizes of a matrix product: [rows, in_features] × [in_features, out_features]."""

    rows: int
    in_features: int
    out_features: int


def quantized_linear(
    tape: Tape, context: HFContext, x: Tensor, sizes: ProductSizes, name: str, *, in_chunks: bool = False
) -> Tensor:
    """bitsandbytes MatMul4Bit / GPTQ: the whole matrix is dequantised in forward and again in backward. x is cast to the
    dtype that the layer multiplies in, and the result to that of x; autocast casts both factors again, inside the product.
    Only old bitsandbytes keeps the input, and as it comes. `in_chunks`: rows are multiplied some at a time, so that results
    are there while the matrix is dequantised for the next."""
    rows, in_features, out_features = sizes
    how, argument, given = context.linears.quantized, x, x.num_bytes // (rows * in_features)
    came_in, multiplied, product = _dtypes(context, given)
    matrix = 0 if context.linears.unpack_in_place else in_features * out_features
    in_bytes, out_bytes = int(DTYPE_BYTES[multiplied]), int(DTYPE_BYTES[product])
    if multiplied != came_in:
        x = ops.cast(tape, x, rows * in_features * in_bytes, f"{name}.to_compute_dtype")
    before = matrix * int(DTYPE_BYTES[how.weights] + in_bytes) if how.weights != multiplied and how.casts_in_forward else 0
    if before and not in_chunks:
        x = tape.operation(f"{name}.dequantize", [x], Output.view(x), gradients=[(x, None)], forward_temporary_bytes=before)
    again = (matrix + rows * in_features) * out_bytes if multiplied != product else 0
    # variables of _dequant_linear_fallback: the scales as dequantised, and with their offset
    scales = 2 * FP32 * (matrix // how.elements_per_scale) if how.elements_per_scale else 0
    if again:  # the gradient comes in the product's dtype, which autograd widens
        x = ops.cast_in_graph(tape, x, x.num_bytes, f"{name}.to_autocast_dtype")
    result = tape.operation(
        name,
        [x],
        Output(rows * out_features * out_bytes, kind="matmul"),
        gradients=[(x, rows * in_features * out_bytes)],
        forward_temporary_bytes=max(matrix * in_bytes + again + scales, before * in_chunks),
        backward_temporary_bytes=matrix * out_bytes,
    )
    if how.weights != product:
        result = _dequantized_again(tape, result, matrix * int(DTYPE_BYTES[how.weights] + out_bytes), name)
    if context.linears.quantized_keep_input:
        tape.keep_with_graph(argument)
    if product != came_in:
        result = ops.cast(tape, result, rows * out_features * given, f"{name}.to_input_dtype")
        tape.hold(x)
    tape.hold(argument)  # the module's call has it
    return result


def _dtypes(context: HFContext, given_bytes: int) -> tuple[str, str, str]:
    """The dtype of the input, whose elements have `given_bytes`, that which the layer multiplies in, and that of the
    product."""
    how = context.linears.quantized
    came_in = "float32" if given_bytes == DTYPE_BYTES["float32"] else how.narrow
    multiplied = came_in if how.input_decides and came_in != "float16" else how.multiplies
    return came_in, multiplied, how.narrow if context.precision.autocast else multiplied


def _dequantized_again(tape: Tape, result: Tensor, num_bytes: int, name: str) -> Tensor:
    """`result` of a product, before whose backward the matrix is dequantised to the dtype of the weights and then cast to
    that of the product: `num_bytes` for both."""
    return tape.operation(
        f"{name}.dequantize_again",
        [result],
        Output.view(result),
        gradients=[(result, None)],
        backward_temporary_bytes=num_bytes,
    )
