"""nanotron's networks: what `model.model_config` says in Hugging Face's names."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Translation
from peakcast.dialects.translate import translated

WIDTH = 256


def read(
    *, parallelism: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, **config: Any
) -> Translation:
    network = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 1024, **config}
    values = {
        "model": {"dtype": "bfloat16", "model_config": network},
        "parallelism": {"dp": 2, "pp": 1, "tp": 1, **(parallelism or {})},
        "optimizer": optimizer or {},
        "tokens": {"micro_batch_size": 1, "sequence_length": 128},
    }
    return translated(Pasted(values=values))


def qwen(**moe: Any) -> Translation:
    return read(is_qwen2_config=True, intermediate_size=512, moe_config={"num_experts": 8, "top_k": 2, **moe})


def test_an_expert_is_as_wide_as_its_configuration_says():
    moe = qwen(moe_intermediate_size=96, shared_expert_intermediate_size=384, enable_shared_expert=True)
    moe = moe.job.architecture.moe
    assert (moe.num_experts, moe.num_experts_per_tok, moe.moe_intermediate_size) == (8, 2, 96)
    assert (moe.shared_expert_intermediate_size, moe.shared_expert_gate) == (384, True)
    without = qwen(moe_intermediate_size=96, shared_expert_intermediate_size=384).job.architecture.moe
    assert (without.shared_expert_intermediate_size, without.shared_expert_gate) == (0, False)


@pytest.mark.parametrize("place", [{"optimizer_factory": {"torch_adam_is_fused": True}}, {"torch_adam_is_fused": True}])
def test_the_fused_optimizer_is_read_where_either_version_says_it(place):
    """Until 2024 the optimizer's settings stood in no `optimizer_factory`."""
    found = read(is_llama_config=True, intermediate_size=512, optimizer=place)
    assert found.job.optimizer.implementation == "fused"
    assert found.unknown == ()


@pytest.mark.parametrize("layers", [[-1], [0, 1, 2, 3, 4, 5], [1, 3, 5], [2, 3, 4, 5], [3, 5], [5]])
def test_the_listed_layers_are_the_routed_ones(layers):
    architecture = qwen(layers=layers).job.architecture
    routed = [layer for layer in range(6) if architecture.is_moe_layer(layer)]
    assert routed == (list(range(6)) if layers == [-1] else layers)


@pytest.mark.parametrize("layers", [[0], [0, 5], [], [1, 2, 9], "all"])
def test_layers_without_a_pattern_are_refused_by_name(layers):
    with pytest.raises(SpecError) as caught:
        qwen(layers=layers)
    assert caught.value.parameter == "model.model_config.moe_config.layers"


def test_experts_of_another_width_are_refused():
    assert qwen(moe_hidden_size=WIDTH).job.architecture.moe is not None
    with pytest.raises(SpecError, match=r"moe_hidden_size=128 must be hidden_size=256"):
        qwen(moe_hidden_size=128)


def test_expert_parallelism_multiplies_the_ranks():
    routed = {"num_experts": 8, "top_k": 2}
    layout = {"expert_parallel_size": 4}
    job = read(is_qwen2_config=True, moe_config=routed, parallelism=layout).job
    assert (job.parallelism.world_size, job.parallelism.expert_parallel_size) == (8, 4)


def test_what_recomputing_the_experts_alone_leaves_is_said():
    found = read(is_qwen2_config=True, moe_config={"num_experts": 8}, parallelism={"moe_layer_recompute": True})
    assert any("moe_layer_recompute" in sentence for sentence in found.unsupported)


def test_defaults_are_those_of_nanotron_and_not_of_hugging_face():
    network = read(is_qwen2_config=True).job.architecture
    assert (network.num_key_value_heads, network.intermediate_size, network.attention_bias) == (4, 11008, False)
    code = read(is_starcoder2_config=True, grouped_query=True, num_kv_heads=2).job.architecture
    assert (code.num_key_value_heads, code.intermediate_size, code.hidden_dropout) == (2, 4 * WIDTH, 0.1)
    assert read(is_starcoder2_config=True).job.architecture.num_key_value_heads == 1  # multi-query


def test_a_key_of_the_network_that_nobody_knows_is_listed():
    assert read(is_llama_config=True, rope_theta=1e4, bos_token_id=1).unknown == ()
    found = read(is_llama_config=True, width_of_something=3)
    assert found.unknown == ("model.model_config.width_of_something",)
    assert qwen(something=3).unknown == ("model.model_config.moe_config.something",)


def test_what_it_asks_for_beyond_the_layers_is_said():
    found = read(is_llama_config=True, z_loss_enabled=True)
    assert any("z-loss" in sentence for sentence in found.unsupported)


def test_the_older_key_for_recomputation():
    modes = {"full": "full", "FULL": "full", "selective": "none", None: "none"}
    for asked, mode in modes.items():
        found = read(is_llama_config=True, intermediate_size=512, parallelism={"recompute_granularity": asked})
        assert found.job.activation_checkpointing.mode == mode
        assert found.unknown == ()
    with pytest.raises(SpecError, match="must be selective, full or null"):
        read(is_llama_config=True, intermediate_size=512, parallelism={"recompute_granularity": "some"})


def test_a_family_that_it_is_not_is_no_unknown_key():
    found = read(is_llama_config=True, is_qwen2_config=False)
    assert (found.unknown, found.job.architecture.model_type) == ((), "llama")
