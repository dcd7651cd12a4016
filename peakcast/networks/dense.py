"""Hugging Face families of Llama's shape: a gate, RMSNorm (mostly), rotary positions.

Defaults are those of the family's config class in transformers 5.17, or of the remote code where the family lives
outside transformers (marked so). The rules are explained in `hf_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.networks.rules import Choice, Family, Key, Row, gemma, llama, plain


def _baichuan(config: Mapping[str, Any], values: Row) -> None:
    """The 13B models have no `max_position_embeddings`, because they use ALiBi."""
    if config.get("max_position_embeddings") is None:
        values["position_embedding"] = "alibi"


def _qwen1(config: Mapping[str, Any], values: Row) -> None:
    """Qwen-1 counts both halves of the gated feed-forward in `intermediate_size`."""
    values["intermediate_size"] //= 2


QWEN_WINDOW = Key("sliding_window", 4096, nullable=True, only_if="use_sliding_window")
MISTRAL_WINDOW = Key("sliding_window", 4096, nullable=True)
NO_WINDOW = Key("sliding_window", None, nullable=True)
_SOFTCAP = Key("final_logit_softcapping", None, nullable=True)
_GEMMA3 = gemma(
    num_attention_heads=Key("num_attention_heads", 8),
    num_key_value_heads=Key("num_key_value_heads", 4),
    vocab_size=Key("vocab_size", 262208),
    max_position_embeddings=Key("max_position_embeddings", 131072),
    norm_placement="pre_and_post",
    qk_norm="head",
    sliding_window=MISTRAL_WINDOW,
    final_logit_softcapping=_SOFTCAP,
)
MISTRAL = plain(
    num_key_value_heads=Key("num_key_value_heads", 8, nullable=True),
    intermediate_size=Key("intermediate_size", 14336),
    max_position_embeddings=Key("max_position_embeddings", 131072),
    sliding_window=MISTRAL_WINDOW,
)
QWEN2 = plain(
    num_key_value_heads=Key("num_key_value_heads", 32, nullable=True),
    intermediate_size=Key("intermediate_size", 22016),
    vocab_size=Key("vocab_size", 151936),
    max_position_embeddings=Key("max_position_embeddings", 32768),
    attention_bias=True,
    sliding_window=QWEN_WINDOW,
)
QWEN3 = llama(
    num_key_value_heads=Key("num_key_value_heads", 32, nullable=True),
    head_dim=Key("head_dim", 128),
    intermediate_size=Key("intermediate_size", 22016),
    vocab_size=Key("vocab_size", 151936),
    max_position_embeddings=Key("max_position_embeddings", 32768),
    mlp_bias=False,
    qk_norm="head",
    sliding_window=QWEN_WINDOW,
)
OLMO = llama(vocab_size=Key("vocab_size", 50304), mlp_bias=False)
_OLMO2 = OLMO | {"norm_placement": "post", "qk_norm": "full"}
_GLM = plain(
    rotary_in_parts=True,
    num_key_value_heads=Key("num_key_value_heads", 2, nullable=True),
    head_dim=Key("head_dim", 128),
    intermediate_size=Key("intermediate_size", 13696),
    vocab_size=Key("vocab_size", 151552),
    max_position_embeddings=Key("max_position_embeddings", 131072),
    attention_bias=Key("attention_bias", True),
    fused_gate_up=True,
)
_COHERE = llama(
    intermediate_size=Key("intermediate_size", 22528),
    vocab_size=Key("vocab_size", 256000),
    max_position_embeddings=Key("max_position_embeddings", 8192),
    tie_word_embeddings=Key("tie_word_embeddings", True),
    normalization="layernorm_no_bias",
    parallel_block=True,
    mlp_bias=False,
)

DENSE: Mapping[str, Family] = {
    "llama": Family(llama()),
    "mistral": Family(MISTRAL),
    "ministral": Family(MISTRAL),
    "qwen": Family(  # remote code of Qwen/Qwen-7B
        plain(
            num_key_value_heads=None,
            head_dim=Key("kv_channels", 128),
            intermediate_size=Key("intermediate_size", 22016),
            vocab_size=Key("vocab_size", 151936),
            max_position_embeddings=Key("max_position_embeddings", 8192),
            fused_qkv=True,
            attention_bias=True,
            hidden_act="silu",
            attention_dropout=Key("attn_dropout_prob", 0.0),
        ),
        adjust=_qwen1,
    ),
    "qwen2": Family(QWEN2),
    "qwen3": Family(QWEN3),
    "gemma": Family(gemma(num_key_value_heads=Key("num_key_value_heads", 16, nullable=True))),
    "gemma2": Family(
        gemma(
            num_key_value_heads=Key("num_key_value_heads", 4, nullable=True),
            norm_placement="pre_and_post",
            sliding_window=MISTRAL_WINDOW,
            final_logit_softcapping=Key("final_logit_softcapping", 30.0, nullable=True),
        )
    ),
    "gemma3": Family(_GEMMA3),
    "gemma3_text": Family(_GEMMA3),
    "phi3": Family(
        plain(
            rotary_in_parts=True,
            head_dim=None,
            intermediate_size=Key("intermediate_size", 8192),
            vocab_size=Key("vocab_size", 32064),
            max_position_embeddings=Key("max_position_embeddings", 4096),
            fused_qkv=True,
            fused_gate_up=True,
            sliding_window=NO_WINDOW,
            hidden_dropout=Key("resid_pdrop", 0.0),
            embedding_dropout=Key("embd_pdrop", 0.0),
        )
    ),
    "olmo": Family(OLMO | {"normalization": "nonparametric"}),
    "olmo2": Family(_OLMO2),
    "olmo3": Family(_OLMO2 | {"sliding_window": MISTRAL_WINDOW}),
    "stablelm": Family(
        plain(
            rotary_in_parts=True,
            head_dim=None,
            intermediate_size=Key("intermediate_size", 6912),
            vocab_size=Key("vocab_size", 50304),
            max_position_embeddings=Key("max_position_embeddings", 4096),
            normalization="layernorm",
            parallel_block=Key("use_parallel_residual", False),
            attention_bias=Key("use_qkv_bias", False),
            hidden_dropout=Key("hidden_dropout", 0.0),
        ),
        demands={"qk_layernorm": False},
    ),
    "cohere": Family(_COHERE | {"qk_norm": Choice("use_qk_norm", False, "per_head", "none")}),
    "cohere2": Family(_COHERE | {"head_dim": Key("head_dim", 128), "sliding_window": MISTRAL_WINDOW}),
    "granite": Family(llama()),
    "glm": Family(_GLM),
    "glm4": Family(_GLM | {"norm_placement": "pre_and_post"}),
    "smollm3": Family(
        llama(
            num_key_value_heads=Key("num_key_value_heads", 4, nullable=True),
            vocab_size=Key("vocab_size", 128256),
            max_position_embeddings=Key("max_position_embeddings", 32768),
            tie_word_embeddings=Key("tie_word_embeddings", True),
            sliding_window=QWEN_WINDOW,
        )
    ),
    "internlm": Family(  # remote code of internlm/internlm-7b: biased attention, unbiased feed-forward
        plain(
            attention_bias=Key("bias", True),
            attention_output_bias=Key("bias", True),
            vocab_size=Key("vocab_size", 103168),
        )
    ),
    "internlm2": Family(  # remote code of internlm/internlm2-7b
        plain(
            vocab_size=Key("vocab_size", 103168),
            fused_qkv=True,
            attention_bias=Key("bias", False),
            attention_output_bias=Key("bias", False),
        )
    ),
    "nemotron": Family(
        llama(
            rotary_in_parts=True,
            intermediate_size=Key("intermediate_size", 24576),
            vocab_size=Key("vocab_size", 256000),
            max_position_embeddings=Key("max_position_embeddings", 4096),
            normalization="layernorm",
            gated_mlp=False,
            hidden_act=Key("hidden_act", "relu2"),
        )
    ),
    "arcee": Family(
        llama(
            intermediate_size=Key("intermediate_size", 18432),
            max_position_embeddings=Key("max_position_embeddings", 4096),
            gated_mlp=False,
            hidden_act=Key("hidden_act", "relu2"),
        )
    ),
    "baichuan": Family(  # remote code of baichuan-inc/Baichuan-7B and Baichuan2-13B-Base
        plain(num_key_value_heads=None, head_dim=None, vocab_size=Key("vocab_size", 64000), fused_qkv=True),
        adjust=_baichuan,
    ),
    "minicpm": Family(  # remote code of openbmb/MiniCPM-2B: Llama with scaled residuals
        llama(mlp_bias=False, tie_word_embeddings=Key("tie_word_embeddings", True))
    ),
    "Yi": Family(llama(vocab_size=Key("vocab_size", 64000))),
    "xverse": Family(plain(vocab_size=Key("vocab_size", 100278))),
    "seed_oss": Family(
        llama(
            num_key_value_heads=Key("num_key_value_heads", 8, nullable=True),
            head_dim=Key("head_dim", 128),
            intermediate_size=Key("intermediate_size", 27648),
            vocab_size=Key("vocab_size", 155136),
            max_position_embeddings=Key("max_position_embeddings", 524288),
            attention_bias=Key("attention_bias", True),
            attention_output_bias=Key("attention_out_bias", False),
            attention_dropout=Key("attention_dropout", 0.1),
            hidden_dropout=Key("residual_dropout", 0.1),
        )
    ),
    "ernie4_5": Family(
        llama(
            num_key_value_heads=Key("num_key_value_heads", 2, nullable=True),
            head_dim=Key("head_dim", 128),
            intermediate_size=Key("intermediate_size", 3072),
            vocab_size=Key("vocab_size", 103424),
            max_position_embeddings=Key("max_position_embeddings", 131072),
            tie_word_embeddings=Key("tie_word_embeddings", True),
            attention_bias=Key("use_bias", False),
            attention_output_bias=Key("use_bias", False),
            mlp_bias=Key("use_bias", False),
        )
    ),
    "exaone4": Family(
        plain(
            num_key_value_heads=Key("num_key_value_heads", 32, nullable=True),
            intermediate_size=Key("intermediate_size", 16384),
            vocab_size=Key("vocab_size", 102400),
            norm_placement="post",
            qk_norm="head",
            sliding_window=MISTRAL_WINDOW,
        )
    ),
    "helium": Family(
        llama(
            intermediate_size=Key("intermediate_size", 7040),
            vocab_size=Key("vocab_size", 48000),
            max_position_embeddings=Key("max_position_embeddings", 4096),
            attention_output_bias=False,
        )
    ),
}
"""`model_type` -> the family's rules."""
