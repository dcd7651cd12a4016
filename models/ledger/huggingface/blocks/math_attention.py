"""sdpa's math path, which computes attention step by step where no kernel can (torch 2.11-2.13 `attention.cpp`
`_scaled_dot_product_attention_math`), and the dtype in which attention runs.
"""

from __future__ import annotations

from peakcast.core.units import FP32
from peakcast.jobs.architecture import Architecture
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.eager_attention import repeat_key_value, to_float32
from peakcast.models.ledger.huggingface.blocks.traits import attention_key_heads
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.tape import Output, Saved, Tensor
from peakcast.networks.families import family_of


def step_by_step(
    build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, by_head: bool = False
) -> Tensor:
    """Attention in fp32, every intermediate of which lives until it returns.

    `bias`: an additive mask [1, heads, sequence, keys] in place of the model's. `by_head`: k and v lie head by head."""
    context, tape, architecture = build.context, build.tape, build.context.architecture
    heads, narrow = architecture.num_attention_heads, q.num_bytes
    q, k, v = to_compute_dtype(build, q, k, v)
    local = [q32, k32, v32] = [to_float32(build, x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    query = ops.scale(tape, q32, "self_attn.math.scale_q")
    local += [query, *(_masks(build) if bias is None else [])]
    grouped = attention_key_heads(architecture) != heads
    if grouped and family_of(architecture).attention.shares_key_heads:
        k32, v32 = repeat_key_value(build, q32, k32, v32, interleaved=True)
        local += [k32, v32]
    scaled = ops.scale(tape, k32, "self_attn.math.scale_k")
    # matmul joins the batch and head dimensions, which are not adjacent in what lies token by token
    apart = context.batch > 1 < context.sequence
    copied = apart and not grouped and not by_head
    key = _broadcast_heads(build, q32, scaled)
    if apart:
        query = ops.copy(tape, query, "self_attn.math.contiguous_q")
    key = ops.copy(tape, key, "self_attn.math.contiguous_k") if copied else key
    elements = context.batch * heads * context.sequence * context.keys
    scores = ops.matmul(tape, query, key, elements * FP32, "self_attn.math.scores")
    tape.hold(scaled)  # the product's argument
    scores = ops.in_place(tape, scores, "self_attn.math.add_mask") if bias is None else _add_bias(build, scores, bias)
    weights, narrow_copies = _weights(build, scores, elements)
    local += narrow_copies
    value = _broadcast_heads(build, q32, v32)
    value = ops.copy(tape, value, "self_attn.math.contiguous_v") if copied else value
    output = ops.matmul(tape, weights, value, q32.num_bytes, "self_attn.math.output")
    local.append(output)
    if output.num_bytes != narrow:
        output = ops.cast(tape, output, narrow, "self_attn.math.to_narrow")
    for tensor in local if bias is None else (*local, bias):
        tape.hold(tensor)
    # the output is laid out head by head; the output projection needs it token by token
    return ops.copy(tape, output, "self_attn.contiguous") if context.sequence > 1 else output


def _masks(build: BlockBuilder) -> list[Tensor]:
    """The mask as it is added to the scores: one tensor, or none for a single token."""
    context = build.context
    if not (context.layer.masked or context.sequence > 1):
        return []
    size = context.layer_mask_bytes if context.layer.masked else FP32 * context.sequence * context.keys
    return [build.tape.operation("self_attn.math.mask", [], size, gradients=[])]


def _weights(build: BlockBuilder, scores: Tensor, elements: int) -> tuple[Tensor, list[Tensor]]:
    """The attention weights of `elements` scores, and their copy in the compute dtype, if that is narrower."""
    context, tape = build.context, build.tape
    # inside one operator, _safe_softmax also makes a bool for every score and selects into a new tensor
    hidden = 5 * elements if context.gpu else 0
    weights = tape.operation(
        "self_attn.math.softmax", [scores], scores.num_bytes, saves=Saved(output=True), forward_temporary_bytes=hidden
    )
    weights = build.dropout(weights, context.architecture.attention_dropout, elements, "self_attn.math.dropout")
    if context.precision.compute_bytes == FP32:
        return weights, []
    size = elements * context.precision.compute_bytes
    return weights, [tape.operation("self_attn.math.weights", [weights], size, gradients=[])]  # an output that nothing uses


def _add_bias(build: BlockBuilder, scores: Tensor, bias: Tensor) -> Tensor:
    """`bias` added to the scores in place. Its gradient is theirs, summed over the batch in fp32, then in its own dtype."""
    batch = build.context.batch
    summed = scores.num_bytes // batch
    same = batch == 1 and bias.num_bytes == summed
    return build.tape.operation(
        "self_attn.math.add_bias",
        [scores, bias],
        Output.view(scores),
        gradients=[(scores, None), (bias, None if same else bias.num_bytes)],
        backward_temporary_bytes=summed if batch > 1 and bias.requires_grad and bias.num_bytes < summed else 0,
    )


def _broadcast_heads(build: BlockBuilder, q: Tensor, x: Tensor) -> Tensor:
    """x with its single key head expanded to all query heads by matmul: a view for one sequence, else a copy."""
    size = q.num_bytes // build.context.sequence * build.context.keys
    if x.num_bytes == size:
        return x
    view = x if build.context.batch == 1 else None
    return build.tape.operation("self_attn.math.expand", [x], Output(size, view_of=view))


def to_compute_dtype(
    build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor, *, repeated: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype in which attention runs. Under autocast it saves narrow copies of wide ones. `repeated`: k
    and v have been repeated for every query head."""
    context, architecture = build.context, build.context.architecture
    if not context.precision.autocast:
        return q, k, v
    widths = architecture_widths(architecture)
    if repeated and architecture.mla is None:
        widths = (widths[0],) * 3
    narrow = [context.rows * width * context.precision.compute_bytes for width in widths]
    q, k, v = (
        ops.cast(build.tape, x, size, f"self_attn.{name}_cast") if x.num_bytes > size else x
        for x, size, name in zip((q, k, v), narrow, ("q", "k", "v"), strict=True)
    )
    return q, k, v


def architecture_widths(architecture: Architecture) -> tuple[int, int, int]:
    """Elements per token of q, k and v as the kernel gets them."""
    if architecture.mla is not None:
        heads, mla = architecture.num_attention_heads, architecture.mla
        width = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        return width, width, heads * mla.v_head_dim
    return architecture.query_size, architecture.key_value_size, architecture.key_value_size
