"""Attention between q, k, v and the output, by kernel: what each allocates and autograd keeps.

Shapes: q [batch, heads, sequence, head_dim], k and v [batch, key_value_heads, sequence, head_dim]. Sizes come from the
tensors, so a kernel also serves heads of unequal widths. Sources: torch 2.11-2.13 aten/src/ATen/native/transformers
(`attention.cpp`, `cuda/sdp_utils.cpp`, `cuda/attention.cu`), transformers 5.17 `integrations/`.
"""

from __future__ import annotations

from collections.abc import Callable

from peakcast.architecture import Architecture
from peakcast.models.analytical.blocks import primitives as ops
from peakcast.models.analytical.blocks.eager_attention import eager_attention, repeat_key_value, to_float32
from peakcast.models.analytical.blocks.hf_builder import BlockBuilder
from peakcast.models.analytical.blocks.hf_context import HFContext
from peakcast.models.analytical.blocks.hf_traits import attention_key_heads, traits
from peakcast.models.analytical.blocks.ring_attention import RingTensors, backward_bytes, forward_bytes
from peakcast.models.analytical.tape import Tensor
from peakcast.units import round_up

FP32 = 4
INT64 = 8
Kernel = Callable[[BlockBuilder, Tensor, Tensor, Tensor], Tensor]


def attention(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v to the heads' outputs, by the kernel that the job takes."""
    return KERNELS[attention_kernel(build.context)](build, q, k, v)


def attention_kernel(context: HFContext) -> str:
    """The kernel of one layer. sdpa: flash needs half precision, no mask, one head width of at most 256 and shared key
    heads; the memory-efficient kernel as many key as query heads (torch <= 2.13, `check_batch_size_and_num_heads_dense`);
    what neither takes is computed step by step."""
    if context.ring.ranks > 1:
        return "ring"
    if context.attention == "eager":
        return "eager"
    if context.attention in ("flash_attention_2", "flex"):
        return context.attention
    architecture = context.architecture
    grouped = attention_key_heads(architecture) != architecture.num_attention_heads
    one_width = architecture.mla is None and architecture.head_dim <= 256
    if context.masked:
        return "efficient" if traits(architecture).grouped_query_kernel or not grouped else "math"
    if context.compute_bytes != FP32 and one_width and (traits(architecture).grouped_query_kernel or not grouped):
        return "flash"
    return "math" if grouped else "efficient"


def _flash(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = build.context
    q, k, v = _to_compute_dtype(build, q, k, v)
    whole, taken, unpadded = q.num_bytes, context.rows, False
    if context.valid_rows and context.attention == "flash_attention_2":
        taken, unpadded = context.valid_rows, True
        q, k, v = (_without_padding(build, x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    log_sum_exp = FP32 * taken * context.architecture.num_attention_heads
    output = build.tape.operation(
        "self_attn.flash_attention",
        [q, k, v],
        q.num_bytes,
        saves=[q, k, v],
        saves_output=True,
        extra_saved_bytes=[log_sum_exp, INT64, INT64],  # softmax statistics, random seed and offset
        backward_temporary_bytes=flash_backward_bytes(context) if context.kernel_temporaries else 0,
        kind="" if context.attention == "flash_attention_2" else "attention",  # the package's is on no list of what is kept
    )
    output = build.tape.operation("self_attn.pad", [output], whole) if unpadded else output
    if traits(context.architecture).returns_attention_weights:  # in their place
        build.variables.append(output)
    return output


def _ring(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's ring attention over the ranks that share the sequence: what it makes in passing is counted at its fullest."""
    context = build.context
    q, k, v = _to_compute_dtype(build, q, k, v)
    statistics = FP32 * context.rows * context.architecture.num_attention_heads
    tensors = RingTensors(query=q.num_bytes, key=k.num_bytes, element=context.compute_bytes, statistics=statistics)
    gradients = q.num_bytes + k.num_bytes + v.num_bytes
    output = build.tape.operation(
        "self_attn.ring_attention",
        [q, k, v],
        q.num_bytes,
        saves=[q, k, v],
        saves_output=True,
        extra_saved_bytes=[statistics, INT64, INT64],
        forward_temporary_bytes=forward_bytes(context.ring, tensors) - q.num_bytes - statistics,
        backward_temporary_bytes=backward_bytes(context.ring, tensors)
        - gradients
        + (flash_backward_bytes(context) if context.kernel_temporaries else 0),
        kind="attention",
    )
    return ops.copy(build.tape, output, "self_attn.contiguous") if context.ring.copies_output else output


def _without_padding(build: BlockBuilder, x: Tensor, name: str) -> Tensor:
    """The tokens that are no padding, gathered; the gradient is scattered into zeros of full size. Traced with
    kernels that do nothing (`tracing/flash_attention_stub.py`).
    Source: transformers 5.17 modeling_flash_attention_utils.py `_upad_input`, `_pad_input`."""
    context = build.context
    return build.tape.operation(f"self_attn.unpad_{name}", [x], x.num_bytes // context.rows * context.valid_rows)


def _flex(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention, compiled (torch 2.13 `_higher_order_ops/flex_attention.py`; no trace runs it): keeps fp32 statistics;
    the masks' block indices belong to the model. Backward makes the row sums "delta" in fp32."""
    context = build.context
    q, k, v = _to_compute_dtype(build, q, k, v)
    statistics = FP32 * context.rows * context.architecture.num_attention_heads
    return build.tape.operation(
        "self_attn.flex_attention",
        [q, k, v],
        q.num_bytes,
        saves=[q, k, v],
        saves_output=True,
        extra_saved_bytes=[statistics],
        backward_temporary_bytes=statistics,
        kind="attention",
    )


def flex_block_mask_bytes(batch: int, sequence: int) -> int:
    """Bytes of a BlockMask: int32 counts and indices of 128-token blocks, by rows and by columns, partial and full.
    Source: torch 2.13 `nn/attention/flex_attention.py` BlockMask."""
    blocks = -(-sequence // 128)
    return 4 * 4 * batch * (blocks + blocks**2)


def flash_backward_bytes(context: HFContext) -> int:
    """Bytes that the flash-attention backward allocates inside itself: fp32 dq accumulator and row sums, and for grouped
    queries dk, dv at all heads. Source: flash-attention 2.8.3 csrc/flash_attn/flash_api.cpp mha_bwd."""
    architecture = context.architecture
    heads, dim = architecture.num_attention_heads, architecture.head_dim
    rows = context.valid_rows or context.rows
    padded = context.batch * round_up(context.sequence, 128)
    if context.valid_rows or context.num_sequences:  # mha_varlen_bwd: 128 rows more for each sequence
        padded = rows + 128 * (context.num_sequences or context.batch)
    accumulator = FP32 * heads * padded * round_up(dim, 64 if dim > 128 else 32)
    row_sums = FP32 * heads * padded
    expanded = 0
    if architecture.num_key_value_heads != heads:
        expanded = 2 * context.compute_bytes * rows * heads * dim
    return accumulator + row_sums + expanded


def _efficient(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The memory-efficient kernel. A bool mask becomes an additive one in q's dtype for every layer anew
    (`convert_boolean_attn_mask`), which is kept, expanded to all heads: a copy on the host, and what comes back from it,
    is as large as that. Key heads are copied for every query head by transformers."""
    context, tape = build.context, build.tape
    heads = context.architecture.num_attention_heads
    k, v = repeated = repeat_key_value(build, q, k, v)
    q, k, v = _to_compute_dtype(build, q, k, v, repeated=True)
    bias, expanded = [], 0
    if context.masked and "mask" not in context.compiled:  # compiled, one is made for all layers (`hold_masks`)
        size = context.batch * context.sequence**2 * context.compute_bytes
        bias.append(tape.operation("self_attn.additive_mask", [], size, gradients=[]))
        expanded = size * (heads - 1) * context.saves_on_cpu
    output = tape.operation(
        "self_attn.efficient_attention",
        [q, k, v, *bias],
        v.num_bytes,
        saves=[q, k, v, *bias],
        saves_output=True,
        extra_saved_bytes=[FP32 * context.batch * heads * round_up(context.sequence, 32), INT64, INT64],
        # the row sums "delta" of the backward (attention_backward.cu)
        backward_temporary_bytes=expanded + (FP32 * context.rows * heads if context.kernel_temporaries else 0),
        kind="attention",
    )
    for variable in repeated:  # of transformers' `sdpa_attention_forward`
        tape.hold(variable)
    return output


def _math(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`_scaled_dot_product_attention_math`: everything in fp32 and every intermediate alive until it returns."""
    context, tape, architecture = build.context, build.tape, build.context.architecture
    heads, narrow = architecture.num_attention_heads, q.num_bytes
    q, k, v = _to_compute_dtype(build, q, k, v)
    local = [q32, k32, v32] = [to_float32(build, x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    query = ops.scale(tape, q32, "self_attn.math.scale_q")
    local.append(query)
    if traits(architecture).grouped_query_kernel:
        k32, v32 = repeat_key_value(build, q32, k32, v32, interleaved=True)
        local += [k32, v32]
    key = ops.scale(tape, k32, "self_attn.math.scale_k")
    key = _broadcast_heads(build, q32, key)
    elements = context.batch * heads * context.sequence**2
    mask_bytes = (context.batch * context.compute_bytes if context.masked else FP32) * context.sequence**2
    local.append(tape.operation("self_attn.math.mask", [], mask_bytes, gradients=[]))
    if context.batch > 1:  # matmul joins the dimensions of sequences and heads, which lie apart in q
        query = ops.copy(tape, query, "self_attn.math.contiguous_q")
    scores = tape.operation("self_attn.math.scores", [query, key], elements * FP32, saves=[query, key])
    scores = ops.in_place(tape, scores, "self_attn.math.add_mask")
    # _safe_softmax also makes a bool of every score and selects into a new tensor, inside one operator
    hidden = 5 * elements if context.kernel_temporaries else 0
    weights = tape.operation(
        "self_attn.math.softmax", [scores], scores.num_bytes, saves_output=True, forward_temporary_bytes=hidden
    )
    weights = build.dropout(weights, architecture.attention_dropout, elements, "self_attn.math.dropout")
    if context.compute_bytes != FP32:  # the second result, which nobody takes
        local.append(tape.operation("self_attn.math.weights", [weights], elements * context.compute_bytes, gradients=[]))
    v32 = _broadcast_heads(build, q32, v32)
    output = tape.operation("self_attn.math.output", [weights, v32], q32.num_bytes, saves=[weights, v32])
    local.append(output)
    if output.num_bytes != narrow:
        output = ops.cast(tape, output, narrow, "self_attn.math.to_narrow")
    for tensor in local:
        tape.hold(tensor)
    # written head by head: laid out token by token for the output projection
    return ops.copy(tape, output, "self_attn.contiguous")


def _broadcast_heads(build: BlockBuilder, q: Tensor, x: Tensor) -> Tensor:
    """matmul's expansion of a single key head to all query heads: a view for one sequence, else a copy."""
    if x.num_bytes == q.num_bytes:
        return x
    view = x if build.context.batch == 1 else None
    return build.tape.operation("self_attn.math.expand", [x], q.num_bytes, view_of=view)


def _to_compute_dtype(
    build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor, *, repeated: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, attention runs in the compute dtype and keeps narrow copies of wide q, k, v, which may be `repeated`
    for every query head."""
    context, architecture = build.context, build.context.architecture
    if not context.autocast:
        return q, k, v
    widths = architecture_widths(architecture)
    if repeated and architecture.mla is None:
        widths = (widths[0],) * 3
    narrow = [context.rows * width * context.compute_bytes for width in widths]
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


KERNELS: dict[str, Kernel] = {
    "flash": _flash,
    "flash_attention_2": _flash,
    "flex": _flex,
    "ring": _ring,
    "efficient": _efficient,
    "math": _math,
    "eager": eager_attention,
}
