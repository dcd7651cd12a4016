"""Hugging Face families of the GPT-2 and GPT-3 shape: layer norms, a feed-forward of two matrices, biases.

Defaults are those of the family's config class in transformers 5.17, or of the remote code where the family lives
outside transformers (marked so). The rules are explained in `hf_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.jobs.architecture import Architecture
from peakcast.networks.dense import NO_WINDOW
from peakcast.networks.rules import Choice, Family, Key, Row, classic, gpt2, gptj


def _falcon(config: Mapping[str, Any], values: Row) -> None:
    """Falcon's three layouts: rw (serial, ALiBi), 7B (multi-query, parallel), 40B and later (grouped, parallel)."""
    heads, norms = values["num_attention_heads"], values["norms_per_parallel_block"]
    if values.pop("grouped"):
        values["num_key_value_heads"] = values["num_key_value_heads"] or heads
        values["parallel_block"] = True
        values["norms_per_parallel_block"] = 2 if norms in (None, 2) else 1
        values.pop("multi_query")
    else:
        values["num_key_value_heads"] = 1 if values.pop("multi_query") else heads
        values["norms_per_parallel_block"] = 1


def _falcon_flags(architecture: Architecture) -> Row:
    heads = architecture.num_key_value_heads
    return {
        "new_decoder_architecture": heads not in (1, architecture.num_attention_heads),
        "multi_query": heads == 1,
    }


def _gpt_neo_layers(architecture: Architecture) -> Row:
    """Layer types in which every second layer has a window of 256 tokens, as in the published networks; it does not change
    memory."""
    half, rest = divmod(architecture.num_hidden_layers, 2)
    return {"attention_types": [[["global", "local"], half]] * bool(half) + [[["global"], 1]] * rest}


CLASSIC: Mapping[str, Family] = {
    "phi": Family(
        classic(
            rotary_in_parts=True,
            num_key_value_heads=Key("num_key_value_heads", None, nullable=True),
            intermediate_size=Key("intermediate_size", 8192),
            vocab_size=Key("vocab_size", 51200),
            parallel_block=True,
            lm_head_bias=True,
            hidden_act=Key("hidden_act", "gelu_new"),
            qk_norm=Choice("qk_layernorm", False, "head", "none"),
            hidden_dropout=Key("resid_pdrop", 0.0),
            embedding_dropout=Key("embd_pdrop", 0.0),
        )
    ),
    "gpt2": Family(gpt2()),
    "gpt_bigcode": Family(
        gpt2(
            num_key_value_heads=Choice("multi_query", True, 1, None),
            hidden_act=Key("activation_function", "gelu_pytorch_tanh"),
        )
    ),
    "gpt_neo": Family(
        classic(
            num_hidden_layers=Key("num_layers"),
            num_attention_heads=Key("num_heads"),
            intermediate_size=Key("intermediate_size", None, nullable=True),
            vocab_size=Key("vocab_size", 50257),
            tie_word_embeddings=Key("tie_word_embeddings", True),
            position_embedding="learned",
            attention_bias=False,
            hidden_act=Key("activation_function", "gelu_new"),
            hidden_dropout=Key("resid_dropout", 0.0),
            embedding_dropout=Key("embed_dropout", 0.0),
        ),
        restore=_gpt_neo_layers,
    ),
    "gpt_neox": Family(
        classic(
            rotary_in_parts=True,
            intermediate_size=Key("intermediate_size", 24576),
            vocab_size=Key("vocab_size", 50432),
            parallel_block=Key("use_parallel_residual", True),
            norms_per_parallel_block=2,
            fused_qkv=True,
            attention_bias=Key("attention_bias", True),
            attention_output_bias=Key("attention_bias", True),
            hidden_dropout=Key("hidden_dropout", 0.0),
        )
    ),
    "gptj": Family(gptj()),
    "codegen": Family(gptj(fused_qkv=True)),
    "opt": Family(
        classic(
            intermediate_size=Key("ffn_dim", 3072),
            vocab_size=Key("vocab_size", 50272),
            position_embedding="learned",
            position_embedding_offset=2,
            tie_word_embeddings=Key("tie_word_embeddings", True),
            attention_bias=Key("enable_bias", True),
            attention_output_bias=Key("enable_bias", True),
            mlp_bias=Key("enable_bias", True),
            hidden_act=Key("activation_function", "relu"),
            hidden_dropout=Key("dropout", 0.1),
        ),
        demands={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
    ),
    "bloom": Family(
        classic(
            hidden_size=Key("hidden_size"),
            num_hidden_layers=Key("n_layer"),
            num_attention_heads=Key("n_head"),
            intermediate_size=None,
            vocab_size=Key("vocab_size", 250880),
            max_position_embeddings=Key("seq_length", 2048),
            tie_word_embeddings=Key("tie_word_embeddings", True),
            position_embedding="alibi",
            fused_qkv=True,
            embedding_norm=True,
            hidden_act="bloom_gelu",
            hidden_dropout=Key("hidden_dropout", 0.0),
        )
    ),
    "falcon": Family(
        classic(
            grouped=Choice("new_decoder_architecture", False, True, False),
            multi_query=Choice("multi_query", True, True, False),
            num_key_value_heads=Key("num_kv_heads", None, nullable=True),
            parallel_block=Key("parallel_attn", True),
            norms_per_parallel_block=Key("num_ln_in_parallel_attn", None, nullable=True),
            intermediate_size=Key("ffn_hidden_size", None, nullable=True),
            vocab_size=Key("vocab_size", 65024),
            tie_word_embeddings=Key("tie_word_embeddings", True),
            position_embedding=Choice("alibi", False, "alibi", "rope"),
            fused_qkv=True,
            attention_bias=Key("bias", False),
            attention_output_bias=Key("bias", False),
            mlp_bias=Key("bias", False),
            hidden_act=Key("activation", "gelu"),
            hidden_dropout=Key("hidden_dropout", 0.0),
        ),
        adjust=_falcon,
        restore=_falcon_flags,
    ),
    "mpt": Family(
        classic(
            hidden_size=Key("d_model"),
            num_hidden_layers=Key("n_layers"),
            num_attention_heads=Key("n_heads"),
            intermediate_size=None,
            vocab_size=Key("vocab_size", 50368),
            max_position_embeddings=Key("max_seq_len", 2048),
            tie_word_embeddings=Key("tie_word_embeddings", True),
            position_embedding="alibi",
            normalization="layernorm_no_bias",
            fused_qkv=True,
            attention_bias=False,
            attention_output_bias=False,
            mlp_bias=False,
            hidden_act="gelu",
            attention_dropout=Key("attn_config.attn_pdrop", 0.0),
            hidden_dropout=Key("resid_pdrop", 0.0),
            embedding_dropout=Key("emb_pdrop", 0.0),
        ),
        # transformers 5.17 modeling_mpt.py MptMLP: 4 * hidden_size, whatever expansion_ratio says
        demands={"no_bias": True, "expansion_ratio": 4},
    ),
    "starcoder2": Family(
        classic(
            num_key_value_heads=Key("num_key_value_heads", 2, nullable=True),
            head_dim=Key("head_dim", None, nullable=True),
            intermediate_size=Key("intermediate_size", 12288),
            vocab_size=Key("vocab_size", 49152),
            max_position_embeddings=Key("max_position_embeddings", 4096),
            tie_word_embeddings=Key("tie_word_embeddings", True),
            attention_bias=Key("use_bias", True),
            attention_output_bias=Key("use_bias", True),
            mlp_bias=Key("use_bias", True),
            hidden_act=Key("hidden_act", "gelu_pytorch_tanh"),
            hidden_dropout=Key("residual_dropout", 0.0),
            embedding_dropout=Key("embedding_dropout", 0.0),
            sliding_window=NO_WINDOW,
        )
    ),
}
"""`model_type` -> the family's rules."""
