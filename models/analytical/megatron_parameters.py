"""The parameters of a Megatron-LM GPT on one rank, in registration order: what one model chunk holds.

Source: megatron-core 0.13.1 `models/gpt/gpt_model.py`, `transformer/`. Attention and feed-forward projections are cut over
the tensor-parallel group; norms, the position embedding and the biases of row-parallel projections are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from peakcast.models.analytical.blocks.megatron_context import MegatronContext
from peakcast.models.analytical.pipeline import Chunk


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a rank: `numel` elements on this rank; `shape` of the matrix, or (numel,)."""

    name: str
    module: str
    shape: tuple[int, ...]
    own_bucket: bool = False
    """The distributed optimizer gives an embedding that two stages share a bucket of its own."""

    @property
    def numel(self) -> int:
        size = 1
        for side in self.shape:
            size *= side
        return size


@lru_cache(maxsize=512)
def layer_parameters(context: MegatronContext) -> tuple[Parameter, ...]:
    """Parameters of one dense decoder layer."""
    return tuple(_layer(context))


def _layer(context: MegatronContext) -> Iterator[Parameter]:
    hidden, mixed = context.hidden, context.query + 2 * context.key_value
    inner = context.ffn * (2 if context.gated else 1)
    biased = context.linear_bias
    yield Parameter("self_attention.linear_proj.weight", "", (hidden, context.query))
    if biased:
        yield Parameter("self_attention.linear_proj.bias", "", (hidden,))
    yield from _norm(context, "self_attention.linear_qkv.layer_norm", hidden)
    yield Parameter("self_attention.linear_qkv.weight", "", (mixed, hidden))
    if context.qkv_bias:
        yield Parameter("self_attention.linear_qkv.bias", "", (mixed,))
    if context.qk_norm:
        yield from _norm(context, "self_attention.q_layernorm", context.head_dim)
        yield from _norm(context, "self_attention.k_layernorm", context.head_dim)
    yield from _norm(context, "mlp.linear_fc1.layer_norm", hidden)
    yield Parameter("mlp.linear_fc1.weight", "", (inner, hidden))
    if biased:
        yield Parameter("mlp.linear_fc1.bias", "", (inner,))
    yield Parameter("mlp.linear_fc2.weight", "", (hidden, context.ffn))
    if biased:
        yield Parameter("mlp.linear_fc2.bias", "", (hidden,))


def _norm(context: MegatronContext, name: str, width: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", "", (width,))
    if context.normalization == "layernorm":
        yield Parameter(f"{name}.bias", "", (width,))


def chunk_parameters(context: MegatronContext, chunk: Chunk, *, tied: bool, pipelined: bool) -> list[Parameter]:
    """Parameters of a model chunk. A tied output layer on another stage than the embedding holds its own copy."""
    parameters = []
    shares = tied and pipelined
    if chunk.is_first:
        table = (context.vocabulary, context.hidden)
        parameters.append(Parameter("word_embeddings.weight", "embedding", table, own_bucket=shares))
        if context.positions:
            positions = (context.positions, context.hidden)
            parameters.append(Parameter("position_embeddings.weight", "embedding", positions))
    for layer in chunk.layers:
        parameters += [Parameter(p.name, f"layers.{layer}", p.shape) for p in layer_parameters(context)]
    if chunk.is_last:
        parameters += [Parameter(p.name, "head", p.shape) for p in _norm(context, "final_layernorm", context.hidden)]
        if not (tied and chunk.is_first):
            table = (context.vocabulary, context.hidden)
            parameters.append(Parameter("output_layer.weight", "head", table, own_bucket=shares))
    return parameters
