"""The inventory of trainable tensors: counted by hand, and tensor by tensor against transformers' own models."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest

from peakcast import catalog
from peakcast.jobs.architecture import Architecture
from peakcast.models.ledger.parameters.inventory import (
    ParameterTensor,
    embedding_parameters,
    head_parameters,
    layer_parameters,
    num_parameters,
)
from peakcast.networks.config import architecture_from_hf_config

TINY = Architecture(
    name="tiny",
    model_type="llama",
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    intermediate_size=16,
    vocab_size=32,
)


def every_tensor(architecture: Architecture) -> list[ParameterTensor]:
    layers = range(architecture.num_layers)
    inner = [tensor for layer in layers for tensor in layer_parameters(architecture, layer)]
    return [*embedding_parameters(architecture), *inner, *head_parameters(architecture)]


def test_a_tiny_llama_counted_by_hand() -> None:
    attention = 8 * 8 + 2 * (4 * 8) + 8 * 8
    layer = attention + 3 * 16 * 8 + 2 * 8
    assert num_parameters(TINY) == 32 * 8 + 2 * layer + 8 + 32 * 8


def test_names_and_shapes_of_a_layer() -> None:
    assert {tensor.name: tensor.shape for tensor in layer_parameters(TINY, 0)} == {
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "self_attn.q_proj.weight": (8, 8),
        "self_attn.k_proj.weight": (4, 8),
        "self_attn.v_proj.weight": (4, 8),
        "self_attn.o_proj.weight": (8, 8),
        "mlp.gate_proj.weight": (16, 8),
        "mlp.up_proj.weight": (16, 8),
        "mlp.down_proj.weight": (8, 16),
    }


def test_tensor_parallelism_splits_rows_going_in_and_columns_coming_out() -> None:
    split = {tensor.name: tensor.tensor_parallel_dim for tensor in every_tensor(TINY)}
    assert split["embed_tokens.weight"] == split["lm_head.weight"] == 0
    assert split["self_attn.q_proj.weight"] == split["mlp.up_proj.weight"] == 0
    assert split["self_attn.o_proj.weight"] == split["mlp.down_proj.weight"] == 1
    assert split["input_layernorm.weight"] is None


@pytest.mark.parametrize("name", catalog.architecture_names())
def test_the_parts_sum_to_the_whole_and_names_are_unique_in_a_layer(name: str) -> None:
    architecture = catalog.architecture(name)
    assert sum(tensor.numel for tensor in every_tensor(architecture)) == num_parameters(architecture)
    for layer in (0, architecture.num_layers - 1):
        names = [tensor.name for tensor in layer_parameters(architecture, layer)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("name", catalog.architecture_names())
def test_a_split_dimension_exists(name: str) -> None:
    for tensor in every_tensor(catalog.architecture(name)):
        assert tensor.tensor_parallel_dim is None or tensor.tensor_parallel_dim < len(tensor.shape)


def test_tied_embeddings_are_counted_once() -> None:
    architecture = catalog.architecture("llama-3.2-1b")
    assert not any(tensor.role == "lm_head" for tensor in head_parameters(architecture))


def test_routed_and_dense_layers_differ() -> None:
    architecture = catalog.architecture("deepseek-v3")
    roles = [{tensor.role for tensor in layer_parameters(architecture, layer)} for layer in (0, 3)]
    assert "expert" not in roles[0]
    assert {"router", "expert", "shared_expert"} <= roles[1]


# -- against transformers -------------------------------------------------------------------------------------------------

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3": {"attention_bias": True},
    "qwen3_moe": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi": {"qk_layernorm": True},
    "phi3": {},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gptj": {},
    "codegen": {},
    "opt": {},
    "bloom": {},
    "falcon": {},
    "mpt": {},
    "starcoder2": {},
    "stablelm": {"use_qkv_bias": True},
    "cohere": {"use_qk_norm": True},
    "cohere2": {},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {"shared_intermediate_size": 128},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"head_dim": 128, "use_qk_norm": True},
    "smollm3": {},
    "gpt_oss": {},
    "nemotron": {"num_key_value_heads": 8},
    "arcee": {},
    "seed_oss": {},
    "ernie4_5": {},
    "exaone4": {},
    "helium": {},
    "bert": {},
    "roberta": {},
}
"""`model_type` -> what differs from its config class's defaults; depth is cut to two layers."""


def real_model(model_type: str) -> tuple[dict[str, Any], Any]:
    """The configuration of a two-layer model of the family and the model itself, without storage."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    changes = dict(CHANGES[model_type])
    if model_type == "gpt_neo":
        changes["num_layers"] = 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(model_type, **changes)
        for key in ("num_hidden_layers", "n_layer", "n_layers"):
            if key in config.to_dict():
                setattr(config, key, 2)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        kind = "AutoModelForMaskedLM" if model_type in ("bert", "roberta") else "AutoModelForCausalLM"
        with torch.device("meta"):
            model = getattr(transformers, kind).from_config(config)
    return config.to_dict(), model


@pytest.mark.parametrize("model_type", CHANGES)
def test_the_inventory_is_the_real_models_tensor_by_tensor(model_type: str) -> None:
    config, model = real_model(model_type)
    architecture = architecture_from_hf_config(config)
    real = list(model.parameters())
    # GPT-2's Conv1D and gpt-oss's experts keep the transpose, so shapes are compared with their sides sorted
    ours = Counter(tuple(sorted(tensor.shape)) for tensor in every_tensor(architecture))
    assert ours == Counter(tuple(sorted(parameter.shape)) for parameter in real)
    assert num_parameters(architecture) == sum(parameter.numel() for parameter in real)


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "opt", "mpt", "phi", "falcon", "starcoder2", "gpt2"])
def test_projections_carry_the_familys_own_last_names(model_type: str) -> None:
    config, model = real_model(model_type)
    real = {name.split(".")[-2] for name, parameter in model.named_parameters() if parameter.ndim == 2 and ".1." in name}
    architecture = architecture_from_hf_config(config)
    assert {tensor.name.split(".")[-2] for tensor in layer_parameters(architecture, 1) if len(tensor.shape) == 2} == real
