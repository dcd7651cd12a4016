"""Multi-latent attention in a Megatron-LM layer on one rank: low-rank projections of query, key and value, then the core.

Sources: megatron-core 0.16.1 `transformer/multi_latent_attention.py` (`MLASelfAttention`), `models/gpt/gpt_layer_specs.py`
(the Transformer Engine layer), `fusions/fused_mla_yarn_rope_apply.py`. The down projections are whole on every rank and get
the sequence-parallel share of the tokens; the up projections are split over heads.
"""

from __future__ import annotations

from peakcast.models.ledger.megatron.blocks.adapters import TokenProjection, add_to_tokens
from peakcast.models.ledger.megatron.blocks.attention import core_attention
from peakcast.models.ledger.megatron.blocks.context import LatentContext, MegatronContext
from peakcast.models.ledger.megatron.blocks.gradients import weight_gradients
from peakcast.models.ledger.megatron.blocks.primitives import (
    column_linear,
    norm,
    norm_column_linear,
    other_layout_bytes,
    quantized_gradient_bytes,
    saved_input,
)
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor


def latent_attention(
    tape: Tape, hidden: Tensor, context: MegatronContext, latent: LatentContext
) -> tuple[Tensor, list[Tensor], tuple[int, int]]:
    """From the layer's input [stream_rows, hidden] to the context layer [rows, heads · v_head_dim]; the tensors to which
    variables refer until the output projection has returned (the compressed ones besides query, key and value); and the
    positions on the tape where the norm's tensors begin and end."""
    begin = tape.num_tensors
    x = norm(tape, hidden, context, context.stream_rows, context.hidden, "input_layernorm")
    normalized = begin, tape.num_tensors
    asked = _duplicated_linear(tape, x, context, latent.q_lora_rank, "linear_q_down_proj") if latent.q_lora_rank else x
    combined = _duplicated_linear(tape, x, context, latent.kv_lora_rank + latent.rope_dim, "linear_kv_down_proj")
    token = context.stream_rows * context.element_bytes
    compressed, position = tape.split(combined, [token * latent.kv_lora_rank, token * latent.rope_dim], "split_kv_down")
    if context.groups.sequence_parallel:
        size = context.rows * latent.rope_dim * context.element_bytes
        position = tape.operation("gather_k_pos_emb", [position], size, forward_temporary_bytes=token * latent.rope_dim)
    begin = tape.num_tensors
    query = _query(tape, asked, context, latent)
    # it is a view of part of the last dimension, which Transformer Engine's module copies
    compressed = tape.operation("kv_contiguous", [compressed], compressed.num_bytes)
    width = context.attention.heads * (latent.nope_dim + latent.v_dim)
    expanded = _up_projection(tape, compressed, context, latent, latent.kv_lora_rank, width, "linear_kv_up_proj")
    rotate = _rotate_fused if latent.rotary_fused else _rotate
    query, key, value = rotate(tape, query, expanded, position, context, latent)
    projected_up = begin, tape.num_tensors
    attended = core_attention(tape, query, key, value, context)
    if latent.recompute_up_projection:
        for read in (asked, combined, position):
            tape.keep_as_leaf(read)
        tape.make_again(*projected_up, query, key, value)
    return attended, [x, asked, combined, query, key, value], normalized


def _query(tape: Tape, asked: Tensor, context: MegatronContext, latent: LatentContext) -> Tensor:
    """The query, from its down projection or from the layer's input itself."""
    width = context.attention.heads * latent.qk_dim
    if not latent.q_lora_rank:
        return column_linear(tape, asked, context, width, "linear_q_proj", False)
    return _up_projection(tape, asked, context, latent, latent.q_lora_rank, width, "linear_q_up_proj")


def _duplicated_linear(tape: Tape, x: Tensor, context: MegatronContext, out_features: int, name: str) -> Tensor:
    """A projection that every rank has whole, for the rank's own tokens. Saves its input if its weight
    trains."""
    output = context.stream_rows * out_features * context.element_bytes
    saves, saved_bytes = saved_input(context, x, context.stream_rows * context.hidden)
    base = tape.operation(
        name,
        [x],
        output,
        saves=Saved(saves, extra_bytes=saved_bytes),
        weight_gradients=weight_gradients(context, name, out_features * context.hidden, 0),
        forward_temporary_bytes=other_layout_bytes(context, context.stream_rows * context.hidden),
        backward_temporary_bytes=quantized_gradient_bytes(context, output),
    )
    return add_to_tokens(tape, x, base, context, TokenProjection(name, context.hidden, out_features), context.stream_rows)


def _up_projection(
    tape: Tape, x: Tensor, context: MegatronContext, latent: LatentContext, rank: int, out_features: int, name: str
) -> Tensor:
    """[stream_rows, rank] to [rows, out_features], with a norm before it under `--qk-layernorm`."""
    if latent.qk_norm:
        return norm_column_linear(tape, x, context, out_features, name, False, in_features=rank)
    return column_linear(tape, x, context, out_features, name, False, in_features=rank)


def _rotate(
    tape: Tape, query: Tensor, expanded: Tensor, position: Tensor, context: MegatronContext, latent: LatentContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Unfused: the rotated parts are new tensors, query and key are concatenated, value is copied. Until then variables
    refer to all of them (`qkv_up_proj_and_rope_apply`)."""
    token = context.rows * context.element_bytes
    head = token * context.attention.heads
    plain, rotated = tape.split(query, [head * latent.nope_dim, head * latent.rope_dim], "split_q")
    key, value = tape.split(expanded, [head * latent.nope_dim, head * latent.v_dim], "split_kv")
    table = context.sequence * latent.rotary_dim * context.element_bytes
    parts = []
    for name, part in (("rotary_q", rotated), ("rotary_k", position)):
        size = part.num_bytes
        parts.append(
            tape.operation(
                name,
                [part],
                size,
                saves=Saved(extra_bytes=[table, table]),
                forward_temporary_bytes=3 * size,
                backward_temporary_bytes=2 * size,
            )
        )
    rotated, position = parts
    query = tape.operation(
        "concatenate_q", [plain, rotated], head * latent.qk_dim, gradients=[(plain, None), (rotated, None)]
    )
    key = tape.operation(
        "concatenate_k", [key, position], head * latent.qk_dim, gradients=[(key, None), (position, position.num_bytes)]
    )
    value = tape.operation("value_contiguous", [value], head * latent.v_dim)
    for variable in (plain, expanded, rotated, position):
        tape.hold(variable)
    return query, key, value


def _rotate_fused(
    tape: Tape, query: Tensor, expanded: Tensor, position: Tensor, context: MegatronContext, latent: LatentContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Fused: the query is rotated in place; one kernel makes key and value."""
    head = context.rows * context.attention.heads * context.element_bytes
    query = tape.operation("rotary_q", [query], Output.view(query), gradients=[(query, None)])
    both = tape.operation(
        "rotary_kv",
        [expanded, position],
        head * (latent.qk_dim + latent.v_dim),
        gradients=[(expanded, expanded.num_bytes), (position, position.num_bytes)],
    )
    key, value = tape.split(both, [head * latent.qk_dim, head * latent.v_dim], "split_kv")
    return query, key, value
