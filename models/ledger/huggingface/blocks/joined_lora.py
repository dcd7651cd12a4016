"""LoRA of queries, keys and values that one matrix projects, as LitGPT has it: one adapter whose parts are for those of the
three that are adapted.

Source: lit-gpt of October 2023 and litgpt 0.4.0-0.5.13 lora.py `LoRAQKVLinear`.
"""

from __future__ import annotations

from dataclasses import replace

from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder, is_adapter_target
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.primitives import LowRankMatrices
from peakcast.models.ledger.tape.tape import Tensor
from peakcast.networks.families import family_of

NAME = "self_attn.qkv"
"""The name of the joined matrix of a family that has a matrix for each of queries, keys and values. No adapter has it as
its target."""


def joined_projection(build: BlockBuilder, x: Tensor, bias: bool) -> Tensor:
    """Queries, keys and values of `x`, joined in rows of all three, with the adapter added."""
    context, architecture, tape, tuning = build.context, build.context.architecture, build.tape, build.context.finetuning
    width, query, key_value = architecture.hidden_size, architecture.query_size, architecture.key_value_size
    whole, wide = query + 2 * key_value, context.adapters.weight_bytes
    result = build.projection(x, width, whole, NAME, bias)
    adapted = _adapted_widths(build)
    if not adapted:
        return result
    part, rank = sum(adapted), len(adapted) * (tuning.rank or 0)
    y = ops.dropout(tape, x, tuning.dropout, build.rows * width, f"{NAME}.lora.dropout")
    down, up = LowRankMatrices.of(NAME, width, part, rank, wide)
    y = build.linear(build.linear(y, down), replace(up, in_features=tuning.rank or 0))  # a grouped convolution
    if part < whole:  # zeros, into which index_copy_ writes; its backward reads the shape of what it has written
        size = y.num_bytes // part * whole
        y = tape.operation(f"{NAME}.lora.zero_pad", [y], size, saves=[y], gradients=[(y, y.num_bytes)])
    y = ops.scale(tape, y, f"{NAME}.lora.scaling")
    return ops.add(tape, result, y, f"{NAME}.lora.add")


def _adapted_widths(build: BlockBuilder) -> list[int]:
    """Columns of each of queries, keys and values that is adapted."""
    architecture, tuning = build.context.architecture, build.context.finetuning
    names, key_value = family_of(architecture).names, architecture.key_value_size
    widths = {"q": architecture.query_size, "k": key_value, "v": key_value}
    if architecture.fused_qkv:
        reached = is_adapter_target(f"self_attn.{names.qkv}", tuning, architecture)
        return [width for letter, width in widths.items() if reached and letter in build.context.adapters.joined_parts]
    each = zip((names.q, names.k, names.v), widths.values(), strict=True)
    return [width for name, width in each if is_adapter_target(f"self_attn.{name}", tuning, architecture)]
