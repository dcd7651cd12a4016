"""A Megatron-LM decoder layer on one rank, for both `--transformer-impl` values, written on the tape.

Sources: megatron-core 0.13.1 `transformer/transformer_layer.py`, `attention.py`, `mlp.py`. With GELU, dropout, biases and
unfused attention, its saved bytes are those of Korthikanti et al. 2022 (arXiv:2205.05198), Table 2: sbh·(34 + 5·a·s/h).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from peakcast.models.ledger.megatron.blocks.attention import attention, core_attention
from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.megatron.blocks.mamba import mamba_layer
from peakcast.models.ledger.megatron.blocks.mla import latent_attention
from peakcast.models.ledger.megatron.blocks.moe import routed_feed_forward
from peakcast.models.ledger.megatron.blocks.primitives import (
    bias_dropout_add,
    column_linear,
    column_linear_of_norm,
    gated_activation,
    norm,
    own_norm,
    row_linear,
)
from peakcast.models.ledger.megatron.blocks.recompute import checkpointed
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.offloading import OffloadPlan
from peakcast.models.ledger.tape.tape import Tape, Tensor
from peakcast.models.ledger.tape.template import Template

ENCODER_HIDDEN_STATES = "encoder_hidden_states"
OFFLOADED: dict[str, tuple[str, ...]] = {
    "attn_norm": ("input_layernorm",),
    "qkv_linear": (
        "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "linear_q_up_proj", "linear_kv_up_proj",
        "context_contiguous", "rotary_q", "rotary_k", "q_layernorm", "k_layernorm",
    ),
    "core_attn": (
        "attention_scores", "softmax", "softmax.mask", "mask_padding", "attention_dropout", "weighted_sum",
        "fused_attention", "flash_attention", "checkpointed_core_attention",
    ),
    "attn_proj": ("linear_proj",),
    "mlp_norm": ("pre_mlp_layernorm",),
    "expert_fc1": ("experts.linear_fc1",),
    "moe_act": ("experts.activation", "experts.weighted_activation"),
}  # fmt: skip
"""By module of `offload-modules`, the operations whose saved tensors go to the host. Where a norm is part of the projection
after it, it is that projection's. Latent attention that is projected up again (`mla_up_proj`) keeps what it is projected
from for the operation in whose backward that is done."""


@lru_cache(maxsize=512)
def decoder_layer(context: MegatronContext) -> Template:
    """The template of one decoder layer: [stream_rows, hidden] in and out."""
    tape = Tape(offload=offload_of(context))
    hidden = tape.input(
        context.stream_bytes, owned=not context.runs.input_held, requires_grad=not context.runs.input_is_constant
    )
    return tape.finish(layer_operations(tape, hidden, context))


def offload_of(context: MegatronContext) -> OffloadPlan:
    """Which saved tensors of the layer go to the host."""
    groups = {name: module for module in context.offloading.modules for name in OFFLOADED[module]}
    return OffloadPlan(groups, context.offloading.least_elements * context.element_bytes)


def layer_operations(tape: Tape, hidden: Tensor, context: MegatronContext) -> Tensor:
    """Append one decoder layer to `tape`, or the one part that a hybrid's layer consists of."""
    if context.part == "mamba" and context.mamba is not None:
        output = mamba_layer(tape, hidden, context, context.mamba)
        tape.hold(hidden)
        return output
    middle = hidden if context.part == "mlp" else _attended(tape, hidden, context)
    output = middle
    if context.part != "attention":
        fed = feed_forward(tape, middle, context)
        with tape.marked(Mark.FEED_FORWARD if context.experts is None else Mark.EXPERTS):
            output = bias_dropout_add(tape, fed, middle, context, "mlp_bda")
    tape.hold(hidden)
    return output


def _attended(tape: Tape, hidden: Tensor, context: MegatronContext) -> Tensor:
    """Attention with its residual, and cross-attention if there is an encoder."""
    if context.latent is not None:
        attended, named, norms = latent_attention(tape, hidden, context, context.latent)
        until_added = []
    else:
        begin = tape.num_tensors
        normalized = own_norm(tape, hidden, context, "input_layernorm")
        norms = begin, tape.num_tensors
        width = context.attention.query + 2 * context.attention.key_value
        mixed = column_linear_of_norm(tape, normalized, context, width, "linear_qkv", context.attention.qkv_bias)
        attended, named = attention(tape, mixed, context)
        until_added = [normalized]  # a variable of `_forward_attention` refers to it
    projected = _projected(tape, attended, context)
    for variable in named:
        tape.hold(variable)
    if context.recompute_norms:
        tape.make_again(*norms, *((named[0] if context.latent is not None else normalized,) if norms[1] > norms[0] else ()))
    with tape.marked(Mark.ATTENTION_ADD):
        middle = bias_dropout_add(tape, projected, hidden, context, "self_attn_bda")
    for variable in until_added:
        tape.hold(variable)
    if context.source_sequence:
        middle = _cross_attention(tape, middle, context)
    return middle


def _projected(tape: Tape, attended: Tensor, context: MegatronContext) -> Tensor:
    """Attention's output projection."""
    return row_linear(tape, attended, context, context.attended, "linear_proj")


def _cross_attention(tape: Tape, hidden: Tensor, context: MegatronContext) -> Tensor:
    """Attention from the decoder's tokens to the encoder's, whose output all decoder layers read."""
    source = replace(context, sequence=context.source_sequence)
    states = tape.borrowed(source.stream_bytes, ENCODER_HIDDEN_STATES)
    normalized = norm(tape, hidden, context, context.stream_rows, context.hidden, "pre_cross_attn_layernorm")
    both = column_linear(
        tape, states, source, 2 * context.attention.key_value, "cross_attention.linear_kv", context.linear_bias
    )
    key, value = tape.split(both, [both.num_bytes // 2] * 2, "split_kv")
    query = column_linear(
        tape, normalized, context, context.attention.query, "cross_attention.linear_q", context.linear_bias
    )
    crossing = replace(context, key_sequence=context.source_sequence, padding=True)
    attended = core_attention(tape, query, key, value, crossing)
    projected = row_linear(tape, attended, context, context.attention.query, "cross_attention.linear_proj")
    output = bias_dropout_add(tape, projected, hidden, context, "cross_attn_bda")
    tape.hold(normalized)
    return output


def feed_forward(tape: Tape, x: Tensor, context: MegatronContext) -> Tensor:
    """Norm, first projection, activation, second projection, whose bias the residual addition adds. If the context has
    experts, a mixture of experts instead."""
    if context.experts is not None:
        return routed_feed_forward(tape, x, context, context.experts)
    with tape.marked(Mark.FEED_FORWARD):
        return _dense_of_norm(tape, x, context)


def _dense_of_norm(tape: Tape, x: Tensor, context: MegatronContext) -> Tensor:
    """The dense feed-forward with its norm."""
    begin = tape.num_tensors
    normalized = own_norm(tape, x, context, "pre_mlp_layernorm")
    end = tape.num_tensors
    if context.feed_forward.recompute:
        alone = replace(context, runs=replace(context.runs, without_graph=True))
        parts = (lambda part, held: _dense(part, held, context), lambda part, held: _dense(part, held, alone))
        with tape.marked(Mark.RECOMPUTED_FEED_FORWARD):
            output = checkpointed(tape, normalized, "mlp", *parts)
    else:
        output = _dense(tape, normalized, context)
    tape.hold(normalized)  # a variable of `_forward_mlp` refers to it
    if context.recompute_norms:
        tape.make_again(begin, end, *((normalized,) if end > begin else ()))
    return output


def _dense(tape: Tape, normalized: Tensor, context: MegatronContext) -> Tensor:
    """The feed-forward without its norm."""
    inner = column_linear_of_norm(
        tape,
        normalized,
        context,
        context.feed_forward.width * (2 if context.feed_forward.gated else 1),
        "linear_fc1",
        False,
    )
    return row_linear(tape, _activation(tape, inner, context), context, context.feed_forward.width, "linear_fc2")


def _activation(tape: Tape, x: Tensor, context: MegatronContext) -> Tensor:
    """bias + activation. Fused kernels (bias_gelu, bias_swiglu) and the compiled squared ReLU save only their input."""
    output = context.rows * context.feed_forward.width * context.element_bytes
    if context.feed_forward.fused_activation or (
        context.feed_forward.activation == "squared_relu" and not context.feed_forward.gated
    ):
        if context.linear_bias and not context.feed_forward.fused_activation:
            x = tape.operation("add_bias", [x], x.num_bytes, gradients=[(x, None)])
        return tape.operation("activation", [x], output, saves=[x])
    if context.linear_bias:
        x = tape.operation("add_bias", [x], x.num_bytes, gradients=[(x, None)])
    if not context.feed_forward.gated:
        return tape.operation("activation", [x], output, saves=[x])
    gate, up = tape.split(x, [output, output], "chunk")
    return gated_activation(tape, gate, up, context, ("activation", "glu_product"))
