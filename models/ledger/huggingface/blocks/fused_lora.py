"""A Linear and its adapter as one autograd function, as Unsloth wrote them and fms-acceleration adopted them.

Queries, keys and values are one function, attention's output projection another, a gated feed-forward a third. Each saves
its input and, with dropout, a copy of it after dropout for each adapter, but no dropout masks and no low-rank products. A
quantised weight is dequantised for its product and freed; the input's gradient overwrites the input.

Source: fms-acceleration `fused_ops/unsloth_lora/bnb/fast_lora.py` (LoRA_QKV, LoRA_W, LoRA_MLP), `gptq/fast_lora.py`,
`unsloth_lora/utils.py` matmul_lora; unsloth 2025.11.4 `kernels/fast_lora.py`, which has no dropout.
"""

from __future__ import annotations

from collections.abc import Sequence

from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder, is_adapter_target
from peakcast.models.ledger.tape.primitives import LowRankMatrices
from peakcast.models.ledger.tape.tape import Saved, Tensor, WeightGradient


def is_fused(build: BlockBuilder, names: Sequence[str], bias: bool) -> bool:
    """Whether the projections `names` are one function: the kernel is in use and each of them has an adapter. `bias`:
    whether they have biases. Unsloth's kernel requires adapters without dropout on matrices without biases ("fused_plain";
    unsloth 2025.11.4 `models/llama.py` patch_peft_model)."""
    context, tuning = build.context, build.context.finetuning
    if context.kernels.lora == "eager" or tuning.method == "full":
        return False
    if context.kernels.lora == "fused_plain" and (tuning.dropout > 0 or bias):
        return False
    return all(is_adapter_target(name, tuning, context.architecture) for name in names)


def fused_projections(build: BlockBuilder, x: Tensor, in_features: int, outputs: Sequence[tuple[str, int]]) -> list[Tensor]:
    """The projections of x to each of `outputs` (name, out_features), as one function of x."""
    made, kept, gradients = list[Tensor](), [x], list[WeightGradient]()
    for name, out_features in outputs:
        y, dropped = _projected(build, x, in_features, out_features, name)
        made.append(y)
        kept += dropped
        gradients += _adapter_gradients(build, in_features, out_features, name)
    matrix = max(_matrix_bytes(build, in_features, out_features) for _, out_features in outputs)
    alone = len(outputs) == 1  # its gradient is a tensor of its own, while the dequantised matrix exists
    in_place = not alone and build.context.finetuning.quantization != "gptq"  # `torch.matmul(dQ, QW.t(), out=X)`
    product = 0 if alone else x.num_bytes  # a further projection's gradient of x, before it is added
    results = build.tape.function(
        ".lora_".join((outputs[0][0], "function")),
        made,
        [x],
        saves=Saved(kept, by_function=True, become_gradients=in_place),
        weight_gradients=gradients,
        backward_temporary_bytes=max(matrix + product, _masked_bytes(build, x.num_bytes, in_features)),
    )
    build.tape.hold(x)  # the module's argument, until it returns
    return results


def fused_feed_forward(build: BlockBuilder, x: Tensor, width: int, inner: int, names: tuple[str, str, str]) -> Tensor:
    """down(act(gate(x))·up(x)) as one function. Its backward recomputes the product in the place of the gradients."""
    tape, (gate_name, up_name, down_name) = build.tape, names
    gate, dropped_gate = _projected(build, x, width, inner, gate_name)
    up, dropped_up = _projected(build, x, width, inner, up_name)
    product = tape.operation("mlp.swiglu", [_without_graph(gate), _without_graph(up)], up.num_bytes)
    down, dropped_down = _projected(build, product, inner, width, down_name)
    gradients = _adapter_gradients(build, width, inner, gate_name) + _adapter_gradients(build, width, inner, up_name)
    gradients += _adapter_gradients(build, inner, width, down_name)
    matrix = _matrix_bytes(build, width, inner)
    passing = max(matrix + x.num_bytes, up.num_bytes, _masked_bytes(build, x.num_bytes, width))
    (result,) = tape.function(
        "mlp.lora_function",
        [down],
        [x],
        saves=Saved(
            [x, gate, up, *dropped_gate, *dropped_up, *dropped_down],
            by_function=True,
            become_gradients=build.context.finetuning.quantization != "gptq",
        ),
        weight_gradients=gradients,
        backward_temporary_bytes=up.num_bytes + passing,
    )
    tape.hold(x)  # the module's argument, until it returns
    return result


def _projected(
    build: BlockBuilder, x: Tensor, in_features: int, out_features: int, name: str
) -> tuple[Tensor, list[Tensor]]:
    """One projection with its adapter, outside any graph, and the copy of x after dropout, if there is dropout."""
    tape, tuning, compute = build.tape, build.context.finetuning, build.context.precision.compute_bytes
    x = _without_graph(x)
    matrix = _matrix_bytes(build, in_features, out_features)
    y = tape.operation(name, [x], build.rows * out_features * compute, forward_temporary_bytes=matrix)
    dropped = []
    if tuning.dropout > 0:
        mask = build.rows * in_features
        dropped = [tape.operation(f"{name}.lora.dropout", [x], x.num_bytes, forward_temporary_bytes=mask)]
    low = build.rows * (tuning.rank or 0) * compute
    tape.operation(f"{name}.lora.add", [x, y, *dropped], 0, forward_temporary_bytes=low + y.num_bytes)
    return y, dropped


def _without_graph(x: Tensor) -> Tensor:
    """A tensor with the storage of `x` that gets no gradient."""
    return Tensor(x.storage, x.num_bytes, requires_grad=False)


def _matrix_bytes(build: BlockBuilder, in_features: int, out_features: int) -> int:
    """Bytes of a dequantised weight; 0 if the weight is not quantised."""
    quantized = build.context.finetuning.quantization is not None
    return in_features * out_features * build.context.precision.compute_bytes if quantized else 0


def _masked_bytes(build: BlockBuilder, input_bytes: int, in_features: int) -> int:
    """Bytes of `(QX != 0) * (dQ @ ...)`: which elements were dropped, the adapter's part of the gradient, and their
    product."""
    dropped = build.context.finetuning.dropout > 0
    return 2 * input_bytes + build.rows * in_features if dropped else input_bytes


def _adapter_gradients(build: BlockBuilder, in_features: int, out_features: int, name: str) -> list[WeightGradient]:
    """The gradients of an adapter's two matrices."""
    rank, size = build.context.finetuning.rank or 0, build.context.adapters.weight_bytes
    matrices = LowRankMatrices.of(name, in_features, out_features, rank, size)
    return [matrix.weight_gradient(matrix.weight_bytes) for matrix in matrices]
