"""The parameters of a Megatron-LM GPT on one rank, in registration order: what one model chunk holds.

Source: megatron-core 0.13.1 `models/gpt/gpt_model.py`, `transformer/`. Projections of attention and feed-forward are split
over the tensor-parallel group; norms, the position embedding and the biases of row-parallel projections are whole on every
rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache

from peakcast.models.ledger.layouts.pipeline import Chunk
from peakcast.models.ledger.megatron.blocks.context import (
    AdapterContext,
    LatentContext,
    MambaContext,
    MegatronContext,
)
from peakcast.models.ledger.megatron.blocks.expert_context import ExpertContext


class Projection(Enum):
    """A linear layer, by the name that megatron-core and Transformer Engine give it."""

    QKV = "linear_qkv"
    Q, KV = "linear_q", "linear_kv"
    """Of attention to another sequence."""
    LATENT_Q = "linear_q_proj"
    Q_DOWN, Q_UP, KV_DOWN, KV_UP = "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"
    """Of latent attention, to and from its narrow vectors."""
    OUTPUT = "linear_proj"
    FC1, FC2 = "linear_fc1", "linear_fc2"
    MAMBA_IN, MAMBA_OUT = "linear_in_proj", "linear_out_proj"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a rank, or one parameter of all its local experts: `numel` elements on this rank. `shape`: the
    matrix's, or (numel,); if `stacked`, after the number of experts."""

    name: str
    module: str
    shape: tuple[int, ...]
    own_bucket: bool = False
    """Whether the distributed optimizer gives it a bucket of its own, as it does for an embedding that two stages share."""
    expert: bool = False
    """Whether it is replicated over the expert data-parallel group only, and so lies in that group's buffers."""
    tensors: int = 1
    """Number of equal tensors that it consists of: one for each local expert, unless a grouped product reads them as
    one."""
    stacked: bool = False
    """Whether `shape` begins with the number of experts."""
    adapter: bool = False
    """Whether it is an adapter's."""
    projection: Projection | None = None
    """The projection whose matrix it is, or whose adapter's."""
    multiplied_by: tuple[str, ...] = ()
    """If it is a matrix of a projection: the labels that the operation which multiplies by it may have (`blocks/`)."""
    routed: bool = False
    """Whether it belongs to the experts that tokens are routed to."""

    @property
    def numel(self) -> int:
        return _product(self.shape)

    @property
    def is_projection_weight(self) -> bool:
        """Whether it is a matrix of a projection or of its adapter, not a bias or the norm that is part of it."""
        return self.projection is not None

    @property
    def is_matrix(self) -> bool:
        """Whether Muon updates it: a matrix that is neither the token table nor the output layer (megatron-core 0.16.1
        `optimizer/muon.py`, `is_embedding_or_output_parameter`)."""
        return len(self.shape) == 2 + self.stacked and self.name not in ("word_embeddings.weight", "output_layer.weight")

    def parts(self, numel: int) -> list[int]:
        """How its first `numel` elements are distributed over its tensors: elements of each, whole tensors first."""
        tensor_elements = self.numel // self.tensors
        if not tensor_elements:  # a Mamba-1, which has no heads here and is out of scope
            return []
        whole, rest = divmod(numel, tensor_elements)
        return [tensor_elements] * whole + ([rest] if rest else [])


_product = cache(math.prod)


ROW_PARALLEL = (Projection.OUTPUT, Projection.FC2, Projection.MAMBA_OUT)
"""Projections that are divided over the tensor-parallel ranks by their inputs; others are by outputs, or are whole."""
WHOLE_ON_EVERY_RANK = (Projection.Q_DOWN, Projection.KV_DOWN)


@lru_cache(maxsize=512)
def layer_parameters(context: MegatronContext) -> tuple[Parameter, ...]:
    """The parameters of one decoder layer, or of the one part that a hybrid's layer consists of, with their adapters."""
    own = _layer_parameters(context)
    if context.adapters is None:
        return own
    return tuple(made for p in own for made in (p, *_adapter(context, context.adapters, p)))


def _adapter(context: MegatronContext, adapters: AdapterContext, p: Parameter) -> Iterator[Parameter]:
    """The two matrices of the adapter on the projection whose weight is `p`, if it has one (sources: `blocks/adapters.py`).
    Megatron-Bridge divides the first matrix of a column-parallel projection over its rank, and gives the experts of a
    rank one adapter together."""
    if p.projection is None or p.projection.value not in adapters.targets:
        return
    module = p.name.removesuffix(".weight")
    experts, bridge = context.experts if p.stacked else None, adapters.library == "megatron_bridge"
    tensor = experts.expert_tensor_parallel_size if experts is not None else context.groups.tensor_parallel_size
    out, inside = p.shape[-2:]
    rank = first = adapters.rank
    if bridge and p.projection in ROW_PARALLEL + WHOLE_ON_EVERY_RANK:
        out = -(-out // tensor)
    if bridge and p.projection not in ROW_PARALLEL:
        first = -(-rank // tensor)
    for name, shape in (("linear_in", (first, inside)), ("linear_out", (out, rank))):
        of_adapter = tuple(f"{label}.{name}" for label in p.multiplied_by)
        made = replace(p, name=f"{module}.{name}.weight", shape=shape, adapter=True, multiplied_by=of_adapter)
        if p.stacked and not bridge:
            yield replace(made, shape=(p.shape[0], *shape))
        else:
            yield replace(made, tensors=1, stacked=False)


def _layer_parameters(context: MegatronContext) -> tuple[Parameter, ...]:
    """The network's own parameters of one layer."""
    if context.part == "mamba" and context.mamba is not None:
        return tuple(_mamba(context, context.mamba))
    if context.part == "mlp":
        return tuple(_dense(context) if context.experts is None else _routed(context, context.experts))
    if context.part == "attention":
        return tuple(_attention(context))
    attention = _attention(context) if context.latent is None else _latent_attention(context, context.latent)
    cross = _cross_attention(context) if context.source_sequence else ()
    return (*attention, *cross, *(_dense(context) if context.experts is None else _routed(context, context.experts)))


def _matrix(module: str, projection: Projection, shape: tuple[int, ...], labels: tuple[str, ...] = ()) -> Parameter:
    """The matrix of a projection in `module`. `labels`: as in `multiplied_by`; by default the projection's name."""
    name = projection.value
    return Parameter(f"{module}.{name}.weight", "", shape, projection=projection, multiplied_by=labels or (name,))


def _attention(context: MegatronContext) -> Iterator[Parameter]:
    hidden, mixed = context.hidden, context.attention.query + 2 * context.attention.key_value
    yield _matrix("self_attention", Projection.OUTPUT, (hidden, context.attention.query))
    if context.linear_bias:
        yield Parameter("self_attention.linear_proj.bias", "", (hidden,))
    yield from _norm(context, "self_attention.linear_qkv.layer_norm", hidden)
    yield _matrix("self_attention", Projection.QKV, (mixed, hidden))
    if context.attention.qkv_bias:
        yield Parameter("self_attention.linear_qkv.bias", "", (mixed,))
    if context.attention.qk_norm:
        yield from _norm(context, "self_attention.q_layernorm", context.attention.head_dim)
        yield from _norm(context, "self_attention.k_layernorm", context.attention.head_dim)


def _mamba(context: MegatronContext, mamba: MambaContext) -> Iterator[Parameter]:
    """Source: megatron-core 0.18 `ssm/mamba_mixer.py`; A_log and D have the model's narrow dtype."""
    yield Parameter("mixer.conv1d.weight", "", (mamba.convolved, 1, mamba.kernel))
    yield Parameter("mixer.conv1d.bias", "", (mamba.convolved,))
    for name in ("dt_bias", "A_log", "D"):
        yield Parameter(f"mixer.{name}", "", (mamba.heads,))
    yield from _norm(context, "mixer.linear_in_proj.layer_norm", context.hidden)
    yield _matrix("mixer", Projection.MAMBA_IN, (mamba.input, context.hidden))
    yield Parameter("mixer.norm.weight", "", (mamba.inner,))
    yield _matrix("mixer", Projection.MAMBA_OUT, (context.hidden, mamba.inner))


def _cross_attention(context: MegatronContext) -> Iterator[Parameter]:
    yield from _norm(context, "pre_cross_attn_layernorm", context.hidden)
    output = (context.hidden, context.attention.query)
    yield _matrix("cross_attention", Projection.OUTPUT, output, ("cross_attention.linear_proj",))
    if context.linear_bias:
        yield Parameter("cross_attention.linear_proj.bias", "", (context.hidden,))
    for name, width in (("q", context.attention.query), ("kv", 2 * context.attention.key_value)):
        yield _matrix(
            "cross_attention", Projection(f"linear_{name}"), (width, context.hidden), (f"cross_attention.linear_{name}",)
        )
        if context.linear_bias:
            yield Parameter(f"cross_attention.linear_{name}.bias", "", (width,))


def _latent_attention(context: MegatronContext, latent: LatentContext) -> Iterator[Parameter]:
    yield from _norm(context, "input_layernorm", context.hidden)
    yield _matrix("self_attention", Projection.OUTPUT, (context.hidden, context.attended))
    if context.linear_bias:
        yield Parameter("self_attention.linear_proj.bias", "", (context.hidden,))
    query = context.attention.heads * latent.qk_dim
    if latent.q_lora_rank:
        yield _matrix("self_attention", Projection.Q_DOWN, (latent.q_lora_rank, context.hidden))
        if latent.qk_norm:
            yield from _norm(context, "self_attention.linear_q_up_proj.layer_norm", latent.q_lora_rank)
        yield _matrix("self_attention", Projection.Q_UP, (query, latent.q_lora_rank))
    else:
        yield _matrix("self_attention", Projection.LATENT_Q, (query, context.hidden))
    down, up = latent.kv_lora_rank + latent.rope_dim, context.attention.heads * (latent.nope_dim + latent.v_dim)
    yield _matrix("self_attention", Projection.KV_DOWN, (down, context.hidden))
    if latent.qk_norm:
        yield from _norm(context, "self_attention.linear_kv_up_proj.layer_norm", latent.kv_lora_rank)
    yield _matrix("self_attention", Projection.KV_UP, (up, latent.kv_lora_rank))


def _dense(context: MegatronContext) -> Iterator[Parameter]:
    yield from _norm(context, "mlp.linear_fc1.layer_norm", context.hidden)
    yield from _feed_forward(context, "mlp", context.feed_forward.width, ("",))


def _routed(context: MegatronContext, experts: ExpertContext) -> Iterator[Parameter]:
    """The parameters of a mixture of experts."""
    yield from _norm(context, "pre_mlp_layernorm", context.hidden)
    yield Parameter("mlp.router.weight", "", (experts.num_experts, context.hidden))
    # one entry for the matrices of all local experts, which run together or one by one (`blocks/moe.py`)
    for p in _feed_forward(context, "mlp.experts", experts.ffn, ("experts.", "expert.")):
        tensors = 1 if experts.joined_weights else experts.local_experts
        shape, replicated = (experts.local_experts, *p.shape), experts.expert_parallel_size > 1
        yield replace(p, shape=shape, expert=replicated, tensors=tensors, stacked=True, routed=True)
    if experts.shared_ffn:
        yield from _feed_forward(context, "mlp.shared_experts", experts.shared_ffn, ("shared_experts.",))
        if experts.shared_gate:
            yield Parameter("mlp.shared_experts.gate_weight", "", (1, context.hidden))


def _feed_forward(context: MegatronContext, name: str, width: int, labels: tuple[str, ...]) -> Iterator[Parameter]:
    """Both projections of a feed-forward of this `width`. `labels`: how the labels of their operations may begin."""
    inner = width * (2 if context.feed_forward.gated else 1)
    first, second = (tuple(label + projection for label in labels) for projection in ("linear_fc1", "linear_fc2"))
    yield _matrix(name, Projection.FC1, (inner, context.hidden), first)
    if context.linear_bias:
        yield Parameter(f"{name}.linear_fc1.bias", "", (inner,))
    yield _matrix(name, Projection.FC2, (context.hidden, width), second)
    if context.linear_bias:
        yield Parameter(f"{name}.linear_fc2.bias", "", (context.hidden,))


def _norm(context: MegatronContext, name: str, width: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", "", (width,))
    if context.normalization == "layernorm":
        yield Parameter(f"{name}.bias", "", (width,))


def _prediction(context: MegatronContext) -> Iterator[Parameter]:
    """The parameters of a multi-token-prediction layer."""
    yield from _norm(context, "enorm", context.hidden)
    yield from _norm(context, "hnorm", context.hidden)
    yield Parameter("eh_proj.weight", "", (context.hidden // context.groups.tensor_parallel_size, 2 * context.hidden))
    yield from layer_parameters(context)
    yield from _norm(context, "final_layernorm", context.hidden)


def chunk_parameters(
    contexts: Callable[[int], MegatronContext], chunk: Chunk, *, tied: bool, pipelined: bool, ahead: Sequence[int] = ()
) -> list[Parameter]:
    """The parameters of a model chunk whose layer i has `contexts(i)`. A tied output layer on another stage than the
    embedding has its own copy of the table. So has the last stage under multi-token prediction, whose layers have the
    numbers `ahead`; if both ends are on that stage, there are two copies (megatron-core 0.16.1 `gpt_model.py`,
    `skip_weight_param_allocation`)."""
    shares, context = (tied or bool(ahead)) and pipelined, contexts(0)
    embeds = chunk.is_first or (chunk.is_last and bool(ahead))
    parameters = list(_embeddings(context, own_bucket=shares)) if embeds else []
    for layer in chunk.layers:
        parameters += _of_layer(contexts(layer), f"layers.{layer}")
    if context.ends.final_norms and chunk.layers and contexts(chunk.layers[-1]).source_sequence:
        parameters += [Parameter(p.name, "encoder", p.shape) for p in _norm(context, "final_layernorm", context.hidden)]
    if chunk.is_last:
        if context.ends.final_norms:
            parameters += [Parameter(p.name, "head", p.shape) for p in _norm(context, "final_layernorm", context.hidden)]
        for layer in ahead:
            parameters += [replace(p, module=f"mtp.{layer}") for p in _prediction(contexts(layer))]
        if context.ends.masked_tokens:
            parameters += [replace(p, module="head") for p in _masked_token_head(context)]
        if not (tied and chunk.is_first):
            table = (context.ends.vocabulary, context.hidden)
            parameters.append(Parameter("output_layer.weight", "head", table, own_bucket=shares and tied))
        if context.ends.output_bias:
            parameters.append(Parameter("output_layer.bias", "head", (context.ends.vocabulary,)))
        if context.ends.masked_tokens and context.ends.token_types:
            parameters += [replace(p, module="head") for p in _sentence_head(context)]
    return parameters


@lru_cache(maxsize=2048)
def _of_layer(context: MegatronContext, module: str) -> tuple[Parameter, ...]:
    """The parameters of the layer called `module`, which has them on most stages of a search's layouts."""
    return tuple(replace(parameter, module=module) for parameter in layer_parameters(context))


def _embeddings(context: MegatronContext, *, own_bucket: bool) -> Iterator[Parameter]:
    """The token table and, if there are such, the tables of positions and of token types."""
    yield Parameter("word_embeddings.weight", "embedding", (context.ends.vocabulary, context.hidden), own_bucket=own_bucket)
    if context.ends.positions:
        yield Parameter("position_embeddings.weight", "embedding", (context.ends.positions, context.hidden))
    if context.ends.token_types:
        yield Parameter("tokentype_embeddings.weight", "embedding", (context.ends.token_types, context.hidden))


def _masked_token_head(context: MegatronContext) -> Iterator[Parameter]:
    """What BERT has before its output layer, whole on every rank. Source: megatron-core `models/bert/bert_lm_head.py`."""
    yield Parameter("lm_head.dense.weight", "", (context.hidden, context.hidden))
    yield Parameter("lm_head.dense.bias", "", (context.hidden,))
    yield from _norm(context, "lm_head.layer_norm", context.hidden)


def _sentence_head(context: MegatronContext) -> Iterator[Parameter]:
    """BERT's two logits per sample, from the sample's first token. Source: `models/bert/bert_model.py`, `pooler.py`."""
    yield Parameter("binary_head.weight", "", (2, context.hidden))
    yield Parameter("binary_head.bias", "", (2,))
    yield Parameter("pooler.dense.weight", "", (context.hidden, context.hidden))
    yield Parameter("pooler.dense.bias", "", (context.hidden,))
