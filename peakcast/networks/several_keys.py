"""What of a network follows from several keys of its configuration, and the way back: the functions that families name in
`adjust` and `restore` (`catalog/families/`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.jobs.architecture import Architecture
from peakcast.networks.rules import TomlTable


def alibi_without_positions(config: Mapping[str, Any], values: TomlTable) -> None:
    """The 13B models have no `max_position_embeddings`, because they use ALiBi."""
    if config.get("max_position_embeddings") is None:
        values["position_embedding"] = "alibi"


def positions_after_padding(config: Mapping[str, Any], values: TomlTable) -> None:
    """The first token of RoBERTa has the position after that of padding (transformers 5.17 modeling_roberta.py
    `create_position_ids_from_input_ids`): of the published 514 rows, 512 are of tokens."""
    padding = config.get("pad_token_id", 1)
    values["position_embedding_offset"] = (padding if isinstance(padding, int) else 1) + 1
    values["max_position_embeddings"] -= values["position_embedding_offset"]


def positions_after_padding_keys(architecture: Architecture) -> TomlTable:
    rows = architecture.max_position_embeddings + architecture.position_embedding_offset
    return {"max_position_embeddings": rows, "pad_token_id": architecture.position_embedding_offset - 1}


def both_halves_of_feed_forward(config: Mapping[str, Any], values: TomlTable) -> None:
    """Qwen-1 counts both halves of the gated feed-forward in `intermediate_size`."""
    values["intermediate_size"] //= 2


def falcon(config: Mapping[str, Any], values: TomlTable) -> None:
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


def falcon_keys(architecture: Architecture) -> TomlTable:
    heads = architecture.num_key_value_heads
    return {
        "new_decoder_architecture": heads not in (1, architecture.num_attention_heads),
        "multi_query": heads == 1,
    }


def gpt_neo_keys(architecture: Architecture) -> TomlTable:
    """Layer types in which every second layer has a window of 256 tokens, as in the published networks; it does not change
    memory."""
    half, rest = divmod(architecture.num_hidden_layers, 2)
    return {"attention_types": [[["global", "local"], half]] * bool(half) + [[["global"], 1]] * rest}


def dense_first_layers(config: Mapping[str, Any], values: TomlTable) -> None:
    """Read `mlp_only_layers` as a number of dense layers at the start; any other pattern is refused later."""
    dense = config.get("mlp_only_layers") or []
    if isinstance(dense, (list, tuple)) and list(dense) == list(range(len(dense))):
        values["moe"]["first_k_dense_replace"] = len(dense)
    else:
        values["refusal"] = ("mlp_only_layers", dense, "a list of the first layers (0, 1, ...)")


def dbrx_keys(architecture: Architecture) -> TomlTable:
    """The keys of DBRX's attention that must be given (transformers 5.17 modeling_dbrx.py), with the published networks'
    values."""
    dropout, heads = architecture.attention_dropout, architecture.num_key_value_heads
    return {"attn_config": {"attn_pdrop": dropout, "kv_n_heads": heads, "clip_qkv": 8, "rope_theta": 500000}}


def t5(config: Mapping[str, Any], values: TomlTable) -> None:
    """`feed_forward_proj` is the activation, with "gated-" before it if there is a gate; "gated-gelu" means gelu_new
    (transformers `configuration_t5.py`). By default the decoder is as deep as the encoder."""
    *gate, activation = values["hidden_act"].split("-")
    if gate not in ([], ["gated"]):
        values["refusal"] = ("feed_forward_proj", values["hidden_act"], "an activation, or 'gated-' and an activation")
    values["gated_mlp"] = bool(gate)
    values["hidden_act"] = "gelu_new" if gate and activation == "gelu" else activation
    values["num_decoder_layers"] = values["num_decoder_layers"] or values["num_hidden_layers"]


def t5_keys(architecture: Architecture) -> TomlTable:
    """The keys that `t5` reads, and the token at the beginning of shifted targets, which every published configuration
    has."""
    activation = architecture.hidden_act
    if architecture.gated_mlp:
        activation = "gated-" + activation.replace("gelu_new", "gelu")
    return {"feed_forward_proj": activation, "decoder_start_token_id": 0}
