"""Attention from q, k, v to the output, by kernel: what each kernel allocates and what autograd saves for it.

Shapes: q [batch, heads, sequence, head_dim], k and v [batch, key_value_heads, sequence, head_dim]. Sizes come from the
tensors, so heads of unequal widths work too. Sources: torch 2.11-2.13 aten/src/ATen/native/transformers (`attention.cpp`,
`cuda/sdp_utils.cpp`, `cuda/attention.cu`), transformers 5.17 `integrations/`.
"""

from __future__ import annotations

from collections.abc import Callable

from peakcast.catalog.kernel_workspaces import flash_backward
from peakcast.core.units import FP32, INT64, round_up
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.eager_attention import eager_attention, repeat_key_value
from peakcast.models.ledger.huggingface.blocks.kv_cache import IN_TRAINING
from peakcast.models.ledger.huggingface.blocks.math_attention import step_by_step, to_compute_dtype
from peakcast.models.ledger.huggingface.blocks.ring_attention import RingTensors, backward_bytes, forward_bytes
from peakcast.models.ledger.huggingface.blocks.traits import attention_key_heads, joins_heads
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient
from peakcast.networks.families import family_of

MASK_ALIGNMENT = 8
"""Elements to a multiple of which the rows of a mask are padded for the memory-efficient kernel."""
AttentionWriter = Callable[[BlockBuilder, Tensor, Tensor, Tensor], Tensor]


def attention(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The heads' outputs for q, k, v, by the job's kernel. With a static cache, sdpa's prefill reads the new keys and
    values themselves, and flash attention a view of the filled part (transformers 5.17 `sdpa_attention.py`,
    `_upad_input`)."""
    context = build.context
    if context.cache.length > context.keys:
        k, v = (
            build.tape.operation(
                "self_attn.filled", [x], Output(x.num_bytes // context.cache.length * context.keys, view_of=x)
            )
            for x in (k, v)
        )
    return KERNELS[attention_kernel(context)](build, q, k, v)


def attention_kernel(context: HFContext) -> str:
    """The kernel of one layer. For sdpa: flash needs half precision, no mask, one head width of at most 256, and a kernel
    that shares key heads; the memory-efficient kernel needs as many key as query heads (torch <= 2.13,
    `check_batch_size_and_num_heads_dense`); everything else is computed step by step ("math")."""
    if context.ring.ranks > 1:
        return "ring"
    if context.attention.implementation == "eager":
        return "eager"
    if context.attention.implementation in ("flash_attention_2", "flex"):
        return context.attention.implementation
    architecture = context.architecture
    grouped = attention_key_heads(architecture) != architecture.num_attention_heads
    grouped = grouped and not context.attention.sdpa_repeats_key_value
    one_width = architecture.mla is None and architecture.head_dim <= 256
    shared = family_of(architecture).attention.shares_key_heads or not grouped
    if context.layer.masked:
        return "efficient" if shared else "math"
    if context.precision.compute_bytes != FP32 and one_width and shared:
        return "flash"
    return "math" if grouped else "efficient"


def _flash(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Flash attention, sdpa's or the package's."""
    context, variables = build.context, _as_passed_to_sdpa(build, q, k, v)
    q, k, v = to_compute_dtype(build, *variables, repeated=context.attention.copies_key_value)
    mla, narrow, widened = context.architecture.mla, 0, list[Tensor]()
    if mla is not None and mla.v_head_dim < mla.qk_nope_head_dim + mla.qk_rope_head_dim:
        narrow = v.num_bytes // context.keys * context.sequence
        v = build.tape.operation("self_attn.widen_v", [v], k.num_bytes)  # transformers 5.17 integrations/flash_attention.py
        widened = [v]
    output = _flash_kernel(build, q, k, v)
    for variable in widened:
        build.tape.hold(variable)
    output = build.tape.operation("self_attn.crop", [output], narrow) if narrow else output
    if context.attention.sdpa_copies or context.attention.cudnn:
        # the output has the layout of the queries, or lies head by head
        output = ops.copy(build.tape, output, "self_attn.contiguous")
        for variable in variables:
            build.tape.hold(variable)
    if context.returns_weights:  # the layer returns the output in their place
        build.variables.append(output)
        build.attention_weights = output
    return output


def _flash_kernel(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The kernel's output with as many rows as `q`, though the kernel may get fewer: the package leaves padding out."""
    context, whole = build.context, q.num_bytes
    packing, of_package = context.packing, context.attention.implementation == "flash_attention_2"
    rows, indices = context.rows, list[Tensor]()
    has_padding, has_free_places = packing.valid_rows > 0, context.cache.length > context.keys
    if of_package and has_padding:
        rows = packing.valid_rows
        q, k, v = (_without_padding(build, x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    elif of_package and has_free_places:
        q, k, v, *indices = _filled(build, q, k, v)
    elif packing.num_sequences:
        q, k, v = (_contiguous(build, x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    log_sum_exp = FP32 * rows * context.architecture.num_attention_heads
    output = build.tape.operation(
        "self_attn.flash_attention",
        [q, k, v],
        # the package's is on no list of what checkpointing keeps
        Output(q.num_bytes, kind="" if of_package else "attention"),
        # softmax statistics, random seed and offset
        saves=Saved([q, k, v], output=True, extra_bytes=[log_sum_exp, INT64, INT64]),
        backward_temporary_bytes=flash_backward_bytes(context) if context.gpu else 0,
    )
    if of_package and (has_padding or has_free_places):
        output = build.tape.operation("self_attn.pad", [output], whole)
        for variable in (q, k, v, *indices):  # variables of `_flash_attention_forward` refer to them
            build.tape.hold(variable)
    return output


def _as_passed_to_sdpa(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as releases of transformers before 4.56 pass them to sdpa (`sdpa_attention_forward`)."""
    context = build.context
    if context.attention.implementation != "sdpa":
        return q, k, v
    key_heads, before = attention_key_heads(context.architecture), (k, v)
    if context.attention.sdpa_repeats_key_value:
        k, v = repeat_key_value(build, q, k, v)
    if context.attention.sdpa_copies:
        q = ops.copy(build.tape, q, "self_attn.contiguous_q")
        if (k, v) == before or key_heads == 1:  # repeating has copied them already, except a single head, which is a view
            k, v = (ops.copy(build.tape, x, f"self_attn.contiguous_{name}") for x, name in ((k, "k"), (v, "v")))
    return q, k, v


def _contiguous(build: BlockBuilder, x: Tensor, name: str) -> Tensor:
    """Joined sequences are one dimension: a tensor that is a slice of a fused projection, or laid out head by head, is
    copied. Source: transformers 5.17 modeling_flash_attention_utils.py `_prepare_from_posids`."""
    architecture = build.context.architecture
    single = name != "q" and attention_key_heads(architecture) == 1
    by_head = name != "v" and joins_heads(architecture) and not single
    sliced = x.storage.num_bytes > x.num_bytes
    return ops.copy(build.tape, x, f"self_attn.joined_{name}") if by_head or sliced else x


def _ring(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's ring attention over the ranks that share the sequence. Its temporaries count at their fullest moment."""
    context = build.context
    q, k, v = to_compute_dtype(build, q, k, v)
    statistics, element = FP32 * context.rows * context.architecture.num_attention_heads, context.precision.compute_bytes
    tensors = RingTensors(query=q.num_bytes, key=k.num_bytes, element=element, statistics=statistics)
    gradients = q.num_bytes + k.num_bytes + v.num_bytes
    output = build.tape.operation(
        "self_attn.ring_attention",
        [q, k, v],
        Output(q.num_bytes, kind="attention"),
        saves=Saved([q, k, v], output=True, extra_bytes=[statistics, INT64, INT64]),
        forward_temporary_bytes=forward_bytes(context.ring, tensors) - q.num_bytes - statistics,
        backward_temporary_bytes=backward_bytes(context.ring, tensors)
        - gradients
        + (flash_backward_bytes(context) if context.gpu else 0),
    )
    return ops.copy(build.tape, output, "self_attn.contiguous") if context.ring.copies_output else output


def _without_padding(build: BlockBuilder, x: Tensor, name: str) -> Tensor:
    """The tokens that are not padding, gathered; backward scatters the gradient into zeros of full size. Traced with
    kernels that do nothing (`tracing/flash_attention_stub.py`). Source: transformers 5.17 modeling_flash_attention_utils.py
    `_upad_input`, `_pad_input`."""
    context = build.context
    return build.tape.operation(f"self_attn.unpad_{name}", [x], x.num_bytes // context.rows * context.packing.valid_rows)


def _filled(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The filled part of a static cache, gathered as if the rest were padding: (q, k, v) and, for several queries, the
    indices, which variables refer to. Keys and values are first laid out token by token; a single query stays as it is."""
    context, tape = build.context, build.tape
    indices = tape.operation("self_attn.filled.indices", [], context.batch * context.keys * INT64, gradients=[])
    taken = [
        tape.operation(f"self_attn.unpad_{name}", [x, indices], x.num_bytes, forward_temporary_bytes=x.num_bytes)
        for x, name in ((k, "k"), (v, "v"))
    ]
    if context.sequence == 1:
        return [q, *taken]
    return [tape.operation("self_attn.unpad_q", [q, indices], q.num_bytes), *taken, indices]


def _row_sums_of_flex(tape: Tape, output: Tensor, sums_bytes: int, *, by_head: bool) -> Tensor:
    """`output` of FlexAttention, whose backward begins with row sums. Its gradient must have its layout: backward copies
    the gradient if the layout is `by_head` and not token by token (torch runtime_wrappers.py
    coerce_tangent_and_suggest_memory_format)."""
    return tape.operation(
        "self_attn.flex_attention.delta",
        [output],
        Output.view(output),
        saves=[output],
        gradients=[(output, None)],
        backward_temporary_bytes=sums_bytes + (output.num_bytes if by_head else 0),
    )


def _flex(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention, which transformers compiles by itself. Forward saves q, k, v, the output and a statistic in fp32. It
    also returns a second statistic, in natural units and narrow, as the attention's weights. Backward first computes the
    row sums "delta" (with zeros for the gradient of the second statistic), then the gradients without the output. The
    masks' block indices belong to the model. Source: transformers 5.17 integrations/flex_attention.py; torch 2.13
    _inductor/kernel/flex/flex_attention.py."""
    context, tape = build.context, build.tape
    heads, key_heads = context.architecture.num_attention_heads, attention_key_heads(context.architecture)
    repeats = bool(heads & (heads - 1))  # the kernel shares key heads only for a power of two of heads
    repeated = k, v = repeat_key_value(build, q, k, v) if repeats else (k, v)
    q, k, v = to_compute_dtype(build, q, k, v, repeated=repeats)
    statistics = FP32 * context.rows * heads
    returned = tape.operation("self_attn.flex_attention.statistics", [], statistics, gradients=[])
    by_head = joins_heads(context.architecture)
    output = tape.operation(
        "self_attn.flex_attention",
        [q, k, v],
        # compiled by itself: only checkpointing policies that name it keep its output
        Output(v.num_bytes if repeats else v.num_bytes * heads // key_heads, kind="flex"),
        saves=Saved([q, k, v], extra_bytes=[statistics]),
        backward_temporary_bytes=statistics,
    )
    output = _row_sums_of_flex(tape, output, 2 * statistics, by_head=by_head)
    narrow = returned
    if context.precision.compute_bytes < FP32:
        size = statistics // FP32 * context.precision.compute_bytes
        narrow = tape.operation("self_attn.flex_attention.narrow", [returned], size, gradients=[])
    build.variables.append(narrow)
    if context.architecture.attention_sinks:
        output = _scaled_for_sinks(build, output, narrow.num_bytes)
    output = ops.copy(tape, output, "self_attn.contiguous") if by_head else output
    for variable in (returned, *repeated):
        tape.hold(variable)
    return output


def _scaled_for_sinks(build: BlockBuilder, output: Tensor, row_bytes: int) -> Tensor:
    """FlexAttention's output times exp(statistic - logsumexp of statistic and sink), each of `row_bytes` (gpt-oss)."""
    context, tape = build.context, build.tape
    size = context.architecture.num_attention_heads * context.precision.weight_bytes
    sinks = WeightGradient("self_attn.sinks.grad", size)
    factor = tape.operation(
        "self_attn.sinks.factor",
        [output],
        row_bytes,
        # statistic and sink side by side; their logsumexp
        saves=Saved(output=True, extra_bytes=[2 * row_bytes, row_bytes]),
        gradients=[],
        weight_gradients=[sinks] if context.weights_get_gradients else [],
        forward_temporary_bytes=row_bytes,  # the difference
        backward_temporary_bytes=7 * row_bytes,
    )
    scaled = tape.operation(
        "self_attn.sinks.scale",
        [output, factor],
        output.num_bytes,
        saves=[output, factor],
        gradients=[(output, output.num_bytes), (factor, row_bytes)],
        backward_temporary_bytes=output.num_bytes,
    )
    tape.hold(output)
    return scaled


def flex_block_mask_bytes(batch: int, sequence: int) -> int:
    """Bytes of a BlockMask: int32 counts and indices of 128-token blocks, by rows and by columns, partial and full.
    Source: torch 2.13 `nn/attention/flex_attention.py` BlockMask."""
    blocks = -(-sequence // 128)
    return 4 * 4 * batch * (blocks + blocks**2)


def flash_backward_bytes(context: HFContext) -> int:
    """Bytes that the flash-attention backward allocates for itself: an fp32 dq accumulator and row sums and, for grouped
    queries, dk and dv for all heads. Source: flash-attention 2.8.3 csrc/flash_attn/flash_api.cpp mha_bwd."""
    architecture = context.architecture
    heads, dim = architecture.num_attention_heads, architecture.head_dim
    rows = context.packing.valid_rows or context.rows
    padded = context.batch * round_up(context.sequence, 128)
    if context.packing.valid_rows or context.packing.num_sequences:  # mha_varlen_bwd: 128 rows more for each sequence
        padded = rows + 128 * (context.packing.num_sequences or context.batch)
    accumulator, row_sums = flash_backward(padded, heads, dim)
    expanded = 0
    if architecture.num_key_value_heads != heads and not context.attention.copies_key_value:
        expanded = 2 * context.precision.compute_bytes * rows * heads * dim
    return accumulator + row_sums + expanded


def _efficient(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The memory-efficient kernel. For every layer, a bool mask becomes an additive one in q's dtype
    (`convert_boolean_attn_mask`), which is saved expanded to all heads: offloading it copies it at that size, both to the
    host and back. transformers copies key heads for every query head."""
    context, tape = build.context, build.tape
    heads = context.architecture.num_attention_heads
    if context.attention.sdpa_repeats_key_value or context.attention.sdpa_copies:
        q, k, v = _as_passed_to_sdpa(build, q, k, v)
    repeated = (k, v) if context.attention.sdpa_repeats_key_value else repeat_key_value(build, q, k, v)
    q, k, v = to_compute_dtype(build, q, *repeated, repeated=True)
    bias = _mask_of_layer(build)
    kept = [FP32 * context.batch * heads * round_up(context.sequence, 32), INT64, INT64]
    output = tape.operation(
        "self_attn.efficient_attention",
        [q, k, v, *bias],
        Output(v.num_bytes // context.keys * context.sequence, kind="attention"),
        # without a graph the kernel makes no statistics
        saves=Saved([q, k, v, *bias], output=True, extra_bytes=kept if context.cache.does in ("", *IN_TRAINING) else []),
        # the row sums "delta" of the backward (attention_backward.cu)
        backward_temporary_bytes=FP32 * context.rows * heads if context.gpu else 0,
    )
    for variable in repeated:  # variables of transformers' `sdpa_attention_forward` refer to them
        tape.hold(variable)
    return output


def _mask_of_layer(build: BlockBuilder) -> list[Tensor]:
    """The mask of numbers that a layer makes for itself, if any: of a bool one, unless all layers share one (in one graph,
    and in older releases: `hold_masks`), and a copy of it with padded rows, if those do not begin at multiples of 8
    elements (torch 2.13 `attention.cpp` preprocess_mask)."""
    context, tape = build.context, build.tape
    if not context.layer.masked or "network" in context.compiled or not (size := context.layer_mask_bytes):
        return []
    heads, keys = context.architecture.num_attention_heads, context.keys
    mask = None if context.attention.mask_is_additive else tape.operation("self_attn.additive_mask", [], size, gradients=[])
    if keys % MASK_ALIGNMENT:
        keys = round_up(keys, MASK_ALIGNMENT)
        made_of = [] if mask is None else [mask]
        mask = tape.operation("self_attn.padded_mask", made_of, size // context.keys * keys, gradients=[])
    if mask is None:
        return []
    # saved as a view of all heads, which `save_on_cpu` copies at full size
    whole = context.batch * context.sequence * keys * heads * context.precision.compute_bytes
    return [Tensor(mask.storage, whole, requires_grad=False)]


KERNELS: dict[str, AttentionWriter] = {
    "flash": _flash,
    "flash_attention_2": _flash,
    "flex": _flex,
    "ring": _ring,
    "efficient": _efficient,
    "math": step_by_step,
    "eager": eager_attention,
}
