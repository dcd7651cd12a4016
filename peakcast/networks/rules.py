"""The kinds of rules in `hf_families`, and sets of rules that many families share.

A family maps each field of `Architecture` to a rule: a plain value is fixed by the family; `Key` reads a key of
config.json; `Choice` turns a flag into the field's value; `Product` multiplies keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from peakcast.jobs.architecture import Architecture

REQUIRED: Final = "<required>"
"""Default of a key for which no default would be right: the configuration must have it."""


@dataclass(frozen=True, slots=True)
class Key:
    """The value of a key; `.` in `name` leads into a nested mapping."""

    name: str
    default: Any = REQUIRED
    nullable: bool = False
    """Whether an explicit null means null; otherwise it means the default, as in the config classes."""
    only_if: str | None = None
    """A flag that must be true; otherwise the field is null (Qwen2's `use_sliding_window`)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A field's value chosen by a flag of the configuration."""

    name: str
    default: bool
    when_true: Any
    when_false: Any


@dataclass(frozen=True, slots=True)
class Product:
    """The product of two keys (0 if one is null), for DeepSeek's shared experts."""

    left: Key
    right: Key


Row = dict[str, Any]
Rules = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """The rules of one family: a rule per field, values that the configuration must not have, and functions that use
    several keys."""

    rules: Rules
    moe: Rules | None = None
    mla: Rules | None = None
    demands: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Key -> the only value that is modelled, which is also assumed if the key is absent."""
    adjust: Callable[[Mapping[str, Any], Row], None] | None = None
    restore: Callable[[Architecture], Row] | None = None
    """Computes the keys of the configuration that `adjust` reads, from the architecture."""


def llama(**changes: Any) -> Row:
    """Llama's rules with `changes`; most families differ from them in a few fields."""
    row: Row = {
        "hidden_size": Key("hidden_size"),
        "num_hidden_layers": Key("num_hidden_layers"),
        "num_attention_heads": Key("num_attention_heads"),
        "num_key_value_heads": Key("num_key_value_heads", None, nullable=True),
        "head_dim": Key("head_dim", None, nullable=True),
        "intermediate_size": Key("intermediate_size", 11008),
        "vocab_size": Key("vocab_size", 32000),
        "max_position_embeddings": Key("max_position_embeddings", 2048),
        "tie_word_embeddings": Key("tie_word_embeddings", False),
        "hidden_act": Key("hidden_act", "silu"),
        "attention_bias": Key("attention_bias", False),
        "attention_output_bias": Key("attention_bias", False),
        "mlp_bias": Key("mlp_bias", False),
        "attention_dropout": Key("attention_dropout", 0.0),
    }
    return row | changes


def plain(**changes: Any) -> Row:
    """Llama's rules without any bias, for families without a key for it (Mistral and similar ones)."""
    return llama(attention_bias=False, attention_output_bias=False, mlp_bias=False) | changes


def classic(**changes: Any) -> Row:
    """The GPT-2 and GPT-3 shape: layer norms, a feed-forward of two matrices, and biases everywhere."""
    row = llama(
        num_key_value_heads=None,
        head_dim=None,
        normalization="layernorm",
        gated_mlp=False,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        hidden_act=Key("hidden_act", "gelu"),
    )
    return row | changes


def gpt2(**changes: Any) -> Row:
    """OpenAI's names for the sizes (n_embd, n_layer, n_head, n_inner)."""
    row = classic(
        hidden_size=Key("n_embd"),
        num_hidden_layers=Key("n_layer"),
        num_attention_heads=Key("n_head"),
        intermediate_size=Key("n_inner", None, nullable=True),
        vocab_size=Key("vocab_size", 50257),
        max_position_embeddings=Key("n_positions", 1024),
        tie_word_embeddings=Key("tie_word_embeddings", True),
        position_embedding="learned",
        fused_qkv=True,
        hidden_act=Key("activation_function", "gelu_new"),
        attention_dropout=Key("attn_pdrop", 0.1),
        hidden_dropout=Key("resid_pdrop", 0.1),
        embedding_dropout=Key("embd_pdrop", 0.1),
    )
    return row | changes


def gptj(**changes: Any) -> Row:
    """GPT-J: GPT-2's names, attention and feed-forward in parallel, no attention biases, a head with a bias."""
    row = gpt2(
        vocab_size=Key("vocab_size", 50400),
        max_position_embeddings=Key("n_positions", 2048),
        tie_word_embeddings=Key("tie_word_embeddings", False),
        position_embedding="rope",
        parallel_block=True,
        fused_qkv=False,
        attention_bias=False,
        attention_output_bias=False,
        lm_head_bias=True,
        attention_dropout=Key("attn_pdrop", 0.0),
        hidden_dropout=Key("resid_pdrop", 0.0),
        embedding_dropout=Key("embd_pdrop", 0.0),
    )
    return row | changes


def gemma(**changes: Any) -> Row:
    """Gemma: its own head width, and tied embeddings."""
    row = llama(
        head_dim=Key("head_dim", 256),
        vocab_size=Key("vocab_size", 256000),
        max_position_embeddings=Key("max_position_embeddings", 8192),
        tie_word_embeddings=Key("tie_word_embeddings", True),
        hidden_act=Key("hidden_activation", "gelu_pytorch_tanh"),
        mlp_bias=False,
    )
    return row | changes


def experts(num: Key, per_token: Key, width: Key, **changes: Any) -> Row:
    """Rules for a mixture of experts, from its three sizes."""
    return {"num_experts": num, "num_experts_per_tok": per_token, "moe_intermediate_size": width} | changes


DEEPSEEK_MLA: Rules = {
    "kv_lora_rank": Key("kv_lora_rank", 512),
    "q_lora_rank": Key("q_lora_rank", 1536, nullable=True),
    "qk_nope_head_dim": Key("qk_nope_head_dim", 128),
    "qk_rope_head_dim": Key("qk_rope_head_dim", 64),
    "v_head_dim": Key("v_head_dim", 128),
}


def deepseek_moe(width: int, num: int | None, per_token: int | None, shared: int | None, dense: int) -> Row:
    """Rules for DeepSeek's experts, with the defaults of one version."""
    each = Key("moe_intermediate_size", width)
    return experts(
        Key("n_routed_experts", num, nullable=True),
        Key("num_experts_per_tok", per_token, nullable=True),
        each,
        shared_expert_intermediate_size=Product(Key("n_shared_experts", shared, nullable=True), each),
        first_k_dense_replace=Key("first_k_dense_replace", dense),
    )
