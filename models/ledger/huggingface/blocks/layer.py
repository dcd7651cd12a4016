"""The decoder layer as Hugging Face transformers runs it, written on the tape.

One mechanism for all families: the differences between Llama, GPT-2, GPT-NeoX, Gemma, ... are fields of `Architecture` and
traits of its `Family`. Read line by line from transformers 4.48-5.17 `modeling_*.py`; the saved tensors are those of the
table in where-memory-goes F1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from peakcast.jobs.architecture import Architecture
from peakcast.models.ledger.huggingface.blocks.activations import activation
from peakcast.models.ledger.huggingface.blocks.attention import self_attention
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.fused_lora import fused_feed_forward, is_fused
from peakcast.models.ledger.huggingface.blocks.latent_attention import latent_attention
from peakcast.models.ledger.huggingface.blocks.routed import routed_feed_forward
from peakcast.models.ledger.huggingface.blocks.routed_torchtitan import torchtitan_feed_forward
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import gather_sequence
from peakcast.models.ledger.huggingface.blocks.traits import drops_sum
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor
from peakcast.models.ledger.tape.template import Template
from peakcast.networks.families import family_of


@lru_cache(maxsize=256)
def decoder_layer(context: HFContext) -> Template:
    """The template of one decoder layer: [micro_batch_size, sequence_length, hidden_size] in and out."""
    architecture, backward = context.architecture, context.backward
    tape = Tape(
        gpu=context.gpu,
        saves_on_cpu=backward.saves_on_cpu,
        splits_backward=backward.in_two_parts,
        modules=called(architecture),
    )
    build = BlockBuilder(tape, context)
    owned = not backward.checkpointed
    hidden = tape.input(context.input_bytes, requires_grad=context.layer.input_requires_grad, owned=owned)
    if architecture.parallel_block:
        output = _parallel_block(build, hidden)
    else:
        output = _sublayer(build, hidden, _attention, "input_layernorm", "post_attention_layernorm")
        output = _sublayer(build, output, feed_forward, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for variable in (hidden, *build.variables):  # the model's loop variable refers to the layer's input until it returns
        tape.hold(variable)
    handed_on = backward.checkpointed and backward.reentrant and context.returns_weights
    second_output = build.attention_weights if handed_on else None
    return tape.finish(
        output, cached_matmuls=backward.cached_matmuls, cached_kinds=backward.cached_kinds, second_output=second_output
    )


def _attention(build: BlockBuilder, x: Tensor) -> Tensor:
    """Attention of the layer: [micro_batch_size, sequence_length, hidden_size] in and out."""
    latent = build.context.architecture.mla is not None
    with build.tape.marked(Mark.ATTENTION):
        return (latent_attention if latent else self_attention)(build, x)


def called(architecture: Architecture) -> dict[str, str]:
    """Operation -> the module that runs it, if that has another name. In a network with one norm for each sub-layer, the
    second norm is named after the sub-layer that it follows."""
    return {"pre_feedforward_layernorm": "post_attention_layernorm"} if architecture.norm_placement == "pre" else {}


def _sublayer(
    build: BlockBuilder, x: Tensor, body: Callable[[BlockBuilder, Tensor], Tensor], norm_before: str, norm_after: str
) -> Tensor:
    """Attention or feed-forward (`body`) with its norms and its residual addition."""
    architecture, width = build.context.architecture, build.context.architecture.hidden_size
    placement = architecture.norm_placement
    if family_of(architecture).layer.norm_after_residual:
        y = body(build, x)
        output = build.norm(ops.add(build.tape, y, x, "residual_add"), width, norm_after)
        for variable in (x, y):  # variables of the module that has the norm
            build.tape.hold(variable)
        return output
    body_input = build.norm(x, width, norm_before, build.context.stream_rows) if placement != "post" else x
    y = body(build, body_input)
    family = family_of(architecture)
    if not (family.layer.inline_feed_forward and body is feed_forward):
        build.tape.hold(body_input)  # the layer's variable
    build.variables.extend([y] * family.layer.keeps_outputs + [body_input] * family.layer.keeps_inputs)
    if placement != "pre":
        y = build.norm(y, width, norm_after, build.context.stream_rows)
    added = ops.scale(build.tape, y, "residual_multiplier") if family.layer.scales_outputs else y
    output = ops.add(build.tape, x, added, "residual_add")
    build.tape.hold(y)  # its variable is reassigned only after the addition
    joined = family.eager_attention.joins_heads_first and body is not feed_forward
    for variable in build.attention_variables if joined else ():
        build.tape.hold(variable)
    if family.layer.keeps_outputs:  # the variable of the sub-layer's input is reassigned only after the addition too
        build.tape.hold(body_input)
    return output


def _parallel_block(build: BlockBuilder, x: Tensor) -> Tensor:
    """Attention and feed-forward that read the same input (GPT-NeoX, Falcon, Phi, Cohere)."""
    architecture, width = build.context.architecture, build.context.architecture.hidden_size
    two, together = architecture.norms_per_parallel_block == 2, family_of(architecture).layer.norms_together
    first = build.norm(x, width, "input_layernorm")
    second = build.norm(x, width, "post_attention_layernorm") if two and together else first
    attention = _attention(build, first)
    if two and not together:
        second = build.norm(x, width, "post_attention_layernorm")
    fed = feed_forward(build, second)
    for variable in (first, second) if together else (second,):
        build.tape.hold(variable)
    view = fed if family_of(architecture).layer.adds_in_place else None
    both = build.tape.operation(
        "parallel_add", [fed, attention], Output(fed.num_bytes, view_of=view), gradients=[(fed, None), (attention, None)]
    )
    if drops_sum(architecture):
        both = build.dropout(both, architecture.hidden_dropout, build.context.rows * width, "parallel_dropout")
    output = ops.add(build.tape, both, x, "residual_add")
    build.variables.extend([fed, attention])
    return output


def feed_forward(build: BlockBuilder, x: Tensor) -> Tensor:
    """The feed-forward of a layer, dense or routed: [micro_batch_size · sequence_length, hidden_size] in and out."""
    if build.context.layer.routed:
        torchtitan = build.context.experts.implementation == "torchtitan"
        return (torchtitan_feed_forward if torchtitan else routed_feed_forward)(build, x)
    architecture, tape = build.context.architecture, build.tape
    width, inner = architecture.hidden_size, architecture.intermediate_size
    bias, names = architecture.mlp_bias, family_of(architecture).names
    rows, elements = build.context.rows, build.context.rows * inner
    x = arguments = gather_sequence(tape, x, build.context.group, "mlp")
    if architecture.gated_mlp and architecture.fused_gate_up:  # one matrix; the halves are views
        fused = build.columns(x, width, 2 * inner, f"mlp.{names.gate_up}", bias)
        gate, up = tape.split(fused, [fused.num_bytes // 2] * 2, "mlp.chunk")
        if build.context.kernels.gated_activation:  # its kernel wants contiguous halves
            product = _swiglu(tape, ops.copy(tape, gate, "mlp.gate"), ops.copy(tape, up, "mlp.up"))
        else:
            product = ops.multiply(tape, activation(build, gate, elements), up, "mlp.product")
    elif architecture.gated_mlp and is_fused(build, each := [f"mlp.{n}" for n in (names.gate, names.up, names.down)], bias):
        gate_name, up_name, down_name = each
        return fused_feed_forward(build, x, width, inner, (gate_name, up_name, down_name))
    elif architecture.gated_mlp and build.context.kernels.gated_activation:
        gate = build.columns(x, width, inner, f"mlp.{names.gate}", bias)
        up = build.columns(x, width, inner, f"mlp.{names.up}", bias)
        product = _swiglu(tape, gate, up)
    elif architecture.gated_mlp:
        activated = activation(build, build.columns(x, width, inner, f"mlp.{names.gate}", bias), elements)
        up = build.columns(x, width, inner, f"mlp.{names.up}", bias)
        product = ops.multiply(tape, activated, up, "mlp.product")
    else:
        product = activation(build, build.columns(x, width, inner, f"mlp.{names.up}", bias), elements)
    if family_of(architecture).layer.norm_after_residual:
        build.variables.append(product)  # it is an argument of the module that has the norm (`BertOutput`)
    output = build.rows_summed(product, inner, width, f"mlp.{names.down}", bias)
    if architecture.fused_gate_up:
        tape.hold(gate)  # a variable of the feed-forward refers to it
    if build.context.group.sequence:
        tape.hold(arguments)
    if drops_sum(architecture):
        return output
    return build.dropout(output, architecture.hidden_dropout, rows * width, "mlp.dropout")


def _swiglu(tape: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """Liger's silu(gate)·up, whose backward writes into gate and up (liger_kernel 0.8 ops/swiglu.py)."""
    return tape.operation("mlp.swiglu", [gate, up], up.num_bytes, saves=Saved([gate, up], become_gradients=True))
