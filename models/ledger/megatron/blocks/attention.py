"""The attention core as Megatron-LM runs it: unfused, flash-attn, cuDNN fused attention, or megatron-core's own.

Sources: Transformer Engine 2.8 `pytorch/attention/dot_product_attention/backends.py`, megatron-core 0.13.1
`transformer/dot_product_attention.py`, `fusions/fused_softmax.py`, `models/common/embeddings/rope_utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from peakcast.catalog.kernel_workspaces import flash_backward
from peakcast.core.units import BOOL, FP32, INT32, INT64, round_up
from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.megatron.blocks.exchange import exchanged_attention
from peakcast.models.ledger.megatron.blocks.primitives import norm
from peakcast.models.ledger.megatron.blocks.recompute import checkpointed_together
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor
from peakcast.timelines.timeline import Category

RNG_STATE_BYTES = 16


def attention(tape: Tape, mixed: Tensor, context: MegatronContext) -> tuple[Tensor, list[Tensor]]:
    """From the output of the fused projection, [rows, query + 2·key_value], to the context layer, [rows, query].

    Also returns the tensors that local variables of `attention.py` reference until its output projection has returned: the
    fused output, and query and key before and after the rotation (megatron-core 0.16.1 `qkv_output`, `query`, `key`).
    """
    size = context.rows * context.element_bytes
    # views of one storage until something copies them; split_along_dim's backward makes one gradient for all three
    widths = (context.attention.query, context.attention.key_value, context.attention.key_value)
    query, key, value = tape.split(mixed, [size * width for width in widths], "split_qkv")
    views: tuple[str, ...] = ("query", "key", "value")  # those that have not been copied
    if 1 < context.attention.key_value_heads != context.attention.heads:
        # reshaping a strided view copies, unless there is a single group
        query = tape.operation("query_reshape", [query], query.num_bytes)
        views = ("key", "value")
    if context.attention.qk_norm:
        query, key = _normed(tape, query, key, context)
        views = ("value",)
    referenced = [mixed, query, key]
    if context.attention.rotary_dim:
        query, key = _rotate(tape, query, context, "rotary_q"), _rotate(tape, key, context, "rotary_k")
        views = ("value",)
    return core_attention(tape, query, key, value, context, views), [*referenced, query, key]


def _normed(tape: Tape, query: Tensor, key: Tensor, context: MegatronContext) -> tuple[Tensor, Tensor]:
    """Queries and keys after the norms of their heads."""
    if context.attention.qk_norm_copies == "saved":
        query = tape.operation("query_contiguous", [query], query.num_bytes)
        key = tape.operation("key_contiguous", [key], key.num_bytes)
    passing = context.attention.qk_norm_copies == "passing"
    width = context.attention.head_dim
    query, key = (
        norm(tape, x, context, context.rows * heads, width, name, copied_bytes=x.num_bytes if passing else 0)
        for x, heads, name in (
            (query, context.attention.heads, "q_layernorm"),
            (key, context.attention.key_value_heads, "k_layernorm"),
        )
    )
    return query, key


def core_attention(
    tape: Tape, query: Tensor, key: Tensor, value: Tensor, context: MegatronContext, views: tuple[str, ...] = ()
) -> Tensor:
    """From query, key and value to the context layer [rows, attended]. `views`: names of those that are still parts of the
    fused projection's output."""
    if context.attention.recompute:  # `--recompute-activations`
        plain = replace(context, attention=replace(context.attention, recompute=False))

        def again(inner: Tape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return core_attention(inner, query, key, value, plain, views)

        return checkpointed_together(tape, [query, key, value], "checkpointed_core_attention", again)
    # strides differ (`get_qkv_layout`), or several ranks share a sequence: then `FusedAttention.forward` copies every view
    copies = "query" not in views or context.groups.context_parallel_size > 1
    if context.transformer_engine and context.attention.core != "flash" and copies:
        query, key, value = (
            tape.operation(f"{name}_contiguous", [x], x.num_bytes, gradients=[(x, None)]) if name in views else x
            for name, x in (("query", query), ("key", key), ("value", value))
        )
    if context.attention.core == "flash":
        output = _flash(tape, query, key, value, context, views)
    elif context.attention.core == "fused":
        # cuDNN reads the projection's layout, and the output projection reads cuDNN's
        output = _kernel(tape, "fused_attention", query, key, value, context)
    else:
        output = _unfused(tape, query, key, value, context)
    for variable in (query, key, value):
        tape.hold(variable)
    return output


def _rotate(tape: Tape, x: Tensor, context: MegatronContext, name: str) -> Tensor:
    """Fused: a new tensor, and only the shared table is saved. Unfused: t·cos + rotate_half(t)·sin, which saves this call's
    own cos and sin [sequence, 1, 1, rotary_dim], and a concatenation with the part that is not rotated."""
    if context.attention.rotary_fused:
        return tape.operation(name, [x], x.num_bytes)
    table = context.sequence * context.attention.rotary_dim * context.element_bytes
    rotated = x.num_bytes * context.attention.rotary_dim // context.attention.head_dim
    return tape.operation(
        name,
        [x],
        x.num_bytes,
        saves=Saved(extra_bytes=[table, table]),
        forward_temporary_bytes=3 * rotated,
        backward_temporary_bytes=2 * rotated,
    )


def _flash(
    tape: Tape, query: Tensor, key: Tensor, value: Tensor, context: MegatronContext, views: tuple[str, ...]
) -> Tensor:
    """flash-attn 2 on [batch, sequence, heads, dim] copies of q, k, v; its output is saved and also copied back to
    [sequence, batch, ...] for the projection. With one sample both orders are the same: only parts of the fused
    projection's output (`views`) are copied, and the output is not."""
    alone = context.batch == 1
    if context.attention.expands_groups:
        # `repeat_interleave` (megatron/legacy/model/transformer.py, `ParallelAttention.forward`)
        key = tape.operation("repeat_key", [key], query.num_bytes)
        value = tape.operation("repeat_value", [value], query.num_bytes)
        views = tuple(name for name in views if name == "query")
    query, key, value = (
        x if alone and name not in views else tape.operation(f"{name}_to_bshd", [x], x.num_bytes)
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    output = _kernel(tape, "flash_attention", query, key, value, context)
    return output if alone else tape.operation("output_to_sbhd", [output], output.num_bytes)


def _output_bytes(context: MegatronContext) -> int:
    """Bytes of the context layer."""
    return context.rows * context.attended * context.element_bytes


def _kernel(tape: Tape, name: str, query: Tensor, key: Tensor, value: Tensor, context: MegatronContext) -> Tensor:
    """One kernel from query, key and value to its output, which it saves, with an fp32 statistic per row and head."""
    statistics = [FP32 * context.rows * context.attention.heads, RNG_STATE_BYTES]
    inside = flash_backward_bytes(context) if context.kernel_temporaries else 0
    if context.groups.context_parallel_size > 1:
        return exchanged_attention(tape, name, (query, key, value), context, statistics, inside)
    return tape.operation(
        name,
        [query, key, value],
        _output_bytes(context),
        saves=Saved([query, key, value], output=True, extra_bytes=statistics),
        backward_temporary_bytes=inside,
    )


def flash_backward_bytes(context: MegatronContext) -> int:
    """Bytes that flash-attn's backward allocates for itself: an fp32 dq accumulator and row sums and, for grouped queries,
    dk and dv for all heads. Source: flash-attention 2.8.3 csrc/flash_attn/flash_api.cpp mha_bwd."""
    head = context.latent.qk_dim if context.latent is not None else context.attention.head_dim
    filled_rows = context.batch * round_up(context.sequence, 128)
    accumulator, row_sums = flash_backward(filled_rows, context.attention.heads, head)
    expanded = (
        2 * context.element_bytes * context.rows * context.attention.query
        if context.attention.key_value_heads != context.attention.heads
        else 0
    )
    return accumulator + row_sums + expanded


def _unfused(tape: Tape, query: Tensor, key: Tensor, value: Tensor, context: MegatronContext) -> Tensor:
    """Scores, softmax, dropout and weighted sum as separate kernels: 5 bytes per score with a narrow softmax (its output,
    the dropout mask, the output of dropout), 7 with an fp32 one."""
    scores = context.score_elements
    narrow = scores * context.element_bytes
    mask = _full_mask(tape, context) if context.transformer_engine else None
    if context.attention.key_value_heads != context.attention.heads:
        key = tape.operation("repeat_key", [key], query.num_bytes)
        value = tape.operation("repeat_value", [value], _output_bytes(context))
    # megatron-core's baddbmm gets a preallocated input; torch still allocates a new tensor for the output
    probabilities = tape.operation(
        "attention_scores",
        [query, key],
        narrow,
        saves=[query, key],
        forward_temporary_bytes=narrow if context.transformer_engine else 0,
    )
    raw, probabilities = probabilities, _softmax(tape, probabilities, mask, context)
    if context.padding and mask is not None:  # `masked_fill(attention_mask, 0)`
        probabilities = tape.operation("mask_padding", [probabilities], narrow, saves=[mask])
    if context.attention.dropout > 0:
        probabilities = tape.operation(
            "attention_dropout", [probabilities], narrow, saves=Saved(extra_bytes=[scores * BOOL])
        )
    output = tape.operation("weighted_sum", [probabilities, value], _output_bytes(context), saves=[probabilities, value])
    output = tape.operation("context_contiguous", [output], output.num_bytes, gradients=[(output, None)])
    for variable in (raw, probabilities, key, value, *([] if mask is None else [mask])):  # variables of the core's forward
        tape.hold(variable)
    return output


def _full_mask(tape: Tape, context: MegatronContext) -> Tensor:
    """Transformer Engine's own mask of every pair of tokens, made from the mask that it gets: for padding; or causal, for
    each sample if the batch has masks. It compares positions (int32) with bounds (for padding int64, for each sample).

    Source: Transformer Engine 2.8 `pytorch/attention/dot_product_attention/utils.py` `get_full_mask`.
    """
    pairs = context.sequence * (context.key_sequence or context.sequence)
    has_masks = context.padding or not (context.runs.makes_mask or context.source_sequence)
    samples = context.batch if has_masks else 1
    bounds, compared = (INT64 * samples, samples) if context.padding else (INT32, 1)

    def made(name: str, size: int, reads: Sequence[Tensor] = (), passing: int = 0) -> Tensor:
        return tape.operation(
            f"full_mask.{name}", reads, size * pairs, gradients=[], forward_temporary_bytes=passing * pairs
        )

    held = [made("padding", samples), made("tokens", samples)] if context.padding else []
    held += [made("positions", INT32), made("first", bounds), made("last", bounds)]
    made("inside", compared, [made("from_first", compared), made("to_last", compared)])
    return made("mask", samples, held, compared)


def _softmax(tape: Tape, scores: Tensor, mask: Tensor | None, context: MegatronContext) -> Tensor:
    """The softmax of the scores. The fused kernel saves its output. Without it, the mask is written into the scores
    (`forward_torch_softmax`), in fp32 if the softmax is. What is written into is a view of baddbmm's output, so backward
    copies the whole gradient, clones the part that belongs to the view, and writes into that (torch
    csrc/autograd/functions/tensor.cpp `CopySlices`)."""
    narrow, wide = scores.num_bytes, context.score_elements * FP32
    if context.attention.fused_softmax:  # its backward is in place too (Transformer Engine `csrc/extensions/softmax.cpp`)
        return tape.operation("softmax", [scores], narrow, saves=Saved(output=True), gradients=[(scores, None)])
    widened = context.attention.wide_softmax and wide != narrow
    if widened:
        scores = tape.operation("softmax.to_float32", [scores], wide)
    masks = [] if mask is None else [mask]
    if mask is not None and not context.padding:  # a causal mask, which is saved anyway, is combined with it
        masks = [tape.operation("softmax.causal_mask", [mask], mask.num_bytes, gradients=[])]
    elif mask is None and context.runs.makes_mask and not context.padding:
        masks = [_causal_mask(tape, context)]
    scores = tape.operation(
        "softmax.mask",
        [scores, *masks],
        Output.view(scores),
        saves=masks,
        gradients=[(scores, scores.num_bytes)],
        backward_temporary_bytes=0 if widened else 2 * narrow,
    )
    result = tape.operation("softmax", [scores], scores.num_bytes, saves=Saved(output=True))
    if result.num_bytes != narrow:
        result = tape.operation("softmax.to_narrow", [result], narrow)
    for variable in (scores, *masks):
        tape.hold(variable)
    return result


def _causal_mask(tape: Tape, context: MegatronContext) -> Tensor:
    """torch.triu(torch.ones(sq, sq), diagonal=1).bool() (megatron-core 0.16.1 `get_default_causal_mask`)."""
    pairs = context.sequence**2
    mask = tape.operation("causal_mask.triu", [], FP32 * pairs, gradients=[], forward_temporary_bytes=FP32 * pairs)
    return tape.operation("causal_mask", [mask], Output(BOOL * pairs, category=Category.INPUTS), gradients=[])
