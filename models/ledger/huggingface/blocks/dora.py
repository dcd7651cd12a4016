"""DoRA on a projection, operation by operation: LoRA's product and the projection's own output, each times a vector.

Source: peft 0.21 `tuners/lora/dora.py` DoraLinearLayer.forward without dropout, `variants.py` DoraLinearVariant.
"""

from __future__ import annotations

from typing import Protocol

from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.primitives import LinearLayer, LowRankMatrices
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient


class AdaptsLinears(Protocol):
    """What of `BlockBuilder`, which calls this module, is used here."""

    tape: Tape
    context: HFContext
    rows: int

    def linear(self, x: Tensor, layer: LinearLayer) -> Tensor:
        """A Linear over `rows`."""
        ...


def add_dora(
    build: AdaptsLinears, x: Tensor, result: Tensor, name: str, matrices: LowRankMatrices, *, bias: bool
) -> Tensor:
    """`result`, the output of the projection `name`, plus DoRA's change of it, in the dtype of the result. `x`: the
    projection's input as the adapter's `matrices` read it. `bias`: whether the projection has one, which DoRA omits."""
    tape, (down, up) = build.tape, matrices
    narrow, (graph, variables) = result.num_bytes, _norms_of_changed_weight(build, matrices, name)
    product = build.linear(build.linear(x, down), up)
    vector = up.out_features * up.element_bytes
    magnitude = tape.operation(
        f"{name}.lora_magnitude_vector",
        [],
        vector,
        saves=Saved(extra_bytes=[vector]),
        weight_gradients=[WeightGradient(f"{name}.lora_magnitude_vector.grad", vector)],
    )
    base = result
    if bias:
        size = max(narrow, build.rows * up.out_features * build.context.precision.weight_bytes)
        passed_on = None if size == narrow else narrow
        base = tape.operation(f"{name}.dora.without_bias", [result], size, gradients=[(result, passed_on)])
        variables.append(base)
    less_one = tape.operation(f"{name}.dora.less_one", [magnitude], vector, gradients=[(magnitude, None)])
    size = build.rows * vector
    of_result = _times_vector(build, base, less_one, size, f"{name}.dora.of_result")
    of_product = _times_vector(build, product, magnitude, size, f"{name}.dora.of_product")
    tape.hold(of_result)
    change = ops.add(tape, of_result, ops.scale(tape, of_product, f"{name}.dora.scaling"), f"{name}.dora.change")
    for variable in (*variables, product, magnitude):  # variables of the forward refer to them
        tape.hold(variable)
    for tensor in graph:
        tape.keep_until_dropped(tensor)
    output = ops.add(tape, result, change, f"{name}.dora.add")
    return ops.cast(tape, output, narrow, f"{name}.dora.to_result_dtype") if output.num_bytes != narrow else output


def _norms_of_changed_weight(
    build: AdaptsLinears, matrices: LowRankMatrices, name: str
) -> tuple[list[Tensor], list[Tensor]]:
    """The norm of each row of the weight with the adapter's change, which is made by running the adapter on the identity.
    Returns what that run's graph keeps, through which no gradient goes, and the forward's variables."""
    tape, context, (down, up) = build.tape, build.context, matrices
    columns, wide = down.in_features, down.element_bytes
    product = min(wide, context.precision.compute_bytes) if context.precision.autocast else wide
    changed = columns * up.out_features

    def made(part: str, elements: int, element_bytes: int, *reads: Tensor) -> Tensor:
        return tape.operation(f"{name}.dora.{part}", reads, Output(elements * element_bytes), gradients=[])

    identity = made("identity", columns * columns, wide)
    kept = identity if product == wide else made("identity_cast", columns * columns, product, identity)
    inner = made("identity_A", columns * down.out_features, product, kept)
    change = made("weight_change", changed, product, inner)
    tape.hold(identity)
    change = change if product == wide else made("weight_change_cast", changed, wide, change)
    weight = [made("weight", changed, wide)] if context.precision.weight_bytes != wide else []
    scaled = made("weight_change_scaled", changed, wide, change)
    made("norms", up.out_features, wide, made("changed_weight", changed, wide, scaled))
    return [kept, inner], [change, *weight]


def _times_vector(build: AdaptsLinears, x: Tensor, vector: Tensor, num_bytes: int, name: str) -> Tensor:
    """x times a vector that trains, for every row. The vector's gradient is computed at full size before it is summed; that
    of a narrower x is converted."""
    size = max(num_bytes, x.num_bytes)
    wide = size if x.requires_grad and x.num_bytes < size else 0
    return build.tape.operation(
        name,
        [x, vector],
        size,
        saves=[x, *([vector] if x.requires_grad else [])],
        gradients=[(x, x.num_bytes), (vector, vector.num_bytes)],
        backward_temporary_bytes=size + (wide and wide - x.num_bytes),
    )
