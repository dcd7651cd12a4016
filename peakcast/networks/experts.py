"""Hugging Face families with mixtures of experts, and with multi-latent attention.

Defaults are those of the family's config class in transformers 5.17, or of the remote code where the family lives
outside transformers (marked so). The rules are explained in `hf_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.jobs.architecture import Architecture
from peakcast.networks.dense import MISTRAL, NO_WINDOW, OLMO, QWEN2, QWEN3
from peakcast.networks.rules import DEEPSEEK_MLA, Choice, Family, Key, Row, deepseek_moe, experts, llama, plain


def _qwen_dense_prefix(config: Mapping[str, Any], values: Row) -> None:
    """Read `mlp_only_layers` as a number of dense layers at the start; any other pattern is refused later."""
    dense = config.get("mlp_only_layers") or []
    if isinstance(dense, (list, tuple)) and list(dense) == list(range(len(dense))):
        values["moe"]["first_k_dense_replace"] = len(dense)
    else:
        values["refusal"] = ("mlp_only_layers", dense, "a list of the first layers (0, 1, ...)")


def _dbrx_attention(architecture: Architecture) -> Row:
    """The keys of DBRX's attention that must be given (transformers 5.17 modeling_dbrx.py), with the published networks'
    values."""
    dropout, heads = architecture.attention_dropout, architecture.num_key_value_heads
    return {"attn_config": {"attn_pdrop": dropout, "kv_n_heads": heads, "clip_qkv": 8, "rope_theta": 500000}}


_QWEN_STEP = Key("decoder_sparse_step", 1)
_GRANITE_MOE = llama(mlp_bias=False)
_DEEPSEEK = llama(
    intermediate_size=Key("intermediate_size", 11008),
    vocab_size=Key("vocab_size", 102400),
    mlp_bias=False,
)

EXPERTS: Mapping[str, Family] = {
    "mixtral": Family(
        MISTRAL | {"sliding_window": NO_WINDOW},
        experts(Key("num_local_experts", 8), Key("num_experts_per_tok", 2), Key("intermediate_size", 14336)),
    ),
    "qwen2_moe": Family(
        QWEN2
        | {
            "num_key_value_heads": Key("num_key_value_heads", 16, nullable=True),
            "intermediate_size": Key("intermediate_size", 5632),
            "attention_bias": Key("qkv_bias", True),
        },
        experts(
            Key("num_experts", 60),
            Key("num_experts_per_tok", 4),
            Key("moe_intermediate_size", 1408),
            shared_expert_intermediate_size=Key("shared_expert_intermediate_size", 5632),
            shared_expert_gate=True,
            moe_layer_freq=_QWEN_STEP,
        ),
        adjust=_qwen_dense_prefix,
    ),
    "qwen3_moe": Family(
        QWEN3
        | {
            "num_key_value_heads": Key("num_key_value_heads", 4, nullable=True),
            "head_dim": Key("head_dim", None, nullable=True),
            "intermediate_size": Key("intermediate_size", 6144),
        },
        experts(
            Key("num_experts", 128),
            Key("num_experts_per_tok", 8),
            Key("moe_intermediate_size", 768),
            moe_layer_freq=_QWEN_STEP,
        ),
        adjust=_qwen_dense_prefix,
    ),
    "phimoe": Family(
        llama(
            num_key_value_heads=Key("num_key_value_heads", 8, nullable=True),
            intermediate_size=Key("intermediate_size", 6400),
            vocab_size=Key("vocab_size", 32064),
            max_position_embeddings=Key("max_position_embeddings", 131072),
            normalization="layernorm",
            mlp_bias=False,
            lm_head_bias=Key("lm_head_bias", False),
            sliding_window=NO_WINDOW,
        ),
        experts(Key("num_local_experts", 16), Key("num_experts_per_tok", 2), Key("intermediate_size", 6400)),
        demands={"num_experts_per_tok": 2},  # transformers 5.17 modeling_phimoe.py sparsemixer chooses two
    ),
    "olmoe": Family(
        OLMO | {"intermediate_size": Key("intermediate_size", 2048), "qk_norm": "full"},
        experts(Key("num_experts", 64), Key("num_experts_per_tok", 8), Key("intermediate_size", 2048)),
    ),
    "deepseek": Family(  # remote code of deepseek-ai/deepseek-moe-16b-base
        _DEEPSEEK,
        deepseek_moe(1407, None, None, None, 0),
        demands={"moe_layer_freq": 1},
    ),
    "deepseek_v2": Family(_DEEPSEEK, deepseek_moe(1407, 64, None, 2, 0), DEEPSEEK_MLA, demands={"moe_layer_freq": 1}),
    "deepseek_v3": Family(
        _DEEPSEEK
        | {
            "intermediate_size": Key("intermediate_size", 18432),
            "vocab_size": Key("vocab_size", 129280),
            "max_position_embeddings": Key("max_position_embeddings", 4096),
            "num_nextn_predict_layers": Key("num_nextn_predict_layers", 0),
        },
        deepseek_moe(2048, 256, 8, 1, 3) | {"router_correction_bias": True},
        DEEPSEEK_MLA,
        demands={"moe_layer_freq": 1},
    ),
    "granitemoe": Family(
        _GRANITE_MOE,
        experts(Key("num_local_experts", 8), Key("num_experts_per_tok", 2), Key("intermediate_size", 11008)),
    ),
    "granitemoeshared": Family(
        _GRANITE_MOE | {"fused_gate_up": True},
        experts(
            Key("num_local_experts", 8),
            Key("num_experts_per_tok", 2),
            Key("intermediate_size", 11008),
            shared_expert_intermediate_size=Key("shared_intermediate_size", 0),
        ),
    ),
    "glm4_moe": Family(
        plain(
            rotary_in_parts=True,
            num_key_value_heads=Key("num_key_value_heads", 8, nullable=True),
            intermediate_size=Key("intermediate_size", 10944),
            vocab_size=Key("vocab_size", 151552),
            max_position_embeddings=Key("max_position_embeddings", 131072),
            attention_bias=Key("attention_bias", False),
            qk_norm=Choice("use_qk_norm", False, "head", "none"),
            num_nextn_predict_layers=Key("num_nextn_predict_layers", 0),
        ),
        deepseek_moe(1408, 128, 8, 1, 1) | {"router_correction_bias": True},
    ),
    "dbrx": Family(
        plain(
            hidden_size=Key("d_model"),
            num_hidden_layers=Key("n_layers"),
            num_attention_heads=Key("n_heads"),
            num_key_value_heads=Key("attn_config.kv_n_heads", 1),
            head_dim=None,
            intermediate_size=Key("ffn_config.ffn_hidden_size", 3584),
            max_position_embeddings=Key("max_seq_len", 2048),
            normalization="layernorm_no_bias",
            fused_qkv=True,
            hidden_act=Key("ffn_config.ffn_act_fn.name", "silu"),
            attention_dropout=Key("attn_config.attn_pdrop", 0.0),
            hidden_dropout=Key("resid_pdrop", 0.0),
            embedding_dropout=Key("emb_pdrop", 0.0),
        ),
        experts(
            Key("ffn_config.moe_num_experts", 4),
            Key("ffn_config.moe_top_k", 1),
            Key("ffn_config.ffn_hidden_size", 3584),
        ),
        restore=_dbrx_attention,
    ),
    "gpt_oss": Family(
        llama(
            num_key_value_heads=Key("num_key_value_heads", 8, nullable=True),
            head_dim=Key("head_dim", 64),
            intermediate_size=Key("intermediate_size", 2880),
            vocab_size=Key("vocab_size", 201088),
            max_position_embeddings=Key("max_position_embeddings", 131072),
            attention_bias=Key("attention_bias", True),
            attention_output_bias=Key("attention_bias", True),
            mlp_bias=False,
            attention_sinks=True,
            sliding_window=Key("sliding_window", 128, nullable=True),
        ),
        experts(
            Key("num_local_experts", 128),
            Key("num_experts_per_tok", 4),
            Key("intermediate_size", 2880),
            expert_bias=True,
            router_bias=True,
        ),
    ),
}
"""`model_type` -> the family's rules."""
