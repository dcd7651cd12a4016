"""Attention computed step by step, as each family's own code does it: scores, mask, softmax, times v.

Source: transformers 5.17 `models/<model_type>/modeling_<model_type>.py`, `eager_attention_forward`.
"""

from __future__ import annotations

from typing import NamedTuple

from peakcast.core.units import FP32, INT64
from peakcast.jobs.architecture import Architecture
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.traits import attention_key_heads, joins_heads
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.tape import Output, Saved, Tensor, WeightGradient
from peakcast.networks.families import family_of


def eager_attention(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`eager_attention_forward`: scores, softmax (in most families in fp32 and converted back), times v."""
    context, architecture, tape = build.context, build.context.architecture, build.tape
    size, eager = context.precision.compute_bytes, family_of(architecture).eager_attention
    elements = context.batch * architecture.num_attention_heads * context.sequence * context.keys
    query_bytes = q.num_bytes // (context.rows * _query_width(architecture))
    layout = _KeyLayout.of(build)
    k, v = repeat_key_value(build, q, k, v)
    if eager.scores_in_float32 and size != FP32:
        q, k = to_float32(build, q, "q"), to_float32(build, k, "k")
        size = size if context.precision.autocast else FP32
    if eager.joins_heads_first:
        v = _joined(build, v, "v", by_head=layout.cached)
    scaled, named = _scaled_scores(build, (q, k, v), layout, elements, size)
    scores, masked = _masked_scores(build, scaled, elements, size)
    named += masked
    take_softmax = _softmax_with_sinks if architecture.attention_sinks else _softmax
    weights, variables = take_softmax(build, scores, elements, query_bytes)
    if eager.scales_in_place:
        tape.hold(scaled)
    weights = returned = build.dropout(weights, architecture.attention_dropout, elements, "self_attn.attention_dropout")
    if weights.num_bytes != elements * context.precision.compute_bytes:
        weights = ops.cast(tape, weights, elements * context.precision.compute_bytes, "self_attn.weights_cast")
    v_used = _narrowed(build, v if eager.joins_heads_first else _joined(build, v, "v", by_head=layout.by_head))
    summed = v_used.num_bytes // context.keys * context.sequence
    output = ops.matmul(tape, weights, v_used, summed, "self_attn.weighted_sum")
    if context.sequence > 1:  # .transpose(1, 2).contiguous()
        output = ops.copy(tape, output, "self_attn.contiguous")
    for variable in (*named, *variables):
        tape.hold(variable)
    if eager.joins_heads_first or eager.adds_and_fills:
        build.attention_variables.extend((*named, *variables, output))
    if context.attention.drops_weights:
        build.attention_variables.append(returned)
        return output
    build.variables.append(returned)  # the attention module also returns the weights
    build.attention_weights = returned
    return output


def _narrowed(build: BlockBuilder, v: Tensor) -> Tensor:
    """The values as autocast multiplies them: those that a quantised Linear made of a wide input are wide."""
    context, architecture = build.context, build.context.architecture
    width = architecture.mla.v_head_dim if architecture.mla else architecture.head_dim
    size = context.batch * context.keys * architecture.num_attention_heads * width * context.precision.compute_bytes
    wide = context.precision.autocast and v.num_bytes > size
    return ops.cast(build.tape, v, size, "self_attn.v_cast") if wide else v


class _KeyLayout(NamedTuple):
    """How keys and values are laid out in memory."""

    by_head: bool
    """Whether head by head: a cache's tensors, repeated key heads, and concatenations of a rotated and another part; not a
    single head that is expanded, nor what multi-latent attention expands of its cache."""
    cached: bool
    """Whether because a cache has them."""
    single: bool
    """Whether a single head is expanded to all."""

    @classmethod
    def of(cls, build: BlockBuilder) -> _KeyLayout:
        """The layout in the layer that `build` writes."""
        context, architecture = build.context, build.context.architecture
        heads, key_heads = architecture.num_attention_heads, attention_key_heads(architecture)
        single = key_heads == 1 < heads
        apart = context.cache.does not in ("", "passes", "refers")  # the cache's tensors, not those just made
        cached = apart and not ((architecture.mla and context.cache.latent) or single)
        return cls(key_heads not in (1, heads) or cached, cached, single)


def _scaled_scores(
    build: BlockBuilder, inputs: tuple[Tensor, Tensor, Tensor], layout: _KeyLayout, elements: int, size: int
) -> tuple[Tensor, list[Tensor]]:
    """The scores of queries and keys, of `size` bytes each, scaled and capped. Returns them and the tensors to which
    variables of the function refer."""
    (q, k, v), tape, architecture = inputs, build.tape, build.context.architecture
    eager = family_of(architecture).eager_attention
    joined = joins_heads(architecture)
    # under autocast matmul makes narrow copies of wide q and k; with a single token both layouts are the same
    by_head = joined or build.context.sequence == 1
    q_used = _joined(build, _narrow(build, q, size, "q"), "q", by_head=by_head)
    k_used = _joined(build, _narrow(build, k, size, "k"), "k", by_head=(joined and not layout.single) or layout.by_head)
    scores = ops.matmul(tape, q_used, k_used, elements * size, "self_attn.scores")
    named = [scores, q_used, k_used, v] if eager.joins_heads_first else [q, k, v]
    if not eager.joins_heads_first:  # BLOOM's `baddbmm` scales by itself
        scores = ops.scale(tape, scores, "self_attn.scaling", in_place=eager.scales_in_place)
    if eager.softcap:
        scores = ops.scale(tape, scores, "self_attn.softcap.divide")
        scores = ops.scale(tape, ops.unary_of_result(tape, scores, "self_attn.softcap.tanh"), "self_attn.softcap.multiply")
    return scores, named


def _masked_scores(build: BlockBuilder, scores: Tensor, elements: int, size: int) -> tuple[Tensor, list[Tensor]]:
    """The scores, of `size` bytes each, with the mask. Returns them and the tensors to which further variables refer."""
    eager = family_of(build.context.architecture).eager_attention
    if eager.adds_and_fills:
        passed_on = None if size == FP32 else scores.num_bytes
        biased = build.tape.operation("self_attn.add_bias", [scores], elements * FP32, gradients=[(scores, passed_on)])
        filled = build.tape.operation("self_attn.fill_mask", [biased], biased.num_bytes)
        return filled, [filled]
    if build.context.architecture.kind in ("decoder", "hybrid"):
        scores = _add_mask(build, scores, elements)
        return scores, [scores] * eager.joins_heads_first
    return scores, []


def _softmax(build: BlockBuilder, scores: Tensor, elements: int, query_bytes: int) -> tuple[Tensor, list[Tensor]]:
    """The attention weights and the tensors to which variables refer until attention returns. In fp32 and, in most
    families, converted to the queries' dtype, or the values', which is the same; the scores' variable is reassigned only
    after that."""
    context, tape = build.context, build.tape
    wide, eager = elements * FP32, family_of(context.architecture).eager_attention
    narrow = elements * query_bytes
    widened = scores.num_bytes < wide and (eager.softmax == "float32" or context.precision.autocast)
    weights = softmax(build, scores, wide if widened else scores.num_bytes, "self_attn.softmax")
    tape.hold(scores)
    if weights.num_bytes != narrow and eager.softmax != "wide":
        weights = ops.cast(tape, weights, narrow, "self_attn.softmax.to_narrow")
        if eager.softmax == "float32" and not eager.scores_in_float32:  # others convert in a separate statement
            tape.hold(scores)
    return weights, []


def softmax(build: BlockBuilder, x: Tensor, num_bytes: int, name: str) -> Tensor:
    """A softmax whose output has `num_bytes`. For a wider dtype its input is converted first, except float16."""
    if x.num_bytes != num_bytes and not build.context.precision.float16:
        x = ops.cast(build.tape, x, num_bytes, f"{name}.to_float32")
    return build.tape.operation(name, [x], num_bytes, saves=Saved(output=True))


def _add_mask(build: BlockBuilder, scores: Tensor, elements: int) -> Tensor:
    """Scores plus the mask, which has the embeddings' dtype: under autocast a wide mask widens the scores."""
    size = max(scores.num_bytes, elements * build.context.precision.weight_bytes)
    passed_on = None if size == scores.num_bytes else scores.num_bytes
    return build.tape.operation("self_attn.add_mask", [scores], size, gradients=[(scores, passed_on)])


def _softmax_with_sinks(
    build: BlockBuilder, scores: Tensor, elements: int, query_bytes: int
) -> tuple[Tensor, list[Tensor]]:
    """gpt-oss: each row gets one more score, a parameter of the head; the row's largest is subtracted, then softmax, then
    the extra column is cut off. Returns as `_softmax`."""
    context, tape = build.context, build.tape
    heads, rows = context.architecture.num_attention_heads, context.rows * context.architecture.num_attention_heads
    # concatenated with the parameters, in the wider dtype
    element = max(context.precision.weight_bytes, context.precision.compute_bytes)
    whole = (elements + rows) * element
    of_sinks = WeightGradient("self_attn.sinks.grad", heads * context.precision.weight_bytes)
    sinks = [of_sinks] if context.weights_get_gradients else []
    argument = scores
    if scores.num_bytes != elements * element:
        argument = ops.cast(tape, scores, elements * element, "self_attn.sinks.to_float32")
    combined = tape.operation("self_attn.sinks", [argument], whole, weight_gradients=sinks, gradients=[(argument, None)])
    largest = tape.operation("self_attn.sinks.max", [combined], rows * element, saves=Saved(extra_bytes=[rows * INT64]))
    shifted = tape.operation(
        "self_attn.sinks.subtract",
        [combined, largest],
        whole,
        gradients=[(combined, None), (largest, rows * element)],
        backward_temporary_bytes=whole,
    )
    probabilities = ops.unary_of_result(tape, shifted, "self_attn.softmax")
    weights = tape.operation("self_attn.sinks.cut", [probabilities], Output(elements * element, view_of=probabilities))
    if element != context.precision.compute_bytes:
        weights = ops.cast(tape, weights, elements * context.precision.compute_bytes, "self_attn.softmax.to_narrow")
    tape.hold(scores)
    return weights, [shifted, probabilities]


def _joined(build: BlockBuilder, x: Tensor, name: str, *, by_head: bool = False) -> Tensor:
    """x as `matmul` reads it, which joins the batch and head dimensions: a copy, unless x is laid out head by head."""
    return ops.copy(build.tape, x, f"self_attn.joined_{name}") if build.context.batch > 1 and not by_head else x


def _narrow(build: BlockBuilder, x: Tensor, element_bytes: int, name: str) -> Tensor:
    """q, or k for every query head, in the product's dtype."""
    context = build.context
    length = context.sequence if name == "q" else context.keys
    size = context.batch * length * _query_width(context.architecture) * element_bytes
    return ops.cast(build.tape, x, size, f"self_attn.{name}_cast") if x.num_bytes > size else x


def _query_width(architecture: Architecture) -> int:
    """Elements of a token's queries over all heads."""
    mla = architecture.mla
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else architecture.head_dim
    return architecture.num_attention_heads * width


def repeat_key_value(
    build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """`repeat_kv`: copies of k and v for every query head. A single key head is expanded as a view, unless
    `interleaved`."""
    tape, key_heads = build.tape, attention_key_heads(build.context.architecture)
    if key_heads == build.context.architecture.num_attention_heads:
        return k, v
    single = key_heads == 1 and not interleaved  # one head is expanded as a view
    copies = build.context.architecture.num_attention_heads // key_heads
    repeated = tape.operation("self_attn.repeat_k", [k], Output(k.num_bytes * copies, view_of=k if single else None))
    return repeated, tape.operation("self_attn.repeat_v", [v], Output(v.num_bytes * copies, view_of=v if single else None))


def to_float32(build: BlockBuilder, x: Tensor, name: str) -> Tensor:
    """x in fp32."""
    size = build.context.precision.compute_bytes
    return ops.cast(build.tape, x, x.num_bytes // size * FP32, f"self_attn.math.{name}32") if size != FP32 else x
