"""The routed feed-forward of a mixture of experts in Hugging Face: the routed experts, and the shared expert for all
tokens.

Experts run in grouped matrix products (transformers 5, `integrations/moe.py` grouped_mm_experts_forward), whose sizes do
not depend on the routing, or one after the other (transformers 4), each on its share of `num_experts_per_tok` rows per
token. In the loop, many experts are written as at most `MOST_GROUPS` groups of equal experts: their saved tensors stay
exact, their temporaries become slightly too large. One expert takes more rows than the others: its temporaries grow, but
the total of saved rows does not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from peakcast.core.units import FP32, INT32, INT64
from peakcast.jobs.architecture import MixtureOfExperts
from peakcast.models.ledger.huggingface.blocks import expert_adapters
from peakcast.models.ledger.huggingface.blocks.activations import activation
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.expert_adapters import DOWN, GATE_UP
from peakcast.models.ledger.huggingface.blocks.router import route
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.primitives import LinearLayer
from peakcast.models.ledger.tape.tape import Output, Saved, Tensor, WeightGradient
from peakcast.networks.families import family_of

MOST_GROUPS = 16


def routed_feed_forward(build: BlockBuilder, x: Tensor) -> Tensor:
    """The feed-forward of a layer: [micro_batch_size · sequence_length, hidden_size] in and out."""
    moe = build.context.architecture.moe
    assert moe is not None
    gated = _shared_expert(build, x, moe) if moe.shared_expert_gate else None
    weights, variables = route(build, x, moe)
    experts = _looped_experts if build.context.experts.implementation == "loop" else _grouped_experts
    output = experts(build, x, weights, moe)
    if gated is not None:
        gate = build.projection(x, build.context.architecture.hidden_size, 1, "mlp.shared_expert_gate", False)
        gate = ops.unary_of_result(build.tape, gate, "mlp.shared_expert_gate.sigmoid")
        scaled = build.tape.operation(
            "mlp.shared_expert_gate.product",
            [gate, gated],
            gated.num_bytes,
            saves=[gate, gated],
            backward_temporary_bytes=gated.num_bytes,
        )
        output = ops.add(build.tape, output, scaled, "mlp.add_shared")
    elif moe.shared_expert_intermediate_size:
        output = ops.add(build.tape, output, _shared_expert(build, x, moe), "mlp.add_shared")
    for variable in variables:
        build.tape.hold(variable)
    return output


def _grouped_experts(build: BlockBuilder, x: Tensor, weights: Tensor, moe: MixtureOfExperts) -> Tensor:
    """Rows sorted by expert, two grouped matrix products, then rows multiplied by their weights, restored to their order
    and summed over each token's experts."""
    context, tape = build.context, build.tape
    width, inner = context.architecture.hidden_size, context.group.part(moe.moe_intermediate_size)
    pairs, element = context.rows * moe.num_experts_per_tok, context.precision.weight_bytes
    adapted = expert_adapters.registered(build)
    rows = _sorted_by_expert(build, x, weights, moe)
    gated = context.architecture.gated_mlp
    bias = _bias(build, rows.ids, moe, pairs, (1 + gated) * inner, "mlp.experts.gate_up_proj_bias")
    taken, outer, changed = rows.selected, (1 + gated) * inner, expert_adapters.changed(build, adapted, GATE_UP)
    gate_up = LinearLayer(name=GATE_UP, in_features=width, out_features=outer, element_bytes=element)
    both = _grouped_linear(build, taken, gate_up, pairs, bias, changed)
    both = _masked(build, both, "mlp.experts.mask_gate_up")
    if family_of(context.architecture).experts.clamps:
        product = _clamped_product(build, both, pairs * inner)
    elif gated:
        size = x.num_bytes // (context.rows * width)
        gate, up = tape.split(both, [pairs * inner * size] * 2, "mlp.experts.chunk")
        product = ops.multiply(tape, ops.unary(tape, gate, "mlp.experts.act"), up, "mlp.experts.product")
    else:
        product = activation(build, both, pairs * inner)
    down_bias = _bias(build, rows.ids, moe, pairs, width, "mlp.experts.down_proj_bias")
    for variable in bias:
        tape.hold(variable)
    changed += expert_adapters.changed(build, adapted, DOWN)
    down_proj = LinearLayer(name=DOWN, in_features=inner, out_features=width, element_bytes=element)
    down = _grouped_linear(build, product, down_proj, pairs, down_bias, changed[-1:])
    down = _masked(build, down, "mlp.experts.mask_down")
    total, restored = _weighted_sum(build, down, rows, moe)
    if total.num_bytes != x.num_bytes:
        total = ops.cast(tape, total, x.num_bytes, "mlp.experts.to_narrow")
    # variables of the experts' forward
    for variable in (rows.ids, rows.counted, rows.weights, rows.selected, *down_bias, down, restored):
        tape.hold(variable)
    for variable in (*changed, *(factor for one in adapted.values() for factor in one.factors)):
        tape.hold(variable)  # until the parametrizations are removed
    return total


class _SortedRows(NamedTuple):
    """The rows of all tokens and their experts, sorted by expert."""

    ids: Tensor
    """The sorted ids of the experts."""
    counted: Tensor
    """The same as int32, of which the rows of each expert are counted."""
    order: Tensor
    """The order of the rows, its inverse, and a bool for each row."""
    weights: Tensor
    """The router's weights in this order."""
    selected: Tensor
    """The tokens' hidden states in this order."""


def _sorted_by_expert(build: BlockBuilder, x: Tensor, weights: Tensor, moe: MixtureOfExperts) -> _SortedRows:
    context, tape = build.context, build.tape
    pairs, width = context.rows * moe.num_experts_per_tok, context.architecture.hidden_size
    ids = tape.operation("mlp.experts.sort", [], pairs * INT64, gradients=[])
    counted = tape.operation("mlp.experts.ids_to_int32", [], pairs * INT32, gradients=[])
    order = tape.operation("mlp.experts.order", [], 2 * pairs * INT64 + pairs, gradients=[])
    tokens = tape.operation("mlp.experts.tokens", [order], pairs * INT64, gradients=[])
    size = x.num_bytes // (context.rows * width)
    rows = tape.operation("mlp.experts.take", [x, tokens], pairs * width * size, saves=[tokens])
    in_order = tape.operation("mlp.experts.take_weights", [weights, order], weights.num_bytes, saves=[order])
    return _SortedRows(ids, counted, order, in_order, _masked_in_place(build, rows))


def _weighted_sum(build: BlockBuilder, down: Tensor, rows: _SortedRows, moe: MixtureOfExperts) -> tuple[Tensor, Tensor]:
    """The experts' outputs `down` times the router's weights, restored to the tokens' order and summed over each token's
    experts. Returns the sum and the restored rows."""
    context, tape = build.context, build.tape
    width, pairs = context.architecture.hidden_size, context.rows * moe.num_experts_per_tok
    wide = pairs * width * max(rows.selected.num_bytes // (pairs * width), rows.weights.num_bytes // pairs)
    gone = down.num_bytes if context.backward.frees_recomputed else 0
    weighted = tape.operation(
        "mlp.experts.weighted",
        [down, rows.weights],
        wide,
        saves=[*([down] if rows.weights.requires_grad else []), rows.weights],
        gradients=[(down, down.num_bytes), (rows.weights, rows.weights.num_bytes)],
        # both products, before they are narrowed
        backward_temporary_bytes=2 * wide - gone if wide > down.num_bytes else wide,
    )
    summed = pairs * width * FP32 if context.precision.autocast else wide  # sum is on autocast's fp32 list
    restored = tape.operation("mlp.experts.restore", [weighted, rows.order], wide, saves=[rows.order])
    by_token = tape.operation(  # its backward copies the expanded gradient, before a checkpoint recomputes
        "mlp.experts.by_token", [restored], Output(wide, view_of=restored), gradients=[(restored, wide)]
    )
    total = tape.operation(  # its backward is a view of the gradient if the dtype is the same
        "mlp.experts.sum",
        [by_token],
        summed // moe.num_experts_per_tok,
        gradients=[(by_token, None if summed == wide else wide)],
    )
    return total, restored


def _bias(build: BlockBuilder, ids: Tensor, moe: MixtureOfExperts, rows: int, width: int, name: str) -> list[Tensor]:
    """The bias of each row's expert; empty if experts have no bias."""
    if not moe.expert_bias:
        return []
    context, element = build.context, build.context.precision.weight_bytes
    weight = WeightGradient(f"{name}.grad", moe.num_experts // context.experts.ranks * width * element)
    weights = [weight] if context.weights_get_gradients else []
    size = rows * width * element
    return [build.tape.operation(name, [ids], size, saves=[ids] if weights else [], weight_gradients=weights)]


def _clamped_product(build: BlockBuilder, both: Tensor, elements: int) -> Tensor:
    """gpt-oss's `_apply_gate`: (up + 1) · gate · sigmoid(alpha · gate), with gate and up clamped."""
    tape, half = build.tape, both.num_bytes // 2
    gate, up = (tape.operation(f"mlp.experts.{part}", [both], Output(half, view_of=both)) for part in ("gate", "up"))
    gate = ops.unary(tape, gate, "mlp.experts.clamp_gate", backward_temporary_bytes=elements)
    up = ops.unary(tape, up, "mlp.experts.clamp_up", backward_temporary_bytes=2 * elements)
    scaled = ops.scale(tape, gate, "mlp.experts.alpha")
    glu = ops.multiply(tape, gate, ops.unary_of_result(tape, scaled, "mlp.experts.sigmoid"), "mlp.experts.glu")
    shifted = tape.operation("mlp.experts.plus_one", [up], up.num_bytes, gradients=[(up, None)])
    product = ops.multiply(tape, shifted, glu, "mlp.experts.product")
    for variable in (both, gate, up):  # the argument and two variables refer to them
        tape.hold(variable)
    return product


def _grouped_linear(
    build: BlockBuilder, x: Tensor, one: LinearLayer, rows: int, bias: list[Tensor], changed: list[Tensor]
) -> Tensor:
    """A grouped matrix product of `rows` sorted by expert, and its bias. `one`: the matrix of one expert. `changed`: the
    stacked matrices that an adapter has changed, if there is one."""
    context, name, moe = build.context, one.name, build.context.architecture.moe
    assert moe is not None
    weight = moe.num_experts // context.experts.ranks * one.weight_bytes
    kept = [x, *(changed if x.requires_grad else [])] if changed or context.weights_get_gradients else []
    product = build.tape.operation(
        name,
        [x, *changed],
        rows * one.out_features * one.element_bytes,
        saves=Saved(kept, parameter_bytes=0 if changed else weight),
        weight_gradients=[WeightGradient(f"{name}.grad", weight)] if context.weights_get_gradients else [],
    )
    for rows_of_bias in bias:
        gradients = [(product, None), (rows_of_bias, None)]
        product = build.tape.operation(
            f"{name}.add_bias", [product, rows_of_bias], Output.view(product), gradients=gradients
        )
    return product


def _masked(build: BlockBuilder, x: Tensor, name: str) -> Tensor:
    """`masked_fill` with a mask that other code keeps."""
    return build.tape.operation(name, [x], x.num_bytes)


def _masked_in_place(build: BlockBuilder, x: Tensor) -> Tensor:
    """`masked_fill_` of the rows that experts take."""
    return build.tape.operation("mlp.experts.mask_taken", [x], Output.view(x))


def _looped_experts(build: BlockBuilder, x: Tensor, weights: Tensor, moe: MixtureOfExperts) -> Tensor:
    """transformers 4.48 `models/mixtral/modeling_mixtral.py`: a loop over experts with a one-hot mask of the routing."""
    tape, rows = build.tape, build.context.rows
    routed_rows = rows * moe.num_experts_per_tok
    mask = tape.operation("mlp.router.expert_mask", [], routed_rows * moe.num_experts * INT64)
    tape.operation("mlp.router.done", [mask], 0)
    output = tape.operation("mlp.final_hidden_states", [], x.num_bytes)
    groups = math.gcd(moe.num_experts, MOST_GROUPS) if moe.num_experts > MOST_GROUPS else moe.num_experts
    for taken in rows_of_groups(rows, moe, groups, build.context.experts.fullest_load):
        experts = build.for_rows(taken, moe.num_experts // groups)
        output = _expert(experts, x, weights, output, moe.moe_intermediate_size)
    return output


def rows_of_groups(tokens: int, moe: MixtureOfExperts, groups: int, fullest_load: float) -> list[int]:
    """The rows of `tokens` that each of `groups` equal groups of experts takes. The last expert takes `fullest_load` equal
    shares, at most every token; the others share the rest. It is the last because its backward comes first, when the saved
    tensors of all others are still allocated."""
    experts, routed = moe.num_experts, tokens * moe.num_experts_per_tok
    share = routed // experts
    fullest = min(int(fullest_load * share), tokens)
    ahead = (fullest - share) * experts // max(experts - 1, 1)  # more than any other expert
    equal = (routed - ahead) // groups
    return [equal] * (groups - 1) + [equal + ahead]


def _expert(experts: BlockBuilder, x: Tensor, weights: Tensor, output: Tensor, inner: int) -> Tensor:
    """One expert (or group): take its rows, gate · up, down, multiply by the weights, and add to the output in place."""
    tape, width = experts.tape, experts.context.architecture.hidden_size
    size = x.num_bytes // (experts.context.rows * width)
    taken = tape.operation("mlp.experts.take", [x], experts.rows * width * size)  # backward scatters into all rows
    gate = experts.projection(taken, width, inner, "mlp.experts.gate_proj", False)
    activated = ops.unary(tape, gate, "mlp.experts.act")
    up = experts.projection(taken, width, inner, "mlp.experts.up_proj", False)
    product = ops.multiply(tape, activated, up, "mlp.experts.product")
    down = experts.projection(product, inner, width, "mlp.experts.down_proj", False)
    weighted = tape.operation("mlp.experts.weighted", [down, weights], down.num_bytes, saves=[down, weights])
    return tape.operation(
        "mlp.experts.index_add",
        [output, weighted],
        Output.view(output),
        saves=[weighted],  # `expand_as(source)` in backward reads its shape only (torch tools/autograd/derivatives.yaml)
        gradients=[(output, None), (weighted, weighted.num_bytes)],
    )


def _shared_expert(build: BlockBuilder, x: Tensor, moe: MixtureOfExperts) -> Tensor:
    """The expert that all tokens use."""
    width, inner = build.context.architecture.hidden_size, moe.shared_expert_intermediate_size
    if not build.context.architecture.gated_mlp:
        up = build.projection(x, width, inner, "mlp.shared_expert.up_proj", False)
        product = activation(build, up, build.rows * inner)
        return build.projection(product, inner, width, "mlp.shared_expert.down_proj", False)
    gate = build.projection(x, width, inner, "mlp.shared_expert.gate_proj", False)
    activated = ops.unary(build.tape, gate, "mlp.shared_expert.act")
    up = build.projection(x, width, inner, "mlp.shared_expert.up_proj", False)
    product = ops.multiply(build.tape, activated, up, "mlp.shared_expert.product")
    return build.projection(product, inner, width, "mlp.shared_expert.down_proj", False)
