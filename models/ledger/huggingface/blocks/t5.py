"""T5's encoder and decoder layers as Hugging Face transformers runs them, written on the tape.

Three tensors are shared by the layers of a stack: the bias of relative positions, which the first layer computes and every
self-attention adds to its scores; zeros, which every cross-attention adds in its place; and the encoder's output, which
every decoder layer reads. A layer only borrows them; `encoder_decoder.py` says how long each lives.

Source: transformers 5.17 `models/t5/modeling_t5.py`, `integrations/sdpa_attention.py` (`create_position_bias_mask`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from peakcast.core.units import FP32, INT64, round_up
from peakcast.models.ledger.huggingface.blocks.activations import activation
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.math_attention import step_by_step
from peakcast.models.ledger.huggingface.blocks.token_table import lookup_backward_bytes
from peakcast.models.ledger.parameters.t5 import CROSS, FEED_FORWARD, SELF, up_projections
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient
from peakcast.models.ledger.tape.template import Template

RELATIVE = f"{SELF}.relative_attention_bias"
POSITION_BIAS, CROSS_POSITION_BIAS, ENCODER_STATES = "position_bias", "cross_position_bias", "encoder_states"


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Layer:
    """A layer of T5: of which stack, whether it is the first there, and how long the encoder's output is."""

    context: HFContext
    source_length: int = 0
    """Tokens of the encoder's output; 0 for an encoder's layer."""
    first: bool = False
    """Whether it is its stack's first layer, which computes the bias of relative positions."""

    @property
    def decodes(self) -> bool:
        """Whether it is a decoder's layer."""
        return self.source_length > 0


def position_bias_bytes(context: HFContext) -> int:
    """Bytes of the bias of relative positions [1, num_attention_heads, sequence, sequence], in the table's dtype."""
    return context.architecture.num_attention_heads * context.sequence**2 * context.precision.weight_bytes


def cross_position_bias_bytes(context: HFContext, source_length: int) -> int:
    """Bytes of the zeros that cross-attention adds [1, num_attention_heads, sequence, source_length], in the queries'
    dtype."""
    return context.architecture.num_attention_heads * context.sequence * source_length * context.precision.compute_bytes


def computes_self_attention_in_steps(context: HFContext) -> bool:
    """Whether sdpa computes self-attention in single steps (its math path): the bias is the transpose of a lookup
    [sequence, sequence, heads], so its rows are not contiguous, and no fused kernel accepts such a mask (torch
    `cuda/sdp_utils.cpp` check_last_dim_stride_equals_1_dense)."""
    return context.attention.implementation != "eager" and context.sequence > 1 < context.architecture.num_attention_heads


@lru_cache(maxsize=64)
def t5_layer(layer: T5Layer) -> Template:
    """One layer: [micro_batch_size, sequence_length, hidden_size] in and out."""
    context = layer.context
    tape = Tape(gpu=context.gpu, saves_on_cpu=context.backward.saves_on_cpu)
    build = BlockBuilder(tape, context)
    owned = not context.backward.checkpointed
    hidden = tape.input(context.input_bytes, requires_grad=context.layer.input_requires_grad, owned=owned)
    size = position_bias_bytes(context)
    bias = tape.borrowed(size, POSITION_BIAS, requires_grad=context.trainable)
    named: list[Tensor] = []
    """Tensors that the layer's variable `_` has referred to, the last one still: an attention's weights, until the next
    attention returns."""
    x = _attend(build, layer, hidden, SELF, None, bias, named)
    if layer.decodes:
        states = context.batch * layer.source_length * context.architecture.hidden_size * context.stream_bytes
        source = tape.borrowed(states, ENCODER_STATES)
        size = cross_position_bias_bytes(context, layer.source_length)
        zeros = tape.borrowed(size, CROSS_POSITION_BIAS, requires_grad=context.backward.checkpointed)
        x = _attend(build, layer, x, CROSS, source, zeros, named)
    output = _feed_forward(build, x)
    for variable in (hidden, *named[-1:], *build.variables):
        tape.hold(variable)
    return tape.finish(output, cached_matmuls=context.backward.cached_matmuls, cached_kinds=context.backward.cached_kinds)


@lru_cache(maxsize=64)
def encoder_end(context: HFContext) -> Template:
    """The encoder's last norm and dropout, whose output the decoder reads."""
    tape = Tape(gpu=context.gpu, saves_on_cpu=context.backward.saves_on_cpu)
    build = BlockBuilder(tape, context)
    rows, width = context.rows, context.architecture.hidden_size
    normed = build.norm(tape.input(rows * width * context.stream_bytes), width, "encoder.final_layer_norm")
    states = build.dropout(normed, context.architecture.hidden_dropout, rows * width, "encoder.dropout")
    # `encoder_decoder.py` holds the output for the decoder's layers, so this template does not count it
    states.storage.num_bytes = 0
    return tape.finish(states)


# -- attention ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """What one attention is computed from. `key_length`: keys of each sequence. `masked`: whether it is causal."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    key_length: int
    masked: bool


def _cached(tape: Tape, k: Tensor, v: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Keys and values in the cache, which `use_cache` turns on: `torch.cat` with an empty cache copies them."""
    copies = ops.copy(tape, k, f"{name}.cached_k"), ops.copy(tape, v, f"{name}.cached_v")
    for tensor in (k, v):
        tape.hold(tensor)
    return copies


def _attend(
    build: BlockBuilder,
    layer: T5Layer,
    x: Tensor,
    name: str,
    source: Tensor | None,
    bias: Tensor,
    named: list[Tensor],
) -> Tensor:
    """An attention with its norm, dropout and residual addition. It attends to `source`, or to its own sequence."""
    context, architecture, tape = build.context, build.context.architecture, build.tape
    width, inner, rows = architecture.hidden_size, architecture.query_size, context.rows
    normed = build.norm(x, width, f"{name}.layer_norm")
    key_length = layer.source_length if source is not None else context.sequence
    keys, key_build = source or normed, build.for_rows(context.batch * key_length, 1)
    q = build.projection(normed, width, inner, f"{name}.q", False)
    k = key_build.projection(keys, width, inner, f"{name}.k", False)
    v = key_build.projection(keys, width, inner, f"{name}.v", False)
    if layer.decodes and not context.backward.checkpointed:
        k, v = _cached(tape, k, v, name)
    if source is None and layer.first:
        _relative_positions(build, bias, bidirectional=not layer.decodes)
    masked = source is None and layer.decodes
    given = _Attention(name=name, q=q, k=k, v=v, bias=bias, key_length=key_length, masked=masked)
    if context.attention.implementation == "eager":
        y, weights = _eager(build, given)
        named.append(weights)  # attention returns the weights too
    elif source is None and computes_self_attention_in_steps(context):
        y = _math(build, given)
    else:
        y = _efficient(build, given)
    y = build.projection(y, inner, width, f"{name}.o", False)
    for variable in (normed, q, k, v):
        tape.hold(variable)
    y = _residual(build, x, y, rows * width, name)
    for variable in (normed, *named):
        tape.hold(variable)
    return y


def _residual(build: BlockBuilder, x: Tensor, y: Tensor, elements: int, name: str) -> Tensor:
    """Dropout and the residual addition."""
    dropped = build.dropout(y, build.context.architecture.hidden_dropout, elements, f"{name}.dropout")
    total = ops.add(build.tape, x, dropped, f"{name}.residual_add")
    build.tape.hold(y)
    return total


def _relative_positions(build: BlockBuilder, bias: Tensor, *, bidirectional: bool) -> None:
    """`compute_bias`: distances mapped to buckets in int64, then a lookup that saves the buckets."""
    context, architecture = build.context, build.context.architecture
    pairs, heads = context.sequence**2, architecture.num_attention_heads
    table = architecture.relative_attention_num_buckets * heads * context.precision.weight_bytes
    # live at most: six int64 tensors and a bool (both directions), five and a bool (one)
    temporary = pairs * (6 * INT64 + 1 if bidirectional else 5 * INT64 + 1)
    distances = build.tape.operation("relative_position", [], pairs * INT64, gradients=[])
    buckets = build.tape.operation(
        "relative_position_bucket",
        [distances],
        pairs * INT64,
        gradients=[],
        forward_temporary_bytes=temporary - 2 * pairs * INT64,
    )
    inside = 0
    if context.gpu:  # and a contiguous copy of the gradient, which comes with its heads first
        inside = bias.num_bytes + lookup_backward_bytes(pairs, heads, architecture.relative_attention_num_buckets)
    trains = [WeightGradient(f"{RELATIVE}.weight.grad", table)] if context.trainable else []
    with build.tape.marked(Mark.RELATIVE_POSITIONS):
        build.tape.operation(
            RELATIVE,
            [buckets],
            0,
            saves=[buckets],
            gradients=[],
            weight_gradients=trains,
            backward_temporary_bytes=inside,
        )
    build.tape.hold(distances)


def _math(build: BlockBuilder, given: _Attention) -> Tensor:
    """sdpa's math path with the bias as an additive mask. The decoder's cache has copied k and v head by head."""
    wide = _position_bias_mask(build, given)
    mask = _narrow_mask(build, wide, given)
    cached = given.masked and not build.context.backward.checkpointed
    output = step_by_step(build, given.q, given.k, given.v, mask, by_head=cached)
    build.tape.hold(wide)
    return output


def _position_bias_mask(build: BlockBuilder, given: _Attention) -> Tensor:
    """`create_position_bias_mask`: the bias itself, or with a causal mask a new tensor in every layer."""
    name, bias = given.name, given.bias
    if not given.masked:
        return bias
    kept = [build.context.sequence * given.key_length] if bias.requires_grad else []  # where() keeps its bool condition
    return build.tape.operation(f"{name}.position_bias_mask", [bias], bias.num_bytes, saves=Saved(extra_bytes=kept))


def _narrow_mask(build: BlockBuilder, mask: Tensor, given: _Attention) -> Tensor:
    """The mask as attention gets it: autocast casts every floating-point argument."""
    context, scores = build.context, build.context.sequence * given.key_length
    narrow = scores * context.architecture.num_attention_heads * context.precision.compute_bytes
    return ops.cast(build.tape, mask, narrow, f"{given.name}.mask_cast") if mask.num_bytes > narrow else mask


def _efficient(build: BlockBuilder, given: _Attention) -> Tensor:
    """The memory-efficient kernel with the bias as an additive mask: for cross-attention, whose zeros are contiguous, and
    self-attention with one head or one token."""
    context, tape, heads = build.context, build.tape, build.context.architecture.num_attention_heads
    name, q, k, v = given.name, given.q, given.k, given.v
    wide = _position_bias_mask(build, given)
    mask = _narrow_mask(build, wide, given)
    if mask.requires_grad and context.batch > 1:  # a view for every sequence, whose gradients are summed
        mask = tape.operation(f"{name}.expand", [mask], Output(context.batch * mask.num_bytes, view_of=mask))
    inside = FP32 * context.rows * heads if context.gpu else 0  # the row sums "delta"
    output = tape.operation(
        f"{name}.efficient_attention",
        [q, k, v, mask],
        Output(q.num_bytes, kind="attention"),
        saves=Saved(
            [q, k, v, mask],
            output=True,
            extra_bytes=[FP32 * context.batch * heads * round_up(context.sequence, 32), INT64, INT64],
        ),
        backward_temporary_bytes=inside,
    )
    tape.hold(wide)
    return output


def _eager(build: BlockBuilder, given: _Attention) -> tuple[Tensor, Tensor]:
    """`eager_attention_forward`: the scores are multiplied by one, bias and mask are added, and the softmax is in the
    scores' own dtype. Returns the output and the attention weights."""
    context, architecture, tape = build.context, build.context.architecture, build.tape
    name, q, bias = given.name, given.q, given.bias
    elements = context.batch * architecture.num_attention_heads * context.sequence * given.key_length
    scores = ops.matmul(tape, q, given.k, elements * context.precision.compute_bytes, f"{name}.scores")
    scores = ops.scale(tape, scores, f"{name}.scaling")
    # a bias looked up in a wide table widens the scores
    size = max(scores.num_bytes, bias.num_bytes * context.batch)
    narrowed = None if scores.num_bytes == size else scores.num_bytes
    summed = None if context.batch == 1 else bias.num_bytes
    scores = tape.operation(f"{name}.add_bias", [scores, bias], size, gradients=[(scores, narrowed), (bias, summed)])
    if given.masked:
        scores = tape.operation(f"{name}.add_mask", [scores], scores.num_bytes, gradients=[(scores, None)])
    wide = scores
    if context.precision.autocast and scores.num_bytes < elements * FP32:  # softmax is on autocast's fp32 list
        wide = ops.cast(tape, scores, elements * FP32, f"{name}.softmax.to_float32")
    weights = ops.unary_of_result(tape, wide, f"{name}.softmax")
    tape.hold(scores)
    weights = build.dropout(weights, architecture.attention_dropout, elements, f"{name}.attention_dropout")
    returned = weights
    if weights.num_bytes > elements * context.precision.compute_bytes:
        weights = ops.cast(tape, weights, elements * context.precision.compute_bytes, f"{name}.weights_cast")
    output = ops.matmul(tape, weights, given.v, q.num_bytes, f"{name}.weighted_sum", forward_temporary_bytes=q.num_bytes)
    return output, returned


# -- feed-forward -------------------------------------------------------------------------------------------------------


def _feed_forward(build: BlockBuilder, x: Tensor) -> Tensor:
    """The feed-forward with its norm and residual addition."""
    context, architecture, tape = build.context, build.context.architecture, build.tape
    width, inner, rows = architecture.hidden_size, architecture.intermediate_size, context.rows
    normed = build.norm(x, width, f"{FEED_FORWARD}.layer_norm")
    up = [f"{FEED_FORWARD}.{name}" for name in up_projections(architecture)]
    y = activation(build, build.projection(normed, width, inner, up[0], False), rows * inner)
    variables = [normed]
    if architecture.gated_mlp:
        variables += [y, build.projection(normed, width, inner, up[1], False)]
        recomputed = context.backward.frees_recomputed
        y = ops.multiply(tape, variables[1], variables[2], f"{FEED_FORWARD}.product", recomputed=recomputed)
    y = build.dropout(y, architecture.hidden_dropout, rows * inner, f"{FEED_FORWARD}.inner_dropout")
    wide = rows * inner * context.precision.weight_bytes
    if context.precision.autocast and y.num_bytes < wide:  # to `wo.weight.dtype`; autocast narrows it again
        y = ops.cast(tape, y, wide, f"{FEED_FORWARD}.to_weight_dtype")
    variables.append(y)
    y = build.projection(y, inner, width, f"{FEED_FORWARD}.wo", False)
    for tensor in variables:
        tape.hold(tensor)
    return _residual(build, x, y, rows * width, FEED_FORWARD)
