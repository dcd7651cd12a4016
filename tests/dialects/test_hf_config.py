"""Reading config.json: every family's row, and messages that name key, value, rule and way out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from peakcast.core.errors import SpecError
from peakcast.jobs.architecture import Architecture
from peakcast.networks.config import architecture_from_hf_config
from peakcast.networks.families import counted_as, model_types
from peakcast.networks.reverse import hf_config_of
from peakcast.networks.rotary import rotated_width

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
}
SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_heads": 8,
    "num_layers": 4,
    "n_embd": 512,
    "n_layer": 4,
    "n_layers": 4,
    "n_head": 8,
    "n_heads": 8,
    "d_model": 512,
    "num_experts_per_tok": 2,
}


def read(**changes: Any) -> Architecture:
    return architecture_from_hf_config(LLAMA | changes)


# -- families -----------------------------------------------------------------------------------------------------------


WITHOUT_STATE_SPACE = [name for name in model_types() if counted_as(name).config.rules.get("kind") != "hybrid"]


@pytest.mark.parametrize("model_type", WITHOUT_STATE_SPACE)
def test_every_family_is_read_from_its_sizes_alone(model_type: str) -> None:
    architecture = architecture_from_hf_config(SIZES | {"model_type": model_type}, name="tiny")
    assert (architecture.name, architecture.model_type) == ("tiny", model_type)
    assert (architecture.hidden_size, architecture.num_hidden_layers, architecture.num_attention_heads) == (512, 4, 8)


def test_llama() -> None:
    architecture = read()
    assert architecture.num_key_value_heads == 8
    assert architecture.head_dim == 128
    assert (architecture.normalization, architecture.gated_mlp, architecture.position_embedding) == (
        "rmsnorm",
        True,
        "rope",
    )


def test_an_absent_number_of_key_value_heads_means_every_head_has_its_own() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert architecture_from_hf_config(config).num_key_value_heads == 32


def test_gpt2_in_its_own_spelling() -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}
    architecture = architecture_from_hf_config(config)
    assert (architecture.hidden_size, architecture.intermediate_size, architecture.vocab_size) == (768, 3072, 50257)
    assert architecture.fused_qkv
    assert architecture.tie_word_embeddings
    assert architecture.position_embedding == "learned"
    assert (architecture.attention_dropout, architecture.hidden_dropout, architecture.embedding_dropout) == (0.1,) * 3


@pytest.mark.parametrize(
    ("flags", "heads", "parallel", "norms"),
    [
        ({"multi_query": True}, 1, True, 1),
        ({"new_decoder_architecture": True, "num_kv_heads": 4}, 4, True, 2),
        ({"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1}, 4, True, 1),
        ({"multi_query": False, "parallel_attn": False, "alibi": True}, 8, False, 1),
    ],
)
def test_the_three_layouts_of_falcon(flags: dict[str, Any], heads: int, parallel: bool, norms: int) -> None:
    architecture = architecture_from_hf_config(
        {"model_type": "falcon", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8} | flags
    )
    assert architecture.num_key_value_heads == heads
    assert (architecture.parallel_block, architecture.norms_per_parallel_block) == (parallel, norms)


def test_a_sliding_window_counts_only_where_the_configuration_uses_it() -> None:
    qwen = SIZES | {"model_type": "qwen2", "sliding_window": 4096}
    assert architecture_from_hf_config(qwen | {"use_sliding_window": False}).sliding_window is None
    some = architecture_from_hf_config(qwen | {"use_sliding_window": True, "max_window_layers": 1})
    assert (some.sliding_window, some.full_attention_layers) == (4096, (0,))
    every = architecture_from_hf_config(qwen | {"use_sliding_window": True, "max_window_layers": 28})
    assert every.sliding_window is None  # all layers come before those that slide
    mistral = SIZES | {"model_type": "mistral"}
    assert architecture_from_hf_config(mistral).sliding_window == 4096
    assert architecture_from_hf_config(mistral | {"sliding_window": None}).sliding_window is None


@pytest.mark.parametrize(
    ("config", "full"),
    [
        ({"model_type": "gemma2"}, None),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"] * 2}, None),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] + ["sliding_attention"] * 3}, (0,)),
        ({"model_type": "cohere2", "sliding_window_pattern": 4}, None),
        ({"model_type": "cohere2", "sliding_window_pattern": 2}, (1, 3)),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLG"}, (2,)),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, None),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 3}, (1, 3)),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64}, (0, 1, 2)),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, None),  # which has no kinds of layers
    ],
)
def test_layers_without_a_window_are_listed_where_they_are_not_the_familys(
    config: dict[str, Any], full: tuple[int, ...] | None
) -> None:
    architecture = architecture_from_hf_config(SIZES | config)
    assert architecture.full_attention_layers == full
    assert architecture_from_hf_config(hf_config_of(architecture)).full_attention_layers == full


def test_other_kinds_of_layers_are_refused() -> None:
    with pytest.raises(SpecError, match="layer_types"):
        architecture_from_hf_config(SIZES | {"model_type": "gemma3_text", "layer_types": ["chunked_attention"] * 4})


@pytest.mark.parametrize(
    ("config", "fraction", "width"),
    [
        ({"model_type": "gpt_neox"}, None, 16),
        ({"model_type": "gpt_neox", "rotary_pct": 0.25}, None, 16),
        ({"model_type": "gpt_neox", "rotary_pct": 1.0}, 1.0, 64),
        ({"model_type": "phi", "partial_rotary_factor": 0.4}, 0.4, 25),
        ({"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.75}}, 0.75, 48),
        ({"model_type": "phi", "partial_rotary_factor": 0.4, "rope_parameters": {"partial_rotary_factor": 0.5}}, None, 32),
        ({"model_type": "gptj", "rotary_dim": 32}, 0.5, 32),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, None, 64),  # whose code rotates all of it
    ],
)
def test_how_much_of_a_head_is_rotated(config: dict[str, Any], fraction: float | None, width: int) -> None:
    heads = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2, "intermediate_size": 1024}
    architecture = architecture_from_hf_config(heads | config)
    assert (architecture.rotary_fraction, rotated_width(architecture)) == (fraction, width)
    assert architecture_from_hf_config(hf_config_of(architecture)).rotary_fraction == fraction


def test_no_head_is_rotated_by_more_than_all_of_it() -> None:
    with pytest.raises(SpecError, match="partial_rotary_factor"):
        architecture_from_hf_config(SIZES | {"model_type": "phi", "partial_rotary_factor": 2})


def test_deepseek_v3_has_low_rank_attention_and_dense_first_layers() -> None:
    architecture = architecture_from_hf_config(
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128}
    )
    assert architecture.mla is not None
    assert architecture.moe is not None
    assert (architecture.mla.kv_lora_rank, architecture.head_dim) == (512, 192)
    assert [architecture.is_moe_layer(layer) for layer in range(4)] == [False, False, False, True]


def test_a_null_query_rank_means_a_full_query_projection() -> None:
    config = SIZES | {"model_type": "deepseek_v2", "q_lora_rank": None}
    mla = architecture_from_hf_config(config).mla
    assert mla is not None
    assert mla.q_lora_rank is None


def test_qwen_moe_dense_layers_are_a_prefix_or_refused() -> None:
    config = SIZES | {"model_type": "qwen3_moe", "mlp_only_layers": [0, 1]}
    moe = architecture_from_hf_config(config).moe
    assert moe is not None
    assert moe.first_k_dense_replace == 2
    with pytest.raises(SpecError, match="mlp_only_layers"):
        architecture_from_hf_config(config | {"mlp_only_layers": [1, 3]})


def test_a_nested_text_configuration_is_read_and_marked_multimodal() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    wrapped = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    architecture = architecture_from_hf_config(wrapped)
    assert (architecture.kind, architecture.hidden_size, architecture.num_attention_heads) == ("multimodal", 2560, 8)
    assert architecture_from_hf_config({"model_type": "gemma3", "text_config": text}).kind == "decoder"


def test_sizes_that_a_nested_text_configuration_leaves_to_its_class() -> None:
    """llava-hf/llava-1.5-7b-hf and llava-v1.6-mistral-7b-hf say neither width nor depth of their language models."""
    vision = {"model_type": "clip_vision_model", "hidden_size": 1024}
    llama = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
    mistral = {"model_type": "mistral", "vocab_size": 32064, "intermediate_size": 14336, "num_key_value_heads": 8}
    for text, groups in ((llama, 32), (mistral, 8)):
        read = architecture_from_hf_config({"model_type": "llava", "text_config": text, "vision_config": vision})
        sizes = (read.hidden_size, read.num_hidden_layers, read.num_attention_heads, read.num_key_value_heads)
        assert sizes == (4096, 32, 32, groups)
        assert json.loads(read.configuration)["text_config"]["num_hidden_layers"] == 32  # a recording shortens it
    with pytest.raises(SpecError, match="hidden_size is required"):
        architecture_from_hf_config(llama)


def test_an_unknown_family_with_all_of_llamas_keys_is_a_relative_of_llama() -> None:
    found = read(model_type="newllama")
    assert replace(found, configuration="") == replace(read(), name="newllama", model_type="newllama")
    assert json.loads(found.configuration) == LLAMA | {"model_type": "newllama"}  # for what can build the network itself


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "bart"}, {"model_type": "lama", "rms_norm_eps": None}, {"model_type": "new", "num_experts": 8}],
)
def test_an_unknown_family_that_is_not_like_llama_is_known_by_its_configuration_alone(changes: dict[str, Any]) -> None:
    found = read(**changes)
    assert found.kind == "undescribed"
    kept = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    assert {key: value for key, value in json.loads(found.configuration).items() if value is not None} == kept


def test_bert_is_known_as_an_encoder() -> None:
    assert architecture_from_hf_config(SIZES | {"model_type": "bert"}).kind == "encoder"


def test_the_mappings_own_name_is_used_unless_another_is_given() -> None:
    assert read(name="mine").name == "mine"
    assert architecture_from_hf_config(LLAMA | {"name": "mine"}, name="yours").name == "yours"
    assert read().name == "llama"


# -- refusals -----------------------------------------------------------------------------------------------------------


SLIDING = {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 256}


@pytest.mark.parametrize(
    ("changes", "parameter", "message"),
    [
        ({"hidden_size": None}, "hidden_size", "hidden_size is required and missing.*config.json"),
        ({"hidden_size": "4096"}, "hidden_size", "hidden_size='4096' must be a whole number; write it without quotes"),
        ({"hidden_size": -4096}, "hidden_size", "hidden_size=-4096 must be from 1 to"),
        ({"hidden_size": float("nan")}, "hidden_size", "hidden_size=nan must be a whole number"),
        ({"hidden_size": float("inf")}, "hidden_size", "hidden_size=inf must be a whole number"),
        ({"hidden_size": 4096.5}, "hidden_size", "must be a whole number"),
        ({"hidden_size": True}, "hidden_size", "must be a whole number"),
        ({"hidden_size": [4096]}, "hidden_size", "must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "must be from 1 to"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "must be from 1 to 2,048"),
        ({"vocab_size": 1e300}, "vocab_size", "must be from 1 to"),
        ({"num_attention_heads": 33}, "num_attention_heads", "33 does not divide hidden_size=4096.*or give head_dim"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "5 does not divide num_attention_heads=32"),
        ({"attention_dropout": 1.5}, "attention_dropout", "must be at least 0 and below 1"),
        ({"attention_dropout": "0.1"}, "attention_dropout", "must be a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "must be true or false"),
        ({"hidden_act": 3}, "hidden_act", "must be a text"),
        ({"model_type": None}, "model_type", "model_type is required and missing"),
        ({"model_type": 7}, "model_type", "model_type=7 must be a text"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before", "must be true"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim", "must equal hidden_size"),
        ({"model_type": "mpt", "d_model": 512, "expansion_ratio": 2}, "expansion_ratio", "must be 4"),
        ({"model_type": "falcon", "num_kv_heads": "8"}, "num_kv_heads", "must be a whole number"),
        ({"model_type": "falcon", "multi_query": 1}, "multi_query", "must be true or false"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 5}, "mlp_only_layers", "must be a list of the first layers"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": ""}, "sliding_window_pattern", "at least 1"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers", "at least 0"),
        ({**SLIDING, "no_rope_layers": [1, 0]}, "no_rope_layers", "for each of"),
        ({**SLIDING, "no_rope_layer_interval": 0}, "no_rope_layer_interval", "at least 1"),
        ({"model_type": "phi", "partial_rotary_factor": 2}, "partial_rotary_factor", "above 0 and at most 1"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "moe.num_experts_per_tok", "exceeds num_experts=8"),
    ],
)
def test_a_bad_configuration_is_refused_in_a_sentence(changes: dict[str, Any], parameter: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        read(**changes)
    assert caught.value.parameter == parameter
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("config", [None, [], "llama", 3])
def test_what_is_not_a_mapping_is_refused(config: Any) -> None:
    with pytest.raises(SpecError, match="must be a mapping"):
        architecture_from_hf_config(config)


def test_whole_numbers_written_with_a_point_are_taken() -> None:
    assert read(hidden_size=4096.0) == read()
