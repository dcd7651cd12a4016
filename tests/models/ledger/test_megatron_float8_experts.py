"""Experts and latent attention in FP8: what their projections keep, by hand; what is not covered, by name. The traces that
these follow are in `collectors/grids/agreement-megatron.yaml`."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Phase, Timeline

T, H, FFN, TOP = 512, 256, 128, 2
SMALL: dict[str, Any] = {
    "num_layers": 1, "hidden_size": H, "ffn_hidden_size": 512, "num_attention_heads": 4, "micro_batch_size": 1,
    "seq_length": T, "max_position_embeddings": T, "vocab_size": 512, "bf16": True, "swiglu": True,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "disable_bias_linear": True, "fp8_format": "hybrid",
    "untie_embeddings_and_output_weights": True, "attention_backend": "fused", "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_router_topk": TOP, "moe_ffn_hidden_size": FFN, "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64, "qk_layernorm": True, "no_rope_fusion": True,
}  # fmt: skip


def job(num_gpus: int = 1, **arguments: Any) -> TrainingJob:
    return from_megatron(
        {**SMALL, "global_batch_size": num_gpus, **arguments}, num_gpus, versions={"transformer_engine": "2.8.0"}
    ).job


def saved(job: TrainingJob, name: str) -> int:
    """Bytes that operation `name` makes to keep, in a forward."""
    timeline = megatron_ledger(job)
    phases = timeline.phases
    named = zip(timeline.names, timeline.num_bytes, timeline.born, strict=True)
    return sum(int(size) for each, size, born in named if each == name and phases[born] == Phase.FORWARD)


@pytest.mark.parametrize(("recipe", "scales"), [("delayed", 0), ("blockwise", 4 / 128), ("mxfp8", 1 / 32)])
def test_experts_keep_their_inputs_in_a_byte_each(recipe: str, scales: float):
    routed = job(fp8_recipe=recipe, **EXPERTS)
    assert saved(routed, "experts.linear_fc1.saved") == TOP * T * H * (1 + scales)
    assert saved(routed, "experts.linear_fc2.saved") == TOP * T * FFN * (1 + scales)


def test_in_bf16_they_keep_the_inputs_themselves():
    assert saved(job(fp8_format=None, **EXPERTS), "experts.linear_fc1.saved") == 0


def test_every_expert_has_copies_of_its_weights_in_both_layouts():
    timeline = megatron_ledger(job(fp8_recipe="delayed", **EXPERTS))
    copies = [
        int(size) for name, size in zip(timeline.names, timeline.num_bytes, strict=True) if name.endswith("fc1.weight.fp8")
    ]
    assert copies == [4 * 2 * FFN * H] * 2


@pytest.mark.parametrize(("recipe", "kept"), [("delayed", T * H), ("blockwise", 0)])
def test_a_shared_expert_keeps_what_the_router_keeps_too(recipe: str, kept: int):
    shared = job(fp8_recipe=recipe, moe_shared_expert_intermediate_size=FFN, **EXPERTS)
    assert saved(shared, "shared_experts.linear_fc1.saved") == kept


def test_both_projections_down_keep_a_copy_of_one_input():
    latent = job(fp8_recipe="delayed", **LATENT)
    assert saved(latent, "linear_q_down_proj.saved") == saved(latent, "linear_kv_down_proj.saved") == T * H


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({**EXPERTS, "recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, "mixture of experts"),
        ({**LATENT, "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, "latent attention"),
        (
            {**LATENT, "kv_lora_rank": 64, "fp8_recipe": "blockwise", "tensor_model_parallel_size": 2,
             "sequence_parallel": True},
            "multiples of 128",
        ),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_said(arguments: dict[str, Any], word: str):
    assert word in out_of_scope(job(2, **arguments))


GATHERED = {"fp8_param_gather": True, "use_distributed_optimizer": True}
EXPERTS_WEIGHTS = 4 * 3 * FFN * H
LATENT_WEIGHTS = 128 * H + 128 * 4 * (64 + 32) + (128 + 32) * H + 128 * 4 * (64 + 64) + 4 * 64 * H
"""Queries down and up, keys and values with their positions down and up, the output."""
ATTENTION_WEIGHTS = (3 + 1) * H * H
DENSE_WEIGHTS = 3 * 512 * H


@pytest.mark.parametrize(
    ("arguments", "weights"),
    [(EXPERTS, ATTENTION_WEIGHTS + EXPERTS_WEIGHTS), (LATENT, LATENT_WEIGHTS + DENSE_WEIGHTS)],
    ids=["experts", "latent"],
)
def test_fp8_parameters_are_a_byte_each_and_have_one_copy(arguments: dict[str, Any], weights: int):
    """By rows they are the parameters, and on Hopper a copy by columns stays. While the optimizer casts, this rank's half
    is there in bf16."""
    timeline = megatron_ledger(job(2, fp8_recipe="tensorwise", **GATHERED, **arguments))
    plain = megatron_ledger(job(2, fp8_recipe="tensorwise", use_distributed_optimizer=True, **arguments))
    assert sized(plain, "parameter_buffer") - sized(timeline, "parameter_buffer") == pytest.approx(weights, abs=512)
    assert (sized(plain, ".weight.fp8"), sized(timeline, ".weight.fp8")) == (2 * weights, weights)
    assert sized(timeline, "cast_parameters") == pytest.approx(weights / 2 * 2, rel=0.03)


def sized(timeline: Timeline, suffix: str) -> int:
    """Bytes of all tensors whose names end with `suffix`."""
    return sum(int(size) for name, size in zip(timeline.names, timeline.num_bytes, strict=True) if name.endswith(suffix))


@pytest.mark.parametrize(("release", "outlive"), [("2.8.0", False), ("2.10.0", True)])
def test_copies_by_columns_with_scales_of_blocks_go_with_the_step(release: str, outlive: bool):
    """Before Transformer Engine 2.10 the cast removes them, first those of dense weights, then the experts'."""
    arguments = {**SMALL, **EXPERTS, **GATHERED, "fp8_recipe": "blockwise", "expert_model_parallel_size": 2}
    made = from_megatron({**arguments, "global_batch_size": 2}, 2, versions={"transformer_engine": release}).job
    timeline = megatron_ledger(made)
    last = len(timeline.phases) - 1
    named = zip(timeline.names, timeline.dies, strict=True)
    assert any(name.endswith(".weight.fp8") and dies > last for name, dies in named) is outlive


@pytest.mark.parametrize(
    "arguments", [EXPERTS, LATENT, {**EXPERTS, **LATENT}, {**EXPERTS, **GATHERED}, {**LATENT, **GATHERED}]
)
def test_what_is_covered(arguments: dict[str, Any]):
    assert out_of_scope(job(2, **arguments)) == ""


@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS | {"moe_grouped_gemm": False}])
def test_only_matrices_have_copies_in_fp8_and_each_projection_one_in_either_layout(experts):
    """Biases are added in bfloat16, the stacked ones of experts too."""
    timeline = megatron_ledger(job(**experts, disable_bias_linear=False))
    copies = sorted(name.removesuffix(".fp8") for name in timeline.names if name.endswith(".fp8"))
    each = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv")
    assert copies == sorted(f"{name}.weight" for name in each for _ in range(2))
