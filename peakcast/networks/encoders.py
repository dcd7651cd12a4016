"""Hugging Face families with an encoder: alone (BERT) or with a decoder (T5).

Defaults are those of the family's config class in transformers 5.17, or of the remote code where the family lives
outside transformers (marked so). The rules are explained in `hf_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.jobs.architecture import Architecture
from peakcast.networks.rules import Choice, Family, Key, Row, classic, plain


def _t5(config: Mapping[str, Any], values: Row) -> None:
    """`feed_forward_proj` is the activation, with "gated-" before it if there is a gate; "gated-gelu" means gelu_new
    (transformers `configuration_t5.py`). By default the decoder is as deep as the encoder."""
    *gate, activation = values["hidden_act"].split("-")
    if gate not in ([], ["gated"]):
        values["refusal"] = ("feed_forward_proj", values["hidden_act"], "an activation, or 'gated-' and an activation")
    values["gated_mlp"] = bool(gate)
    values["hidden_act"] = "gelu_new" if gate and activation == "gelu" else activation
    values["num_decoder_layers"] = values["num_decoder_layers"] or values["num_hidden_layers"]


def _t5_keys(architecture: Architecture) -> Row:
    """The keys that `_t5` reads, and the token at the beginning of shifted targets, which every published configuration
    has."""
    activation = architecture.hidden_act
    if architecture.gated_mlp:
        activation = "gated-" + activation.replace("gelu_new", "gelu")
    return {"feed_forward_proj": activation, "decoder_start_token_id": 0}


_BERT = classic(
    intermediate_size=Key("intermediate_size", 3072),
    vocab_size=Key("vocab_size", 30522),
    max_position_embeddings=Key("max_position_embeddings", 512),
    type_vocab_size=Key("type_vocab_size", 2),
    tie_word_embeddings=Key("tie_word_embeddings", True),
    position_embedding="learned",
    norm_placement="post",
    embedding_norm=True,
    lm_head_bias=True,
    attention_dropout=Key("attention_probs_dropout_prob", 0.1),
    hidden_dropout=Key("hidden_dropout_prob", 0.1),
    embedding_dropout=Key("hidden_dropout_prob", 0.1),
    kind="encoder",
)
_T5 = plain(
    hidden_size=Key("d_model"),
    num_hidden_layers=Key("num_layers"),
    num_decoder_layers=Key("num_decoder_layers", None, nullable=True),
    num_attention_heads=Key("num_heads"),
    num_key_value_heads=None,
    head_dim=Key("d_kv", 64),
    intermediate_size=Key("d_ff", 2048),
    vocab_size=Key("vocab_size", 32128),
    max_position_embeddings=0,
    relative_attention_num_buckets=Key("relative_attention_num_buckets", 32),
    position_embedding="relative",
    tie_word_embeddings=True,  # transformers 5 always ties, and uses the key otherwise
    scale_decoder_outputs=Choice("tie_word_embeddings", True, True, False),
    hidden_act=Key("feed_forward_proj", "relu"),
    attention_dropout=Key("dropout_rate", 0.1),
    hidden_dropout=Key("dropout_rate", 0.1),
    embedding_dropout=Key("dropout_rate", 0.1),
    kind="encoder_decoder",
)

ENCODERS: Mapping[str, Family] = {
    "bert": Family(_BERT),
    "roberta": Family(_BERT | {"vocab_size": Key("vocab_size", 50265)}),
    "t5": Family(_T5, adjust=_t5, restore=_t5_keys),
    "mt5": Family(
        _T5
        | {
            "vocab_size": Key("vocab_size", 250112),
            "scale_decoder_outputs": False,
            "intermediate_size": Key("d_ff", 1024),
            "hidden_act": Key("feed_forward_proj", "gated-gelu"),
        },
        adjust=_t5,
        restore=_t5_keys,
    ),
}
"""`model_type` -> the family's rules."""
