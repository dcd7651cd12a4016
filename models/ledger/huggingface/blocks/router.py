"""The router of a mixture of experts in Hugging Face: which experts get a token, and with which weights.

Source: transformers 5.17 `models/<model_type>/modeling_<model_type>.py`, the classes named `...TopKRouter`.
"""

from __future__ import annotations

from peakcast.core.units import FP32, INT64
from peakcast.jobs.architecture import MixtureOfExperts
from peakcast.models.ledger.huggingface.blocks import expert_adapters
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.eager_attention import softmax
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.tape import Output, Saved, Tensor, WeightGradient
from peakcast.networks.families import family_of


def route(build: BlockBuilder, x: Tensor, moe: MixtureOfExperts) -> tuple[Tensor, list[Tensor]]:
    """The chosen experts' weights [tokens, num_experts_per_tok], and the tensors to which variables of the block's forward
    refer until it returns: these weights, the logits, and the chosen experts."""
    context, tape, rows = build.context, build.tape, build.context.rows
    num, top_k = moe.num_experts, moe.num_experts_per_tok
    code = family_of(context.architecture).experts
    wide, chosen_bytes = rows * num * FP32, rows * top_k * FP32
    logits = _logits(build, x, moe)
    if code.softmax_of_chosen:
        chosen, indices = _top(build, logits, logits.num_bytes // num * top_k, moe)
        weights = ops.unary_of_result(tape, chosen, "mlp.router.scores")
    else:
        if moe.router_correction_bias and context.precision.autocast:  # sigmoid is on none of autocast's lists
            scores, chosen_bytes = ops.unary_of_result(tape, logits, "mlp.router.scores"), logits.num_bytes // num * top_k
        else:
            scores = softmax(build, logits, wide, "mlp.router.scores")
        choosing = 2 * wide if moe.router_correction_bias else 0  # scores with their bias, masked by group
        weights, indices = _top(build, scores, chosen_bytes, moe, forward_temporary_bytes=choosing)
    if code.divides_by_sum:  # in place, so the old values are copied for the divisor's gradient
        total = tape.operation("mlp.router.sum", [weights], rows * FP32, gradients=[(weights, None)])
        weights = tape.operation(
            "mlp.router.normalise",
            [weights, total],
            Output(chosen_bytes, view_of=weights),
            saves=Saved([total], extra_bytes=[chosen_bytes]),
            backward_temporary_bytes=2 * chosen_bytes,
        )
    if code.router_in_float32:  # DeepSeek's routers scale the weights
        weights = ops.scale(tape, weights, "mlp.router.scale")
    narrow = rows * top_k * context.precision.weight_bytes
    if code.weights == "narrow" and weights.num_bytes != narrow:
        weights = ops.cast(tape, weights, narrow, "mlp.router.to_narrow")
    return weights, [logits, weights, indices]


def _logits(build: BlockBuilder, x: Tensor, moe: MixtureOfExperts) -> Tensor:
    """The router's logits [tokens, num_experts]."""
    context, tape, rows = build.context, build.tape, build.context.rows
    width, num = context.architecture.hidden_size, moe.num_experts
    code = family_of(context.architecture).experts
    changed = expert_adapters.changed(build, expert_adapters.registered(build, router=True), expert_adapters.ROUTER)
    if code.router_in_float32 and context.precision.weight_bytes < FP32:
        x = ops.cast(tape, x, rows * width * FP32, "mlp.router.input_to_float32")
        weight = tape.operation(
            "mlp.router.weight_to_float32",
            changed,
            num * width * FP32,
            weight_gradients=[WeightGradient("mlp.gate.weight.grad", num * width * context.precision.weight_bytes)]
            if context.weights_get_gradients
            else [],
        )
        size = FP32
        if context.precision.autocast:  # autocast narrows what has just been widened
            size = context.precision.compute_bytes
            x = ops.cast(tape, x, rows * width * size, "mlp.router.input_to_narrow")
            weight = ops.cast(tape, weight, num * width * size, "mlp.router.weight_to_narrow")
        saves = [x, weight] if context.weights_get_gradients or changed else [weight]
        return tape.operation("mlp.router.logits", [x, weight], rows * num * size, saves=saves)
    if changed:
        narrow = rows * num * context.precision.weight_bytes
        logits = tape.operation("mlp.gate", [x, *changed], narrow, saves=[x, *(changed if x.requires_grad else [])])
    else:
        logits = build.projection(x, width, num, "mlp.gate", moe.router_bias)
    if code.softmax_of_chosen == "float32" and logits.num_bytes != rows * num * FP32:
        logits = ops.cast(tape, logits, rows * num * FP32, "mlp.router.to_float32")
    return logits


def _top(
    build: BlockBuilder, scores: Tensor, num_bytes: int, moe: MixtureOfExperts, *, forward_temporary_bytes: int = 0
) -> tuple[Tensor, Tensor]:
    """The largest scores of every row, and their indices, which autograd saves."""
    tape, rows = build.tape, build.context.rows
    indices = tape.operation("mlp.router.topk.saved", [scores], rows * moe.num_experts_per_tok * INT64, gradients=[])
    largest = tape.operation(
        "mlp.router.topk",
        [scores, indices],
        num_bytes,
        saves=[indices],
        gradients=[(scores, scores.num_bytes)],
        forward_temporary_bytes=forward_temporary_bytes,
    )
    return largest, indices
