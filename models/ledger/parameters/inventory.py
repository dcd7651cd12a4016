"""The inventory of trainable tensors as Hugging Face makes them: names, shapes, roles, and how tensor parallelism splits
them.

Shapes: a projection is [out_features, in_features] as in `nn.Linear` (GPT-2's `Conv1D` stores the transpose); the experts
of a layer are one [num_experts, ...] tensor as in transformers 5 (earlier versions had one tensor per expert).

Names have no layer index. They start with `self_attn.` or `mlp.` for every family; the last part is the family's own,
because users write adapter targets with it. Buffers (DeepSeek-V3's correction bias, rotary tables) are not included.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from peakcast.jobs.architecture import Architecture, MixtureOfExperts, MultiLatentAttention
from peakcast.models.ledger.parameters.state_space import state_space
from peakcast.models.ledger.parameters.t5 import t5_head, t5_layer
from peakcast.models.ledger.parameters.tensor import ParameterTensor, Role, linear, norm
from peakcast.networks.families import family_of

SCORE, POOLER, CLASSIFIER = "score", "pooler.dense", "classifier"
CLASSIFIER_DENSE, CLASSIFIER_OUT = "classifier.dense", "classifier.out_proj"
"""The Linears of classifiers' heads, as the networks call them."""
COPIED_BY_PEFT = ("score", "classifier")
"""Modules that peft copies and trains in any classifier (peft 0.21 `peft_model.py` PeftModelForSequenceClassification)."""


def embedding_parameters(architecture: Architecture) -> tuple[ParameterTensor, ...]:
    """Token table, learned positions, token types, and the norm after them if there is one."""
    width = architecture.hidden_size
    tables = [ParameterTensor("embed_tokens.weight", (architecture.vocab_size, width), "embedding", 0)]
    if architecture.position_embedding == "learned":
        rows = architecture.max_position_embeddings + architecture.position_embedding_offset
        tables.append(ParameterTensor("embed_positions.weight", (rows, width), "position_embedding", None))
    if architecture.type_vocab_size:
        shape = (architecture.type_vocab_size, width)
        tables.append(ParameterTensor("token_type_embeddings.weight", shape, "position_embedding", None))
    if architecture.embedding_norm:
        tables.extend(norm(architecture, "embedding_layernorm", width))
    return tuple(tables)


def layer_parameters(architecture: Architecture, layer: int) -> tuple[ParameterTensor, ...]:
    """The tensors of layer `layer`: norms, attention, feed-forward. Layers count from 0, an encoder's before the
    decoder's."""
    if architecture.kind == "encoder_decoder":
        return t5_layer(architecture, layer)
    if architecture.layer_types:
        return _hybrid_layer(architecture, architecture.layer_types[layer])
    return _layer(architecture, architecture.is_moe_layer(layer))


def head_parameters(architecture: Architecture) -> tuple[ParameterTensor, ...]:
    """Final norm and lm_head (whose weight is left out if it is tied to the token table); an encoder's masked-token head; a
    classifier's own."""
    width = architecture.hidden_size
    tensors: list[ParameterTensor] = []
    if architecture.head != "language_model":
        return tuple(_classifier(architecture))
    if architecture.kind == "encoder":
        tensors.extend(linear("lm_head.dense", width, width, "mlp", None, bias=True))
    if architecture.kind == "encoder_decoder":
        tensors.extend(t5_head(architecture))
    tensors.extend(norm(architecture, "norm", width))
    if not architecture.tie_word_embeddings:
        tensors.append(ParameterTensor("lm_head.weight", (architecture.vocab_size, width), "lm_head", 0))
    if architecture.lm_head_bias:
        tensors.append(ParameterTensor("lm_head.bias", (architecture.vocab_size,), "lm_head", 0))
    return tuple(tensors)


def _classifier(architecture: Architecture) -> Iterator[ParameterTensor]:
    """The head of a classifier (transformers 5.17 `modeling_layers.py`, `models/bert/modeling_bert.py`,
    `models/roberta/modeling_roberta.py`)."""
    width, labels, ends = architecture.hidden_size, architecture.num_labels, family_of(architecture).ends.classifier
    of_tokens = architecture.head == "token_classifier"
    if architecture.kind != "encoder":
        yield from norm(architecture, "norm", width)
        yield from linear(SCORE, labels, width, "lm_head", None, bias=of_tokens)
        return
    if not of_tokens:
        yield from linear(POOLER if ends == "pooled" else CLASSIFIER_DENSE, width, width, "mlp", None, bias=True)
    out = CLASSIFIER_OUT if ends == "dense" and not of_tokens else CLASSIFIER
    yield from linear(out, labels, width, "lm_head", None, bias=True)


@cache
def num_parameters(architecture: Architecture) -> int:
    """Trainable elements of the whole network. Tied weights count once; multi-token-prediction layers are left out."""
    total = sum(t.numel for t in embedding_parameters(architecture) + head_parameters(architecture))
    layers = (layer_parameters(architecture, layer) for layer in range(architecture.num_layers))
    numels: dict[int, int] = {}  # by id: equal layers share one tuple
    for tensors in layers:
        if id(tensors) not in numels:
            numels[id(tensors)] = sum(tensor.numel for tensor in tensors)
        total += numels[id(tensors)]
    return total


@cache
def _layer(architecture: Architecture, routed: bool) -> tuple[ParameterTensor, ...]:
    """The tensors of a layer with a mixture of experts (`routed`) or a dense feed-forward."""
    tensors = list(_norms(architecture))
    tensors.extend(_attention(architecture))
    if routed and architecture.moe is not None:
        tensors.extend(_routed_feed_forward(architecture, architecture.moe))
    else:
        tensors.extend(_feed_forward(architecture, "mlp", architecture.intermediate_size, "mlp"))
    return tuple(tensors)


@cache
def _hybrid_layer(architecture: Architecture, parts: str) -> tuple[ParameterTensor, ...]:
    """The tensors of a layer of a hybrid network. `parts`: names joined by "+" for parts in sequence and "|" for parts that
    read the same norm; there is one norm for each group in sequence."""
    tensors: list[ParameterTensor] = []
    for number, group in enumerate(parts.split("+")):
        tensors.extend(norm(architecture, f"norm_{number}", architecture.hidden_size))
        for part in group.split("|"):
            tensors.extend(_part(architecture, part))
    return tuple(tensors)


def _part(architecture: Architecture, part: str) -> Iterator[ParameterTensor]:
    """The tensors of one part of a hybrid layer."""
    if part == "mamba" and architecture.ssm is not None:
        return state_space(architecture, architecture.ssm)
    if part == "moe" and architecture.moe is not None:
        return _routed_feed_forward(architecture, architecture.moe)
    if part == "attention":
        return _attention(architecture)
    return _feed_forward(architecture, "mlp", architecture.intermediate_size, "mlp")


# -- pieces ---------------------------------------------------------------------------------------------------------------


def _norms(architecture: Architecture) -> Iterator[ParameterTensor]:
    """The norms on the residual stream. In `pre` layers the second is Hugging Face's `post_attention_layernorm`."""
    if architecture.parallel_block:
        names = ["input_layernorm", "post_attention_layernorm"][: architecture.norms_per_parallel_block]
    else:
        names = {
            "pre": ["input_layernorm", "post_attention_layernorm"],
            "post": ["post_attention_layernorm", "post_feedforward_layernorm"],
            "pre_and_post": [
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ],
        }[architecture.norm_placement]
    for name in names:
        yield from norm(architecture, name, architecture.hidden_size)


def _attention(architecture: Architecture) -> Iterator[ParameterTensor]:
    """The tensors of attention."""
    if architecture.mla is not None:
        yield from _latent_attention(architecture, architecture.mla)
        return
    family, width, bias = family_of(architecture), architecture.hidden_size, architecture.attention_bias
    names, out_first = family.names, family.modules.output_first
    query, key_value = architecture.query_size, architecture.key_value_size
    output = linear(f"self_attn.{names.out}", width, query, "attention", 1, bias=architecture.attention_output_bias)
    if out_first:
        yield from output
    if architecture.fused_qkv:
        yield from linear(f"self_attn.{names.qkv}", query + 2 * key_value, width, "attention", 0, bias=bias)
    else:
        for leaf, size in ((names.q, query), (names.k, key_value), (names.v, key_value)):
            yield from linear(f"self_attn.{leaf}", size, width, "attention", 0, bias=bias)
    if not out_first:
        yield from output
    yield from _qk_norms(architecture)
    if architecture.attention_sinks:
        yield ParameterTensor("self_attn.sinks", (architecture.num_attention_heads,), "attention", 0)


def _qk_norms(architecture: Architecture) -> Iterator[ParameterTensor]:
    """The norms of queries and keys inside attention."""
    dim = architecture.head_dim
    for name, heads in (("q_norm", architecture.num_attention_heads), ("k_norm", architecture.num_key_value_heads)):
        if architecture.qk_norm == "head":
            yield from norm(architecture, f"self_attn.{name}", dim)
        elif architecture.qk_norm == "full":
            yield ParameterTensor(f"self_attn.{name}.weight", (heads * dim,), "norm", 0)
        elif architecture.qk_norm == "per_head":
            yield ParameterTensor(f"self_attn.{name}.weight", (heads, dim), "norm", 0)


def _latent_attention(architecture: Architecture, mla: MultiLatentAttention) -> Iterator[ParameterTensor]:
    """Low-rank attention: the down-projections are replicated, the up-projections are split over heads.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; transformers `models/deepseek_v3/modeling_deepseek_v3.py`.
    """
    width, heads = architecture.hidden_size, architecture.num_attention_heads
    bias, query = architecture.attention_bias, heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        yield from linear("self_attn.q_proj", query, width, "attention", 0, bias=False)
    else:
        yield from linear("self_attn.q_a_proj", mla.q_lora_rank, width, "attention", None, bias=bias)
        yield from norm(architecture, "self_attn.q_a_layernorm", mla.q_lora_rank)
        yield from linear("self_attn.q_b_proj", query, mla.q_lora_rank, "attention", 0, bias=False)
    compressed = mla.kv_lora_rank + mla.qk_rope_head_dim
    yield from linear("self_attn.kv_a_proj_with_mqa", compressed, width, "attention", None, bias=bias)
    yield from norm(architecture, "self_attn.kv_a_layernorm", mla.kv_lora_rank)
    expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from linear("self_attn.kv_b_proj", expanded, mla.kv_lora_rank, "attention", 0, bias=False)
    yield from linear("self_attn.o_proj", width, heads * mla.v_head_dim, "attention", 1, bias=bias)


def _feed_forward(architecture: Architecture, prefix: str, inner: int, role: Role) -> Iterator[ParameterTensor]:
    """A dense feed-forward of width `inner`: gate and up (or up alone), then down."""
    names, width, bias = family_of(architecture).names, architecture.hidden_size, architecture.mlp_bias
    if architecture.gated_mlp and architecture.fused_gate_up:
        yield from linear(f"{prefix}.{names.gate_up}", 2 * inner, width, role, 0, bias=bias)
    elif architecture.gated_mlp:
        yield from linear(f"{prefix}.{names.gate}", inner, width, role, 0, bias=bias)
        yield from linear(f"{prefix}.{names.up}", inner, width, role, 0, bias=bias)
    else:
        yield from linear(f"{prefix}.{names.up}", inner, width, role, 0, bias=bias)
    yield from linear(f"{prefix}.{names.down}", width, inner, role, 1, bias=bias)


def _routed_feed_forward(architecture: Architecture, moe: MixtureOfExperts) -> Iterator[ParameterTensor]:
    """Router, experts, and the shared expert with its gate."""
    width, inner, num = architecture.hidden_size, moe.moe_intermediate_size, moe.num_experts
    both = 2 * inner if architecture.gated_mlp else inner
    router = list(linear("mlp.gate", num, width, "router", None, bias=moe.router_bias))
    experts_first = family_of(architecture).modules.experts_first
    if not experts_first:
        yield from router
    yield ParameterTensor("mlp.experts.gate_up_proj", (num, both, width), "expert", 1)
    if moe.expert_bias:
        yield ParameterTensor("mlp.experts.gate_up_proj_bias", (num, both), "expert", 1)
    yield ParameterTensor("mlp.experts.down_proj", (num, width, inner), "expert", 2)
    if moe.expert_bias:
        yield ParameterTensor("mlp.experts.down_proj_bias", (num, width), "expert", None)
    if experts_first:
        yield from router
    if moe.shared_expert_intermediate_size:
        yield from _feed_forward(architecture, "mlp.shared_expert", moe.shared_expert_intermediate_size, "shared_expert")
    if moe.shared_expert_gate:
        yield from linear("mlp.shared_expert_gate", 1, width, "shared_expert", None, bias=False)
