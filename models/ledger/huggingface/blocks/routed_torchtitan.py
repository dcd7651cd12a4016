"""The routed feed-forward of torchtitan: scores in fp32, tokens sorted by expert, three grouped products, and the experts'
outputs multiplied by their weights in fp32 and summed.

Source: torchtitan 0.3.0 models/common/moe.py (MoE, TokenChoiceTopKRouter, RoutedExperts, GroupedExperts),
token_dispatcher.py (LocalTokenDispatcher), ops/scatter_add.py. Its selective checkpointing
(distributed/activation_checkpoint.py) keeps the top k and recomputes grouped products and the router's.
"""

from __future__ import annotations

from peakcast.core.units import FP32, INT64
from peakcast.jobs.architecture import MixtureOfExperts
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient


def torchtitan_feed_forward(build: BlockBuilder, x: Tensor) -> Tensor:
    """The feed-forward of a layer: [micro_batch_size · sequence_length, hidden_size] in and out."""
    context, tape = build.context, build.tape
    moe = context.architecture.moe
    assert moe is not None
    scores, chosen, weights = _router(build, x, moe)
    routing_map = tape.operation("mlp.routing_map", [chosen], context.rows * moe.num_experts)
    output = _experts(build, x, chosen, weights, moe)
    if moe.shared_expert_intermediate_size:
        output = ops.add(tape, output, _shared_expert(build, x, moe.shared_expert_intermediate_size), "mlp.add_shared")
    for variable in (scores, chosen, weights, routing_map):  # variables of the module's forward refer to them
        tape.hold(variable)
    return output


def _router(build: BlockBuilder, x: Tensor, moe: MixtureOfExperts) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [tokens, num_experts], the ids of the top k and their weights, both [tokens, num_experts_per_tok]."""
    context, tape, rows = build.context, build.tape, build.context.rows
    width, num, top_k = context.architecture.hidden_size, moe.num_experts, moe.num_experts_per_tok
    wide = rows * num * FP32
    if context.precision.weight_bytes < FP32:
        x = ops.cast(tape, x, rows * width * FP32, "mlp.router.input_to_float32")
        gradient = WeightGradient("mlp.gate.weight.grad", num * width * context.precision.weight_bytes)
        weight = tape.operation(
            "mlp.router.weight_to_float32",
            [],
            num * width * FP32,
            weight_gradients=[gradient] if context.weights_get_gradients else [],
        )
        logits = tape.operation("mlp.router.logits", [x, weight], wide, saves=[x, weight])
    else:
        gradient = WeightGradient("mlp.gate.weight.grad", num * width * FP32)
        saves, made = ([x], [gradient]) if context.weights_get_gradients else ([], [])
        logits = tape.operation("mlp.router.logits", [x], wide, saves=saves, weight_gradients=made)
    scores = ops.unary_of_result(tape, logits, "mlp.router.scores")
    biased = tape.operation("mlp.router.add_bias", [scores], wide, gradients=[])
    tape.operation("mlp.router.topk.values", [biased], Output(rows * top_k * FP32, kind="topk"), gradients=[])
    chosen = tape.operation("mlp.router.topk", [biased], Output(rows * top_k * INT64, kind="topk"), gradients=[])
    chosen.requires_grad = False
    weights = tape.operation("mlp.router.gather", [scores, chosen], rows * top_k * FP32, saves=[chosen])
    total = tape.operation("mlp.router.sum", [weights], rows * FP32)
    total = tape.operation("mlp.router.sum.add", [total], rows * FP32, gradients=[(total, None)])
    weights = tape.operation("mlp.router.normalise", [weights, total], rows * top_k * FP32, saves=[weights, total])
    return scores, chosen, ops.scale(tape, weights, "mlp.router.scale")


def _experts(build: BlockBuilder, x: Tensor, chosen: Tensor, weights: Tensor, moe: MixtureOfExperts) -> Tensor:
    """The experts' outputs, multiplied by `weights` and summed for each token."""
    context, tape = build.context, build.tape
    width, inner = context.architecture.hidden_size, moe.moe_intermediate_size
    pairs, size = context.rows * moe.num_experts_per_tok, x.num_bytes // (context.rows * context.architecture.hidden_size)
    order = tape.operation(  # the order, and as a temporary the sorted ids
        "mlp.experts.order", [chosen], pairs * INT64, gradients=[], forward_temporary_bytes=pairs * INT64
    )
    sorted_weights = tape.operation("mlp.experts.take_weights", [weights, order], pairs * FP32, saves=[order])
    token = tape.operation("mlp.experts.token", [order], pairs * INT64, gradients=[])
    taken = tape.operation("mlp.experts.take", [x, token], pairs * width * size, saves=[token])
    places: Tensor | None = None
    if context.experts.ranks > 1:
        taken, places = _send(tape, taken, pairs)
    gate = _grouped(build, taken, moe, width, inner, "mlp.experts.w1")
    activated = ops.unary(tape, gate, "mlp.experts.act")
    up = _grouped(build, taken, moe, width, inner, "mlp.experts.w3")
    product = ops.multiply(tape, activated, up, "mlp.experts.product")
    down = _grouped(build, product, moe, inner, width, "mlp.experts.w2")
    returned = down if places is None else _return_rows(tape, down, places)
    total, zeros = _summed_by_token(build, returned, sorted_weights, token, size)
    for variable in (taken, down, zeros, token, sorted_weights):  # variables of the experts and the dispatcher
        tape.hold(variable)
    if places is not None:
        tape.hold(places)
    return total


def _summed_by_token(
    build: BlockBuilder, returned: Tensor, weights: Tensor, token: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """The experts' outputs `returned`, times the router's `weights`, added to zeros of `size` bytes each at the rows of
    their tokens. Returns the sums and the zeros."""
    context, tape, width = build.context, build.tape, build.context.architecture.hidden_size
    pairs = weights.num_bytes // FP32
    zeros = tape.operation("mlp.experts.zeros", [], context.rows * width * size)
    widened = ops.cast(tape, returned, pairs * width * FP32, "mlp.experts.to_float32") if size < FP32 else returned
    weighted = tape.operation(
        "mlp.experts.weighted",
        [widened, weights],
        pairs * width * FP32,
        saves=[widened, weights],
        backward_temporary_bytes=pairs * width * FP32,  # the product that is summed to the weights' gradient
    )
    narrow = ops.cast(tape, weighted, pairs * width * size, "mlp.experts.to_narrow") if size < FP32 else weighted
    tape.hold(returned)  # until its variable is reassigned to the weighted rows
    total = tape.operation(
        "mlp.experts.scatter_add",
        [zeros, narrow, token],
        context.rows * width * size,
        saves=[token],
        gradients=[(narrow, narrow.num_bytes)],
    )
    return total, zeros


def _send(tape: Tape, taken: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """AllToAllTokenDispatcher.dispatch: the rows that all ranks send to this one's experts, sorted by expert, and where
    each belongs. Assumes: routing is balanced, so as many rows arrive as leave."""
    sent = tape.operation("mlp.experts.send", [taken], Output(taken.num_bytes, kind="all_to_all"))
    segments = tape.operation("mlp.experts.segments", [], pairs * INT64)
    places = tape.operation("mlp.experts.places", [segments], pairs * INT64, forward_temporary_bytes=2 * pairs * INT64)
    sorted_by_expert = tape.operation("mlp.experts.permute", [sent, places], taken.num_bytes, saves=[places])
    for variable in (taken, sent, segments):
        tape.hold(variable)
    return sorted_by_expert, places


def _return_rows(tape: Tape, down: Tensor, places: Tensor) -> Tensor:
    """AllToAllTokenDispatcher.combine up to the weighting: the experts' outputs, back on the rank that sent the rows."""
    unsorted = tape.operation("mlp.experts.unpermute", [down, places], down.num_bytes, saves=[places])
    return tape.operation("mlp.experts.return", [unsorted], Output(down.num_bytes, kind="all_to_all"))


def _grouped(build: BlockBuilder, x: Tensor, moe: MixtureOfExperts, inputs: int, outputs: int, name: str) -> Tensor:
    """A grouped matrix product of rows sorted by expert."""
    context = build.context
    pairs = context.rows * moe.num_experts_per_tok
    weight = moe.num_experts // context.experts.ranks * inputs * outputs * context.precision.weight_bytes
    return build.tape.operation(
        name,
        [x],
        pairs * outputs * context.precision.weight_bytes,
        saves=Saved([x] if context.weights_get_gradients else [], parameter_bytes=weight),
        weight_gradients=[WeightGradient(f"{name}.grad", weight)] if context.weights_get_gradients else [],
    )


def _shared_expert(build: BlockBuilder, x: Tensor, inner: int) -> Tensor:
    """The expert that all tokens use."""
    width = build.context.architecture.hidden_size
    gate = build.projection(x, width, inner, "mlp.shared_expert.gate_proj", False)
    activated = ops.unary(build.tape, gate, "mlp.shared_expert.act")
    up = build.projection(x, width, inner, "mlp.shared_expert.up_proj", False)
    product = ops.multiply(build.tape, activated, up, "mlp.shared_expert.product")
    return build.projection(product, inner, width, "mlp.shared_expert.down_proj", False)
