"""The values of torchtitan 0.3's Python configurations, as its `to_dict` writes them: the classes are gone."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast import catalog
from peakcast.core.errors import SpecError
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Translation
from peakcast.dialects.translate import ReadOptions, translated

FULL = {"preserve_rng_state": True, "determinism_check": "default", "debug": False}
SELECTIVE = {**FULL, "force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]}
NORM = {"normalized_shape": 2048, "eps": 1e-6, "elementwise_affine": True}


def linear(rows: int, columns: int) -> dict[str, Any]:
    return {"in_features": columns, "out_features": rows, "bias": False}


def feed_forward(width: int, inner: int) -> dict[str, Any]:
    return {"w1": linear(inner, width), "w2": linear(width, inner), "w3": linear(inner, width)}


def experts(width: int, inner: int, num: int, per_token: int, **more: Any) -> dict[str, Any]:
    return {
        "num_experts": num,
        "routed_experts": {"inner_experts": {"dim": width, "hidden_dim": inner, "num_experts": num}},
        "router": {"top_k": per_token, "score_func": "softmax", **more.pop("router", {})},
        "shared_experts": None,
        **more,
    }


def network(name: str, layers: list[dict[str, Any]], flavor: str = "mine", **more: Any) -> dict[str, Any]:
    return {"name": name, "flavor": flavor, "model": {"layers": layers, "lm_head": linear(8, 8), "norm": NORM, **more}}


def read(spec: dict[str, Any], **sections: Any) -> Translation:
    values = {
        "model_spec": spec,
        "training": {"local_batch_size": 2, "seq_len": 4096},
        "parallelism": {"data_parallel_shard_degree": -1},
        "activation_checkpoint": SELECTIVE,
        **sections,
    }
    return translated(Pasted(values=values), ReadOptions(num_gpus=8))


LLAMA = {"name": "llama3", "flavor": "8B"}
ROPE = {"dim": 128, "max_seq_len": 40960}


@pytest.mark.parametrize(("section", "mode"), [(FULL, "full"), (SELECTIVE, "selective"), (None, "none")])
def test_the_class_of_a_checkpointing_policy_is_told_by_its_keys(section, mode):
    assert read(LLAMA, activation_checkpoint=section).job.activation_checkpointing.mode == mode
    known = read(LLAMA, activation_checkpoint={**FULL, "mode": "selective"})
    assert known.job.activation_checkpointing.mode == "selective"


def test_every_key_of_those_classes_is_known():
    sections = {
        "activation_checkpoint": SELECTIVE,
        "compile": {"enable": False, "enable_async_tensor_parallel": False, "components": ["model"], "backend": "inductor"},
        "loss": {"num_chunks": 8, "loss_fn": {"global_vocab_size": 128256}},
        "optimizer": {"param_groups": [{"pattern": ".*", "optimizer_name": "AdamW"}], "implementation": "fused"},
        "override": {"imports": []},
        "parallelism": {"spmd_backend": "spmd_types", "enable_fsdp_symm_mem": False, "enable_sequence_parallel": True,
                        "pipeline_parallel_microbatch_size": 1, "data_parallel_shard_degree": 8},
        "profiler": {"enable_profiling": False},
        "training": {"local_batch_size": 1, "seq_len": 2048, "disable_cuda_graphs": True},
    }  # fmt: skip
    found = read(LLAMA, **sections)
    assert found.unknown == ()
    assert found.job.framework_options == {"loss_chunks": 8}


def test_a_loss_in_chunks_makes_no_whole_logits():
    found = read(LLAMA, loss={"num_chunks": 8})
    assert found.job.loss.fused_linear_cross_entropy
    beside_others = read(LLAMA, loss={"num_chunks": 8}, parallelism={"tensor_parallel_degree": 8})
    assert not beside_others.job.loss.fused_linear_cross_entropy
    assert any("whole logits" in sentence for sentence in beside_others.unsupported)


def test_what_changes_memory_and_is_not_modelled_is_said():
    training = {"local_batch_size": 1, "disable_cuda_graphs": False}
    found = read(LLAMA, training=training, override={"imports": ["torchtitan.overrides.fused_swiglu"]})
    said = " ".join(found.unsupported)
    assert "CUDA graphs" in said
    assert "fused_swiglu" in said


def test_the_optimizer_of_every_group_of_weights_is_read():
    groups = [{"pattern": "layers", "optimizer_name": "Muon"}, {"pattern": ".*", "optimizer_name": "AdamW"}]
    assert read(LLAMA, optimizer={"param_groups": groups}).job.optimizer.name == "muon"
    unknown = read(LLAMA, optimizer={"param_groups": [{"optimizer_name": "Shampoo"}]})
    assert any("Shampoo" in sentence for sentence in unknown.unsupported)


@pytest.mark.parametrize(
    ("degrees", "autocast"),
    [
        ({"data_parallel_shard_degree": 8}, False),
        ({"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 1}, True),
        ({"tensor_parallel_degree": 8, "data_parallel_shard_degree": 1}, False),
    ],
)
def test_mixed_precision_is_autocast_where_nothing_is_sharded(degrees, autocast):
    job = read(LLAMA, parallelism=degrees).job
    assert bool(job.framework_options.get("autocast")) == autocast


def test_float8_is_read_with_what_is_gathered_and_scaled():
    converted = {"model": {**LLAMA, "converters": ["float8"]}}
    for table, options in (
        ({"enable_fsdp_float8_all_gather": True}, {"fsdp_float8_all_gather": True}),
        ({"recipe_name": "tensorwise"}, {}),
        ({"recipe_name": "rowwise"}, {"float8_recipe": "rowwise"}),
    ):
        asked = read(LLAMA, **converted, float8=table)
        assert asked.job.precision.compute == "float8"
        assert {k: v for k, v in asked.job.framework_options.items() if "float8" in k} == options
        assert not asked.findings
    with pytest.raises(SpecError, match="recipe_name"):
        read(LLAMA, **converted, float8={"recipe_name": "row"})
    assert "fsdp_float8_all_gather" not in read(LLAMA, float8={"enable_fsdp_float8_all_gather": True}).job.framework_options


def test_the_dtype_of_reductions_is_read():
    training = {"local_batch_size": 1, "mixed_precision_reduce": "bfloat16"}
    assert read(LLAMA, training=training).job.framework_options["fsdp_reduce_dtype"] == "bfloat16"
    narrow = {"local_batch_size": 1, "dtype": "bfloat16"}
    assert read(LLAMA, training=narrow).job.framework_options["fsdp_reduce_dtype"] == "float32"


def test_a_step_inside_backward_is_an_optimizer_for_each_parameter():
    assert read(LLAMA, optimizer={"early_step_in_backward": True}).job.framework_options["optimizer_in_backward"] is True
    assert "optimizer_in_backward" not in read(LLAMA, optimizer={"name": "AdamW"}).job.framework_options


@pytest.mark.parametrize(
    ("inner", "attention"),
    [({"block_size": 128}, "flex"), ({"window_size": [-1, 0]}, "flash_attention_2"), ({}, "sdpa")],
)
def test_a_described_network_needs_no_flavor(inner, attention):
    grouped = {"n_heads": 32, "n_kv_heads": 8, "head_dim": None, "inner_attention": inner, "wo": linear(4096, 4096)}
    attended = {**grouped, "rope": {"max_seq_len": 131072}}
    layer = {"attention": attended, "feed_forward": feed_forward(4096, 14336), "moe": None}
    job = read(network("llama3", [layer] * 32, dim=4096, vocab_size=128256, enable_weight_tying=False)).job
    known = catalog.architecture("llama-3.1-8b")
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size"):
        assert getattr(job.architecture, name) == getattr(known, name), name
    assert job.attention == attention


def test_described_experts_are_those_of_the_catalog():
    grouped = {"n_heads": 32, "n_kv_heads": 4, "head_dim": 128, "inner_attention": {}, "rope": ROPE}
    layer = {"attention": grouped, "feed_forward": None, "moe": experts(2048, 768, 128, 8)}
    found = read(network("qwen3", [layer] * 48, dim=2048, vocab_size=151936, enable_weight_tying=False)).job.architecture
    known = catalog.architecture("qwen3-30b-a3b")
    assert (found.model_type, found.moe, found.qk_norm) == ("qwen3_moe", known.moe, known.qk_norm)


def test_described_latent_attention_is_that_of_the_catalog():
    latent = {"n_heads": 16, "q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
              "v_head_dim": 128, "inner_attention": {}, "wo": linear(2048, 2048)}  # fmt: skip
    dense = {"attention": latent, "feed_forward": feed_forward(2048, 10944), "moe": None}
    shared = experts(2048, 1408, 64, 6, shared_experts=feed_forward(2048, 2 * 1408))
    routed = {"attention": latent, "feed_forward": None, "moe": shared}
    spec = network("deepseek_v3", [dense, *[routed] * 26], dim=2048, vocab_size=102400, mtp_layers=None)
    found, known = read(spec).job.architecture, catalog.architecture("deepseek-v2-lite")
    assert (found.moe, found.mla, found.intermediate_size) == (known.moe, known.mla, known.intermediate_size)
