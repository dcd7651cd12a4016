"""The activation functions of transformers (`activations.py`): some are one operation, others are written out in Python."""

from __future__ import annotations

from peakcast.core.units import FP32
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.tape import Tensor


def activation(build: BlockBuilder, x: Tensor, elements: int) -> Tensor:
    """The activation function of `x`, which has that many `elements`; a quantised Linear returns as wide ones as it gets.
    gelu_new is Python code in transformers (activations.py NewGELUActivation)."""
    context, tape, name = build.context, build.tape, build.context.architecture.hidden_act
    widens = context.precision.autocast and x.num_bytes < elements * FP32  # pow is on autocast's fp32 list
    if name in ("gelu_new", "gelu_fast") and not context.kernels.gelu:
        half, wide = ops.scale(tape, x, "mlp.gelu_new.half"), x
        if widens:  # later results stay wide
            wide = ops.cast(tape, x, elements * FP32, "mlp.gelu_new.to_float32")
        cube = ops.unary(tape, wide, "mlp.gelu_new.pow", backward_temporary_bytes=2 * wide.num_bytes)
        cube = ops.scale(tape, cube, "mlp.gelu_new.coefficient")
        inner = ops.add(tape, x, cube, "mlp.gelu_new.add")
        inner = ops.scale(tape, inner, "mlp.gelu_new.scale")
        tanh = ops.unary_of_result(tape, inner, "mlp.gelu_new.tanh")
        shifted = tape.operation("mlp.gelu_new.one_plus", [tanh], tanh.num_bytes, gradients=[(tanh, None)])
        product = ops.multiply(tape, half, shifted, "mlp.gelu_new.product", recomputed=context.backward.frees_recomputed)
        tape.hold(x)  # the module's argument refers to it
        return product
    if name == "relu2" and context.kernels.gated_activation:  # saves its input (liger_kernel 0.8 ops/relu_squared.py)
        return ops.unary(tape, x, "mlp.relu2")
    if name == "relu2":
        relu = base = ops.unary_of_result(tape, x, "mlp.relu")
        if widens:
            base = ops.cast(tape, relu, elements * FP32, "mlp.square.to_float32")
        square = ops.unary(tape, base, "mlp.square", backward_temporary_bytes=2 * base.num_bytes)
        for variable in (x, relu):
            tape.hold(variable)
        return square
    if name == "bloom_gelu":  # an autograd function of its own, written out in both directions (modeling_bloom.py)
        return tape.operation(
            "mlp.bloom_gelu",
            [x],
            x.num_bytes,
            saves=[x],
            forward_temporary_bytes=3 * x.num_bytes,
            backward_temporary_bytes=4 * x.num_bytes,
        )
    if name == "relu":
        return ops.unary_of_result(tape, x, "mlp.relu")
    return ops.unary(tape, x, f"mlp.{name}")
