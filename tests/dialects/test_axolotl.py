"""Axolotl's keys that change memory beside the usual ones."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.dialects.pasted import Pasted
from peakcast.dialects.recognise import Beside, translated
from peakcast.dialects.translation import Translation

LIGER = {"liger_rope": True, "liger_rms_norm": True, "liger_glu_activation": True}
QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_r": 8, "lora_target_linear": True}


def read(model: str = "meta-llama/Llama-3.1-8B", **values: Any) -> Translation:
    usual = {"base_model": model, "micro_batch_size": 1, "sequence_len": 1024, "bf16": True}
    return translated(Pasted(values={**usual, **values}), Beside(num_gpus=2))


def test_ligers_kernels_together_are_those_of_transformers():
    found = read(**LIGER, liger_layer_norm=True)
    assert found.job.framework_options["liger_kernels"]
    assert not found.job.loss.fused_linear_cross_entropy
    assert found.unsupported == ()


@pytest.mark.parametrize("key", LIGER)
def test_one_of_them_alone_is_said(key):
    found = read(**{key: True})
    assert "liger_kernels" not in found.job.framework_options
    assert any(key in sentence for sentence in found.unsupported)


def test_experts_are_quantised_where_axolotl_does_it():
    plain, asked = (read("mistralai/Mixtral-8x7B-v0.1", **QLORA, **more) for more in ({}, {"quantize_moe_experts": True}))
    assert "quantized_experts" not in plain.job.framework_options
    assert asked.job.framework_options["quantized_experts"]


@pytest.mark.parametrize("key", ["neftune_noise_alpha", "noisy_embedding_alpha"])
def test_noise_on_the_embeddings_is_read(key):
    assert read(**{key: 5}).job.framework_options["neftune"]


@pytest.mark.parametrize("key", ["overrides_of_model_config", "model_config"])
def test_another_shape_of_the_network_is_said(key):
    assert read(**{key: {"output_router_logits": True, "rope_theta": 1e6}}).unsupported == ()
    assert any("num_hidden_layers" in sentence for sentence in read(**{key: {"num_hidden_layers": 4}}).unsupported)


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_units_of_another_rule_than_layers_are_said(prefix):
    usual = {f"{prefix}transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    layers = read(fsdp_config={**usual, f"{prefix}auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, fsdp_version=2)
    assert (layers.unsupported, layers.unknown, layers.job.parallelism.sharding) == ((), (), "fsdp2")
    sizes = read(fsdp_config={f"{prefix}auto_wrap_policy": "SIZE_BASED_WRAP"}, fsdp_version=2)
    assert any("SIZE_BASED_WRAP" in sentence for sentence in sizes.unsupported)
