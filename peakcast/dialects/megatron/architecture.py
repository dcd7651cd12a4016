"""The `Architecture` of a Megatron-LM command line: shapes, biases, the padded vocabulary, experts, latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from peakcast.core.units import round_up
from peakcast.dialects.common.translation import Settings
from peakcast.dialects.megatron import flags as flags
from peakcast.dialects.megatron.hybrid import hybrid_parts, hybrid_pattern, is_hybrid, state_space
from peakcast.dialects.megatron.layout import binary_pattern
from peakcast.jobs.architecture import (
    MOST_LAYERS,
    Architecture,
    MixtureOfExperts,
    MultiLatentAttention,
    Normalization,
    PositionEmbedding,
)

POSITIONS: dict[str, PositionEmbedding] = {
    "learned_absolute": "learned", "rope": "rope", "mrope": "rope", "yarn": "rope", "relative": "relative", "none": "none",
}  # fmt: skip
FAMILIES = {"encoder": "bert", "encoder_decoder": "t5"}
NORMALIZATIONS: dict[str, Normalization] = {
    "LayerNorm": "layernorm", "RMSNorm": "rmsnorm", "layernorm": "layernorm", "rmsnorm": "rmsnorm",
}  # fmt: skip
"""Megatron-LM's names, and those of Megatron-DeepSpeed."""


def megatron_architecture(settings: Settings, tensor: int) -> Architecture:
    """The network that the flags describe, with its vocabulary padded for `tensor` ranks. Raises: SpecError naming the
    flag."""
    hidden = settings.size("hidden_size")
    bias = not settings.switch("disable_bias_linear")
    swiglu = settings.switch("swiglu")
    gated = swiglu or settings.switch("quick_geglu")
    ffn = settings.size("ffn_hidden_size", int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden)
    heads, groups = _heads(settings, hidden, tensor)
    dropout = settings.number("hidden_dropout", 0.1, assume=True) or 0.0
    position = one_of_table(settings, "position_embedding_type", "learned_absolute", POSITIONS)
    rotary = settings.switch("use_rotary_position_embeddings")
    kind = _kind(settings)
    parts = hybrid_parts(settings) if kind == "hybrid" else ()
    mla = settings.switch("multi_latent_attention")
    experts = settings.integer("num_experts", least=0)
    layers = _num_layers(settings)
    return Architecture(
        name=f"megatron-{layers}-layers-{hidden}",
        model_type=_model_type(kind, has_experts=bool(experts)),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=settings.size("kv_channels", hidden // heads or 1),
        intermediate_size=ffn,
        vocab_size=_vocabulary(settings, tensor, kind),
        type_vocab_size=2 if kind == "encoder" and not settings.switch("bert_no_binary_head") else 0,
        max_position_embeddings=settings.integer("max_position_embeddings", 0, least=0) or 0,
        tie_word_embeddings=not settings.switch("untie_embeddings_and_output_weights"),
        position_embedding="rope" if rotary else position,
        normalization=one_of_table(settings, "normalization", "LayerNorm", NORMALIZATIONS),
        hidden_act=_activation(settings, gated=gated),
        gated_mlp=gated,
        fused_qkv=True,
        fused_gate_up=gated,
        attention_bias=bias or settings.switch("add_qkv_bias"),
        attention_output_bias=bias,
        mlp_bias=bias,
        qk_norm="head" if settings.switch("qk_layernorm") and not mla else "none",
        attention_dropout=settings.number("attention_dropout", 0.1, assume=True) or 0.0,
        hidden_dropout=dropout,
        embedding_dropout=dropout,
        moe=_experts(settings, experts, ffn, layers, bias) if experts else None,
        mla=_latent_attention(settings) if mla else None,
        ssm=state_space(settings, hidden, tensor) if parts else None,
        layer_types=parts,
        num_decoder_layers=settings.size("decoder_num_layers", layers) if kind == "encoder_decoder" else 0,
        num_nextn_predict_layers=settings.integer("mtp_num_layers", 0, least=0) or 0,
        kind=kind,
    )


def _model_type(kind: str, *, has_experts: bool) -> str:
    if kind == "decoder":
        return "megatron_moe" if has_experts else "megatron_gpt"
    return f"megatron_{FAMILIES.get(kind, kind)}"


def _activation(settings: Settings, *, gated: bool) -> str:
    squared_relu = settings.switch("squared_relu")
    if settings.switch("swiglu"):
        return "silu"
    return "relu2" if squared_relu else "quick_gelu" if gated else "gelu"


def _heads(settings: Settings, hidden: int, tensor: int) -> tuple[int, int]:
    """The number of attention heads, and of key-value heads. Raises: SpecError if `tensor` ranks cannot divide them."""
    heads = settings.size("num_attention_heads")
    if not settings.given("kv_channels") and hidden % heads:
        raise settings.refuse(
            "num_attention_heads", f"does not divide hidden-size={hidden}; use a divisor or give kv-channels"
        )
    if heads % tensor:
        raise settings.refuse(
            "tensor_model_parallel_size", f"does not divide num-attention-heads={heads}; use a divisor", 1
        )
    groups = settings.size("num_query_groups", 1)
    groups = groups if settings.switch("group_query_attention") else settings.size("num_key_value_heads", heads)
    if heads % groups or (groups % tensor and tensor % groups):
        raise settings.refuse(
            "num_query_groups", f"must divide num-attention-heads={heads} and fit tensor-model-parallel-size={tensor}", 1
        )
    return heads, groups


def one_of_table(settings: Settings, key: str, default: str, table: Mapping[str, Any]) -> Any:
    """The entry of `table` for the value of the flag `key`. Raises: SpecError with near misses."""
    return table[settings.one_of(key, default, table)]


def _kind(settings: Settings) -> Literal["decoder", "encoder", "encoder_decoder", "hybrid", "multimodal"]:
    if settings.given("encoder_num_layers") or settings.given("decoder_num_layers"):
        return "encoder_decoder"
    if is_hybrid(settings):
        return "hybrid"
    if settings.given("img_h"):
        return "multimodal"
    bert = settings.switch("bert_binary_head") or settings.switch("bert_no_binary_head")
    return "encoder" if bert else "decoder"


def _num_layers(settings: Settings) -> int:
    counted = len(hybrid_pattern(settings)) or None
    layers = settings.size("num_layers", settings.integer("encoder_num_layers", counted))
    if layers > MOST_LAYERS:
        raise settings.refuse("num_layers", f"must be at most {MOST_LAYERS}")
    return layers


def _vocabulary(settings: Settings, tensor: int, kind: str) -> int:
    """The padded vocabulary: rows of the embedding over all tensor-parallel ranks."""
    padded = settings.integer("padded_vocab_size")
    if padded is not None:  # used unchanged (megatron/training/arguments.py)
        for key in ("tokenizer_type", "vocab_size", "vocab_extra_ids", "make_vocab_size_divisible_by"):
            settings.given(key)
        return padded
    tokenizer = settings.text("tokenizer_type") or settings.text("patch_tokenizer_type")
    usual = "BertWordPieceLowerCase" if kind == "encoder" else ""
    size = settings.integer("vocab_size")
    extra = sum(settings.integer(key, 0, least=0) or 0 for key in ("vocab_extra_ids", "extra_vocab_size"))
    if size is None:
        known = flags.TOKENIZERS.get(tokenizer or usual)
        size = (known or flags.LIKELY_TOKENIZERS.get(tokenizer, 50257)) + extra
        named = f"tokenizer-type={tokenizer!r}" if tokenizer else "neither vocab-size nor tokenizer-type is given"
        settings.notes.assumptions.append(f"vocab-size is treated as {size}, from {named}.")
        if known is None and tokenizer:
            settings.notes.warnings.append(f"{named} does not settle the vocabulary; give vocab-size to be sure.")
    elif tokenizer in flags.COUNT_ONE_MORE:
        size += 1  # the end-of-document token that they add
    return round_up(size, settings.size("make_vocab_size_divisible_by", 128) * tensor)


def _experts(settings: Settings, experts: int, ffn: int, layers: int, bias: bool) -> MixtureOfExperts:
    dense = _dense_layers(settings, layers)
    leading = next((i for i, layer in enumerate(dense) if layer != i), len(dense))
    return MixtureOfExperts(
        num_experts=experts,
        num_experts_per_tok=settings.size("moe_router_topk", 2),
        moe_intermediate_size=settings.size("moe_ffn_hidden_size", ffn),
        shared_expert_intermediate_size=settings.integer("moe_shared_expert_intermediate_size", 0, least=0) or 0,
        shared_expert_gate=settings.switch("moe_shared_expert_gate"),
        first_k_dense_replace=leading,
        dense_layers=dense[leading:],
        router_correction_bias=settings.switch("moe_router_enable_expert_bias"),
        expert_bias=bias,
    )


def _dense_layers(settings: Settings, layers: int) -> tuple[int, ...]:
    """The numbers of layers without experts. If `moe-layer-freq` is N: all except every N-th, counted from the first; if it
    is a pattern: its zeros. Source: megatron-core 0.16.1 `models/gpt/gpt_layer_specs.py`. Raises: SpecError naming the
    flag."""
    value = settings.raw("moe_layer_freq", "1")
    frequency = "".join(str(value).split()).strip("\\\"'")
    if frequency.isdecimal() and 0 < int(frequency) <= MOST_LAYERS:
        return tuple(layer for layer in range(layers) if layer % int(frequency))
    pattern = binary_pattern(frequency)
    if pattern is None or len(pattern) != layers:
        counted = "" if pattern is None else f", not {len(pattern)}"
        raise settings.refuse(
            "moe_layer_freq",
            f"must be a whole number or a pattern such as '([0]*3+[1]*{max(1, layers - 3)})' of num-layers={layers} zeros "
            f"and ones{counted}",
        )
    return tuple(layer for layer, routed in enumerate(pattern) if not routed)


def _latent_attention(settings: Settings) -> MultiLatentAttention:
    return MultiLatentAttention(
        q_lora_rank=settings.integer("q_lora_rank"),
        kv_lora_rank=settings.size("kv_lora_rank", 32),
        qk_nope_head_dim=settings.size("qk_head_dim", 128),
        qk_rope_head_dim=settings.size("qk_pos_emb_head_dim", 64),
        v_head_dim=settings.size("v_head_dim", 128),
    )
