"""A Linear computed eagerly in float8 with dynamic tensorwise scales: torchao's Float8Linear.

Between forward and backward it saves what a plain Linear saves, its wide input; fp8 copies of input, weight and gradient
are made each time they are used. Eager conversion of n elements makes two fp32 tensors of n on the way.

Source: torchao 0.18 float8/float8_linear.py matmul_with_hp_or_float8_args, float8_training_tensor.py _ToFloat8ConstrFunc,
float8_ops.py preprocess_addmm. Compiled, these conversions fuse; that is not modelled.
"""

from __future__ import annotations

from peakcast.models.ledger.tape.primitives import LinearLayer
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient

CONVERSION_BYTES = 4 + 4 + 1
"""Bytes per element at the fullest moment of a conversion: the scaled fp32 tensor, its clamped copy, the result."""


def float8_linear(tape: Tape, x: Tensor, rows: int, layer: LinearLayer) -> Tensor:
    """x·Wᵀ (+ b) with a weight that trains. Shapes: [rows, in_features] to [rows, out_features]."""
    name, element_bytes = layer.name, layer.element_bytes
    inputs, outputs, weight = rows * layer.in_features, rows * layer.out_features, layer.in_features * layer.out_features
    made = element_bytes * (inputs + weight)  # the gradients of the input and of the weight
    both = outputs + weight  # the first product's operands stay until backward returns
    forward = max(CONVERSION_BYTES * inputs, inputs + CONVERSION_BYTES * weight) - element_bytes * outputs
    backward = max(
        CONVERSION_BYTES * outputs,
        outputs + CONVERSION_BYTES * weight,
        both + weight + element_bytes * inputs,  # the weight's copy in the other layout
        both + element_bytes * inputs + CONVERSION_BYTES * outputs,
        both + element_bytes * inputs + outputs + CONVERSION_BYTES * inputs,
        both + 2 * (outputs + inputs) + made,  # gradient and input, each also in the other layout
    )
    output = tape.operation(
        name,
        [x],
        Output(outputs * element_bytes, kind="matmul"),
        saves=Saved([x], by_function=True),
        weight_gradients=[layer.weight_gradient(weight * element_bytes)],
        forward_temporary_bytes=max(forward, inputs + weight),
        backward_temporary_bytes=max(backward - made, 0),
    )
    if not layer.bias:
        return output
    gradients = [WeightGradient(f"{name}.bias.grad", layer.out_features * element_bytes)]
    return tape.operation(
        f"{name}.bias", [output], output.num_bytes, gradients=[(output, None)], weight_gradients=gradients
    )
