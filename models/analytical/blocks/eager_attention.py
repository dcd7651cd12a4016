"""Attention step by step, as each family's own code has it: scores, mask, softmax, times v.

Source: transformers 5.17 `models/<model_type>/modeling_<model_type>.py`, `eager_attention_forward`.
"""

from __future__ import annotations

from peakcast.models.analytical.blocks import primitives as ops
from peakcast.models.analytical.blocks.hf_builder import BlockBuilder
from peakcast.models.analytical.blocks.hf_traits import attention_key_heads, traits
from peakcast.models.analytical.tape import Tensor, WeightGradient

FP32 = 4
INT64 = 8


def eager_attention(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`eager_attention_forward`: scores, softmax (in fp32 and converted back, in most families), times v."""
    context, architecture, tape = build.context, build.context.architecture, build.tape
    heads, size = architecture.num_attention_heads, context.compute_bytes
    family = traits(architecture)
    elements = context.batch * heads * context.sequence * (context.key_length or context.sequence)
    k, v = repeat_key_value(build, q, k, v)
    if family.scores_in_float32 and size != FP32:
        q, k, size = to_float32(build, q, "q"), to_float32(build, k, "k"), FP32
    if family.joins_heads_first:
        v = _joined(build, v, "v")
    # repeated key heads are laid out so, and what is concatenated of a rotated and another part
    repeated = attention_key_heads(architecture) not in (1, architecture.num_attention_heads)
    in_parts = architecture.rotary_in_parts or family.rotary_fraction < 1 or family.rotary_in_halves
    joined = architecture.mla is not None or in_parts
    q_used = _joined(build, q, "q", by_head=joined)
    k_used = _joined(build, k, "k", by_head=joined or repeated)
    scores = ops.matmul(tape, q_used, k_used, elements * size, "self_attn.scores")
    named = [scores, q_used, k_used, v] if family.joins_heads_first else [q, k]
    if not family.joins_heads_first:  # BLOOM's `baddbmm` scales by itself
        scores = ops.scale(tape, scores, "self_attn.scaling", where_it_stands=family.scores_scaled_in_place)
    if family.attention_softcap:
        scores = ops.scale(tape, scores, "self_attn.softcap.divide")
        scores = ops.scale(tape, ops.unary_of_result(tape, scores, "self_attn.softcap.tanh"), "self_attn.softcap.multiply")
    scaled = scores
    if family.scores_biased_and_filled:
        passed_on = None if size == FP32 else scores.num_bytes
        biased = tape.operation("self_attn.add_bias", [scores], elements * FP32, gradients=[(scores, passed_on)])
        scores = tape.operation("self_attn.fill_mask", [biased], biased.num_bytes)
        named.append(scores)
    elif architecture.kind in ("decoder", "hybrid"):
        scores = tape.operation("self_attn.add_mask", [scores], scores.num_bytes, gradients=[(scores, None)])
    softmax = _softmax_with_sinks if architecture.attention_sinks else _softmax
    weights, variables = softmax(build, scores, elements)
    if family.scores_scaled_in_place:
        tape.hold(scaled)
    weights = build.dropout(weights, architecture.attention_dropout, elements, "self_attn.attention_dropout")
    v_used = v if family.joins_heads_first else _joined(build, v, "v", by_head=repeated)
    # the product, before .transpose(1, 2).contiguous()
    output = ops.matmul(tape, weights, v_used, v.num_bytes, "self_attn.weighted_sum", forward_temporary_bytes=v.num_bytes)
    for variable in (*named, *variables):
        tape.hold(variable)
    build.variables.append(weights)  # the attention module returns them too
    return output


def _softmax(build: BlockBuilder, scores: Tensor, elements: int) -> tuple[Tensor, list[Tensor]]:
    """In fp32 and converted back, in most families; the variable of the scores is assigned only when that has returned.
    Also what is named to the end of attention."""
    context, tape = build.context, build.tape
    narrow, wide, family = elements * context.compute_bytes, elements * FP32, traits(context.architecture)
    widened = scores.num_bytes < wide and (family.eager_softmax == "float32" or context.autocast)
    argument = ops.cast(tape, scores, wide, "self_attn.softmax.to_float32") if widened else scores
    weights = ops.unary_of_result(tape, argument, "self_attn.softmax")
    tape.hold(scores)
    if weights.num_bytes != narrow:
        weights = ops.cast(tape, weights, narrow, "self_attn.softmax.to_narrow")
        if not family.scores_in_float32:  # whose code converts in a line of its own
            tape.hold(scores)
    return weights, []


def _softmax_with_sinks(build: BlockBuilder, scores: Tensor, elements: int) -> tuple[Tensor, list[Tensor]]:
    """gpt-oss: one score more per row, a parameter of each head; less its largest, softmaxed, and cut off again."""
    context, tape = build.context, build.tape
    heads, rows = context.architecture.num_attention_heads, context.rows * context.architecture.num_attention_heads
    element = FP32 if context.autocast else context.compute_bytes  # concatenated to the parameters, in their dtype
    whole = (elements + rows) * element
    sinks = [WeightGradient("self_attn.sinks.grad", heads * context.weight_bytes)] if context.trainable else []
    argument = scores
    if scores.num_bytes != elements * element:
        argument = ops.cast(tape, scores, elements * element, "self_attn.sinks.to_float32")
    combined = tape.operation(
        "self_attn.sinks", [argument], whole, weight_gradients=sinks, gradients=[(argument, None)]
    )
    largest = tape.operation("self_attn.sinks.max", [combined], rows * element, extra_saved_bytes=[rows * INT64])
    shifted = tape.operation(
        "self_attn.sinks.subtract",
        [combined, largest],
        whole,
        gradients=[(combined, None), (largest, rows * element)],
        backward_temporary_bytes=whole,
    )
    probabilities = ops.unary_of_result(tape, shifted, "self_attn.softmax")
    weights = tape.operation("self_attn.sinks.cut", [probabilities], elements * element, view_of=probabilities)
    tape.hold(scores)
    if element != context.compute_bytes:
        weights = ops.cast(tape, weights, elements * context.compute_bytes, "self_attn.softmax.to_narrow")
    return weights, [shifted]


def _joined(build: BlockBuilder, x: Tensor, name: str, *, by_head: bool = False) -> Tensor:
    """`matmul` joins the dimensions of sequences and heads: a copy, unless the tensor is laid out head by head."""
    return ops.copy(build.tape, x, f"self_attn.joined_{name}") if build.context.batch > 1 and not by_head else x


def repeat_key_value(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`repeat_kv`: copies of k and v for every query head (of a width shared by q and k)."""
    tape, key_heads = build.tape, attention_key_heads(build.context.architecture)
    if key_heads == build.context.architecture.num_attention_heads:
        return k, v
    single = key_heads == 1  # one head is expanded as a view
    repeated = tape.operation("self_attn.repeat_k", [k], q.num_bytes, view_of=k if single else None)
    return repeated, tape.operation("self_attn.repeat_v", [v], q.num_bytes, view_of=v if single else None)


def to_float32(build: BlockBuilder, x: Tensor, name: str) -> Tensor:
    size = build.context.compute_bytes
    return ops.cast(build.tape, x, x.num_bytes // size * FP32, f"self_attn.math.{name}32") if size != FP32 else x
