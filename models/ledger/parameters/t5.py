"""The trainable tensors of T5's encoder and decoder layers (transformers 5.17 `models/t5/modeling_t5.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from peakcast.jobs.architecture import Architecture
from peakcast.models.ledger.parameters.tensor import ParameterTensor, linear, norm

SELF, CROSS, FEED_FORWARD = "self_attn", "cross_attn", "mlp"


def t5_layer(architecture: Architecture, layer: int) -> tuple[ParameterTensor, ...]:
    """The tensors of layer `layer`; the encoder's layers come first, then the decoder's. The first layer of each has the
    table of relative positions."""
    decodes = layer >= architecture.num_hidden_layers
    return _t5_layer(architecture, decodes, layer in (0, architecture.num_hidden_layers))


@cache
def _t5_layer(architecture: Architecture, decodes: bool, has_positions: bool) -> tuple[ParameterTensor, ...]:
    tensors = list(_attention(architecture, SELF))
    if has_positions:
        shape = (architecture.relative_attention_num_buckets, architecture.num_attention_heads)
        tensors.append(ParameterTensor(f"{SELF}.relative_attention_bias.weight", shape, "position_embedding", None))
    if decodes:
        tensors.extend(_attention(architecture, CROSS))
    width, inner = architecture.hidden_size, architecture.intermediate_size
    for name in up_projections(architecture):
        tensors.extend(linear(f"{FEED_FORWARD}.{name}", inner, width, "mlp", 0, bias=False))
    tensors.extend(linear(f"{FEED_FORWARD}.wo", width, inner, "mlp", 1, bias=False))
    tensors.extend(norm(architecture, f"{FEED_FORWARD}.layer_norm", width))
    return tuple(tensors)


def t5_head(architecture: Architecture) -> Iterator[ParameterTensor]:
    """The encoder's last norm."""
    return norm(architecture, "encoder.final_layer_norm", architecture.hidden_size)


def up_projections(architecture: Architecture) -> tuple[str, ...]:
    """Names of the feed-forward's projections to `intermediate_size`; the one with the activation first."""
    return ("wi_0", "wi_1") if architecture.gated_mlp else ("wi",)


def _attention(architecture: Architecture, name: str) -> Iterator[ParameterTensor]:
    width, inner = architecture.hidden_size, architecture.query_size
    for leaf in ("q", "k", "v"):
        yield from linear(f"{name}.{leaf}", inner, width, "attention", 0, bias=False)
    yield from linear(f"{name}.o", width, inner, "attention", 1, bias=False)
    yield from norm(architecture, f"{name}.layer_norm", width)
