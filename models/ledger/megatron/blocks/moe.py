"""The routed feed-forward of a Megatron-LM decoder layer on one rank: router, dispatch, experts, combine, shared expert.

Sources: megatron-core 0.16.1 `transformer/moe/moe_layer.py`, `experts.py` (`TEGroupedMLP`, `SequentialMLP`),
`shared_experts.py`; Transformer Engine 2.8 `pytorch/module/grouped_linear.py`.
Routing is balanced unless `framework_options.moe_routing` is `worst_case`.
"""

from __future__ import annotations

from dataclasses import replace

from peakcast.models.ledger.megatron.blocks.adapters import TokenProjection, add_to_tokens
from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.megatron.blocks.dispatch import Dispatch
from peakcast.models.ledger.megatron.blocks.expert_context import ExpertContext
from peakcast.models.ledger.megatron.blocks.gradients import trained, weight_gradients
from peakcast.models.ledger.megatron.blocks.primitives import (
    column_linear,
    gated_activation,
    norm,
    other_layout_bytes,
    quantized_gradient_bytes,
    row_linear,
    saved_input,
)
from peakcast.models.ledger.megatron.blocks.recompute import checkpointed, recomputation_cost
from peakcast.models.ledger.megatron.blocks.router import router
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Saved, Tape, Tensor, WeightGradient

MOST_EXPERTS_IN_A_ROW = 16
"""If more local experts than this run one after the other, they are written as this many groups of equal experts."""


def routed_feed_forward(tape: Tape, x: Tensor, context: MegatronContext, experts: ExpertContext) -> Tensor:
    """The feed-forward of a layer: [stream_rows, hidden] in and out. The norm before it is a module of its own."""
    begin = tape.num_tensors
    with tape.marked(Mark.FEED_FORWARD_NORM), tape.marked(Mark.ROUTER):
        x = norm(tape, x, context, context.stream_rows, context.hidden, "pre_mlp_layernorm")
    end = tape.num_tensors
    if experts.recompute_layer:
        with tape.marked(Mark.RECOMPUTED_EXPERTS), tape.marked(Mark.EXPERTS):
            output = checkpointed(tape, x, "moe", lambda part, held: mixture_of_experts(part, held, context, experts))
    else:
        output = mixture_of_experts(tape, x, context, experts)
        tape.hold(x)
    if context.recompute_norms:
        tape.make_again(begin, end, x)
    return output


def mixture_of_experts(tape: Tape, x: Tensor, context: MegatronContext, experts: ExpertContext) -> Tensor:
    """`MoELayer`: [stream_rows, hidden] in and out. The router saves the input."""
    with tape.marked(Mark.ROUTER):
        shared = _shared_expert(tape, x, context, experts) if experts.shared_ffn else None
        probabilities = router(tape, x, context, experts)
    with tape.marked(Mark.EXPERTS):
        dispatch = Dispatch(tape, context, experts)
        output = _routed(tape, x, probabilities, dispatch, context, experts)
        if shared is not None:
            output = tape.operation("add_shared", [output, shared], x.num_bytes, gradients=[(output, None), (shared, None)])
            if context.runs.in_parts:
                tape.keep_with_graph(shared)
        dispatch.release()
    return output


def _routed(
    tape: Tape, x: Tensor, probabilities: Tensor, dispatch: Dispatch, context: MegatronContext, experts: ExpertContext
) -> Tensor:
    """What the experts make of the tokens that are routed to them, back in the order of the tokens."""
    with tape.marked(Mark.DISPATCH):
        rows, chosen = dispatch.send(x, probabilities)
    run = _grouped if experts.grouped else _one_by_one
    return dispatch.combine(run(tape, rows, chosen, dispatch.rows, context, experts))


def _grouped(
    tape: Tape, x: Tensor, probabilities: Tensor, rows: int, context: MegatronContext, experts: ExpertContext
) -> Tensor:
    """All local experts in one product for each projection."""
    inner = experts.ffn * (2 if context.feed_forward.gated else 1)
    count = experts.local_experts
    projected = _expert_linear(tape, x, rows, TokenProjection("experts.linear_fc1", context.hidden, inner, count), context)
    again = None
    if experts.recompute_activation and experts.grouped:
        activated, again = _recomputed_activation(tape, projected, probabilities, rows, context, experts)
    else:
        activated = _weighted_activation(tape, projected, probabilities, rows, context, experts)
    second = TokenProjection("experts.linear_fc2", experts.ffn, context.hidden, count)
    output = _expert_linear(tape, activated, rows, second, context, recomputed_bytes=again)
    if experts.grouped:  # `fc1_output` in TEGroupedMLP's forward refers to it (megatron-core 0.16.1 `moe/experts.py`)
        tape.hold(projected)
    return output


def _one_by_one(
    tape: Tape, x: Tensor, probabilities: Tensor, rows: int, context: MegatronContext, experts: ExpertContext
) -> Tensor:
    """One expert after the other, on views of the rows; their outputs are concatenated."""
    if experts.local_experts == 1:
        return _grouped(tape, x, probabilities, rows, context, experts)
    groups = min(experts.local_experts, MOST_EXPERTS_IN_A_ROW)
    sizes = [rows * (i + 1) // groups - rows * i // groups for i in range(groups)]
    counts = [experts.local_experts * (i + 1) // groups - experts.local_experts * i // groups for i in range(groups)]
    row, element = context.hidden * context.element_bytes, experts.router.element_bytes
    parts = tape.split(x, [size * row for size in sizes], "experts.split")
    weights = tape.split(probabilities, [size * element for size in sizes], "experts.split_probabilities")
    inner = experts.ffn * (2 if context.feed_forward.gated else 1)
    outputs = []
    for part, weight, size, count in zip(parts, weights, sizes, counts, strict=True):
        first = TokenProjection("expert.linear_fc1", context.hidden, inner, count)
        second = TokenProjection("expert.linear_fc2", experts.ffn, context.hidden, count)
        projected = _expert_linear(tape, part, size, first, context)
        activated = _weighted_activation(tape, projected, weight, size, context, experts)
        outputs.append(_expert_linear(tape, activated, size, second, context))
    # the gradients are views of the concatenation's gradient
    return tape.operation("experts.concatenate", outputs, rows * row, gradients=[(output, None) for output in outputs])


def _expert_linear(
    tape: Tape,
    x: Tensor,
    rows: int,
    projection: TokenProjection,
    context: MegatronContext,
    *,
    recomputed_bytes: int | None = None,
) -> Tensor:
    """x·Wᵀ for experts on their share of `rows`. Saves its input or, with `recomputed_bytes`, has it recomputed in
    backward, which allocates that many bytes."""
    name, in_features, out_features, count = projection
    gradients = weight_gradients(context, name, in_features * out_features, 0)
    if context.experts is not None and context.experts.placeholders_anew and not (gradients or context.frozen):
        gradients = [WeightGradient(f"{name}.placeholder", in_features * out_features * context.element_bytes)]
    output = rows * out_features * context.element_bytes
    saves, saved_bytes = saved_input(context, x, rows * in_features)
    quantized = quantized_gradient_bytes(context, output)
    if context.weight_gradients.fused:  # placeholders are made after the products and the FP8 input are freed
        quantized -= min(quantized, sum(saved_bytes), count * sum(gradient.num_bytes for gradient in gradients))
    base = tape.operation(
        name,
        [x],
        output,
        saves=Saved(saves if recomputed_bytes is None else [], extra_bytes=saved_bytes),
        weight_gradients=gradients * count,
        forward_temporary_bytes=other_layout_bytes(context, rows * in_features),
        backward_temporary_bytes=(recomputed_bytes or 0) + quantized,
    )
    return add_to_tokens(tape, x, base, context, projection, rows)


def _recomputed_activation(
    tape: Tape, x: Tensor, probabilities: Tensor, rows: int, context: MegatronContext, experts: ExpertContext
) -> tuple[Tensor, int]:
    """`_weighted_activation`, recomputed when backward reaches the operation that reads it; and the bytes that this
    allocates there."""
    inputs = [x, probabilities]

    def part(inner: Tape, held: Tensor, weights: Tensor) -> Tensor:
        return _weighted_activation(inner, held, weights, rows, context, experts)

    cost = recomputation_cost(inputs, part)
    output = tape.operation(
        "experts.weighted_activation",
        inputs,
        rows * experts.ffn * context.element_bytes,
        saves=inputs,
        forward_temporary_bytes=cost.forward,
        backward_temporary_bytes=cost.backward,
    )
    return output, cost.reader


def _weighted_activation(
    tape: Tape, x: Tensor, probabilities: Tensor, rows: int, context: MegatronContext, experts: ExpertContext
) -> Tensor:
    """act(x) · probability, [rows, ffn]. The fused activation saves only its inputs; unfused, the product has the wider of
    both dtypes and is converted back."""
    narrow = rows * experts.ffn * context.element_bytes
    wide = rows * experts.ffn * max(context.element_bytes, experts.router.element_bytes)
    if experts.fused_weighted_activation:
        return tape.operation("experts.weighted_activation", [x, probabilities], narrow, saves=[x, probabilities])
    if context.feed_forward.gated:
        gate, up = tape.split(x, [narrow, narrow], "experts.chunk")
        activated = gated_activation(tape, gate, up, context, ("experts.activation", "experts.glu_product"))
    else:
        activated = tape.operation("experts.activation", [x], narrow, saves=[x])
    weighted = tape.operation(
        "experts.weigh",
        [activated, probabilities],
        wide,
        saves=[activated, probabilities],
        # grad · activation, before it is summed over the width; grad · probability, before it is converted
        backward_temporary_bytes=wide if wide == narrow else 2 * wide,
    )
    return weighted if wide == narrow else tape.operation("experts.to_narrow", [weighted], narrow)


def _shared_expert(tape: Tape, x: Tensor, context: MegatronContext, experts: ExpertContext) -> Tensor:
    """The shared expert: a dense feed-forward without its norm, times a sigmoid gate if it has one."""
    if experts.recompute_shared:
        again = replace(experts, recompute_shared=False)
        return checkpointed(tape, x, "shared_experts", lambda part, held: _shared_expert(part, held, context, again))
    inner = experts.shared_ffn * (2 if context.feed_forward.gated else 1)
    if experts.overlap_shared:  # the layer gathers the input, not the projection, which therefore saves it gathered
        gathered = x
        if context.groups.sequence_parallel:
            gathered = tape.operation("shared_experts.all_gather", [x], context.gathered_bytes)
        first = TokenProjection("shared_experts.linear_fc1", context.hidden, inner)
        projected = _expert_linear(tape, gathered, context.rows, first, context)
    else:
        projected = column_linear(tape, x, context, inner, "shared_experts.linear_fc1", False)
    activated = _activation(tape, projected, context.rows * experts.shared_ffn * context.element_bytes, context)
    if experts.overlap_shared:
        second = TokenProjection("shared_experts.linear_fc2", experts.shared_ffn, context.hidden)
        output = _expert_linear(tape, activated, context.rows, second, context)
        if context.groups.sequence_parallel:
            output = tape.operation("shared_experts.reduce_scatter", [output], context.stream_bytes)
    else:
        output = row_linear(tape, activated, context, experts.shared_ffn, "shared_experts.linear_fc2")
    if not experts.shared_gate:
        return output
    score = tape.operation(
        "shared_experts.gate",
        [x],
        context.stream_rows * context.element_bytes,
        saves=Saved([x], output=True),
        weight_gradients=trained(
            context, WeightGradient("shared_experts.gate_weight.grad", context.hidden * context.element_bytes)
        ),
    )
    return tape.operation("shared_experts.gated", [output, score], output.num_bytes, saves=[output, score])


def _activation(tape: Tape, x: Tensor, num_bytes: int, context: MegatronContext) -> Tensor:
    """act(x) of `num_bytes`. A fused or ungated activation saves its input; otherwise gate, up and the activated gate are
    saved."""
    if not context.feed_forward.gated or context.feed_forward.fused_activation:
        return tape.operation("shared_experts.activation", [x], num_bytes, saves=[x])
    gate, up = tape.split(x, [num_bytes, num_bytes], "shared_experts.chunk")
    return gated_activation(tape, gate, up, context, ("shared_experts.activation", "shared_experts.product"))
