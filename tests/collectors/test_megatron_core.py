"""The Megatron ledger against traces of the real megatron-core, on a fake process group, phase by phase."""

import importlib.util
from dataclasses import replace

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.stacks import build
from peakcast.collectors.stacks.megatron_config import check
from peakcast.core.errors import CollectorError
from peakcast.models.baseline.ledger import ledger

installed = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed (pip install --no-deps megatron-core)",
)
GPT = {
    "name": "gpt", "model_type": "megatron_gpt", "norm_placement": "pre", "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "intermediate_size": 1024, "vocab_size": 4096,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "position_embedding": "learned",
    "normalization": "layernorm", "hidden_act": "gelu", "gated_mlp": False, "fused_qkv": True, "attention_bias": True,
    "attention_output_bias": True, "mlp_bias": True, "attention_dropout": 0.1, "hidden_dropout": 0.1,
    "embedding_dropout": 0.1,
}  # fmt: skip
LLAMA = {
    **GPT, "num_key_value_heads": 2, "position_embedding": "rope", "gated_mlp": True, "hidden_act": "silu",
    "normalization": "rmsnorm", "mlp_bias": False, "attention_bias": False, "attention_output_bias": False,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "hidden_dropout": 0.0, "embedding_dropout": 0.0,
    "intermediate_size": 768,
}  # fmt: skip
BERT = {**GPT, "name": "bert", "model_type": "megatron_bert", "kind": "encoder", "type_vocab_size": 2}
T5 = {**GPT, "name": "t5", "model_type": "megatron_t5", "kind": "encoder_decoder", "num_decoder_layers": 4}
ALONE = {
    "transformer_impl": "local", "adam_library": "torch", "persist_layer_norm": False, "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
}  # fmt: skip
"""megatron-core without Transformer Engine and apex."""
BASE = {
    "framework": "megatron", "sequence_length": 256, "micro_batch_size": 2, "architecture": GPT, "framework_options": ALONE,
    "precision": {"gradients": "float32", "optimizer_states": "float32", "main_parameters": "float32"},
}  # fmt: skip
CELLS = {
    "alone": ({}, 0),
    "rotary, grouped and gated": ({"architecture": LLAMA}, 0),
    "rotary, grouped and gated, recomputed": (
        {"architecture": LLAMA, "activation_checkpointing": {"mode": "full", "num_layers": 1}}, 0
    ),
    "distributed optimizer": ({"parallelism": {"data_parallel_size": 4, "zero_stage": 1}}, 1),
    "tensor parallel": ({"parallelism": {"tensor_parallel_size": 2}}, 1),
    "tensor parallel, distributed optimizer": (
        {"parallelism": {"tensor_parallel_size": 2, "data_parallel_size": 4, "zero_stage": 1}}, 1
    ),
    "pipeline's first": ({"parallelism": {"pipeline_parallel_size": 2}, "gradient_accumulation_steps": 4}, 0),
    "recomputed": ({"activation_checkpointing": {"mode": "full", "num_layers": 1}}, 0),
    "core attention recomputed": ({"activation_checkpointing": {"mode": "selective"}}, 0),
    "fp32 softmax": ({"framework_options": {**ALONE, "attention_softmax_in_fp32": True}}, 0),
    "pipeline's last, bert": (
        {"architecture": BERT, "parallelism": {"pipeline_parallel_size": 2}, "gradient_accumulation_steps": 4}, 1
    ),
    "bf16 gradients": ({"gradient_accumulation_steps": 3, "precision.gradients": "bfloat16"}, 0),
}


FUSED, INTERLEAVED = {"attention_backend": "fused"}, {"virtual_pipeline_stages": 2, "pipeline_schedule": "interleaved_1f1b"}
STAGES = {"parallelism": {"pipeline_parallel_size": 4}, "gradient_accumulation_steps": 8, "framework_options": FUSED}
ENGINE_CELLS = {
    "engine": ({"framework_options": FUSED}, 0),
    "engine, sequence parallel": (
        {"framework_options": FUSED, "parallelism": {"tensor_parallel_size": 2, "sequence_parallel": True}}, 0
    ),
    "engine, llama unfused": ({"architecture": LLAMA, "framework_options": {"attention_backend": "unfused"}}, 0),
    "engine, middle stage": (STAGES, 2),
    "engine, interleaved": (
        {**STAGES, "architecture": {**GPT, "num_hidden_layers": 8},
         "parallelism": {"pipeline_parallel_size": 4, **INTERLEAVED}}, 1,
    ),
    "engine, context parallel": ({"framework_options": FUSED, "parallelism": {"context_parallel_size": 2}}, 0),
    "engine, heads exchanged": (
        {"framework_options": {**FUSED, "cp_comm_type": "a2a"}, "parallelism": {"context_parallel_size": 2}}, 0
    ),
    "fp8, delayed": ({"framework_options": FUSED, "precision.compute": "float8"}, 0),
    "fp8, middle stage": (
        {**STAGES, "framework_options": {**FUSED, "fp8_recipe": "tensorwise"}, "precision.compute": "float8"}, 1
    ),
    "t5, tensor parallel": (
        {"architecture": T5, "decoder_sequence_length": 64, "framework_options": {"attention_backend": "unfused"},
         "parallelism": {"tensor_parallel_size": 2}}, 1,
    ),
    "own modules beside the engine": ({"framework_options": {"transformer_impl": "local"}}, 0),
}  # fmt: skip
with_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed (pip install --no-deps transformer_engine)",
)
CELLS |= ENGINE_CELLS
LONGEST = (
    *("bf16 gradients", "core attention recomputed", "fp32 softmax"),  # which the grid `agreement-megatron` has as well
    *("rotary, grouped and gated", "recomputed", "distributed optimizer", "tensor parallel"),
)
"""Cells whose parts other cells have together."""
NAMES = [
    pytest.param(name, marks=[with_engine] * (name in ENGINE_CELLS) + [pytest.mark.whole] * (name in LONGEST))
    for name in CELLS
]


@installed
@pytest.mark.parametrize("name", NAMES)
def test_the_ledger_equals_the_trace_phase_by_phase(ledger_equals_trace, name):
    """Within 0.5 % of each phase's peak, in the first and in a steady step, and between steps."""
    cell, rank = CELLS[name]
    (job,) = expand({"base": BASE, "include": [cell]})
    if name not in ENGINE_CELLS:  # two layers, one for each of two stages, take the same turns as four
        job = job.replace(architecture=replace(job.architecture, num_hidden_layers=2))
    for step, (closed_form, trace) in ledger_equals_trace(job, rank, rel=5e-3).items():
        assert closed_form.totals[-1] == pytest.approx(trace.totals[-1], rel=5e-3), step


@installed
@with_engine
@pytest.mark.slow
def test_the_last_stage_of_overlapping_micro_batches_has_the_traces_peak(traced):
    """Phases of two micro-batches are not apart, so each step's peak is compared, within 0.5 %: with a shared expert,
    latent attention that is made again, and a layer that predicts a further token on a stage without others."""
    latent = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    experts = {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "moe_layer_freq": 1,
        "shared_expert_intermediate_size": 256,
    }  # fmt: skip
    network = {
        **LLAMA, "model_type": "megatron_moe", "num_key_value_heads": 8, "mla": latent, "moe": experts,
        "num_hidden_layers": 6, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    cell = {
        "architecture": network, "sequence_length": 512, "gradient_accumulation_steps": 4,
        "versions": {"megatron_core": "0.16.1"},
        "activation_checkpointing": {"mode": "selective", "modules": ["mla_up_proj", "layernorm"]},
        "framework_options": {
            "attention_backend": "unfused", "apply_rope_fusion": False, "overlap_moe_expert_parallel_comm": True,
            "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
        },
        "parallelism": {
            "pipeline_parallel_size": 2, **INTERLEAVED, "data_parallel_size": 2, "expert_parallel_size": 2,
            "pipeline_layers": [2, 2, 2, 0],
        },
    }  # fmt: skip
    (job,) = expand({"base": BASE, "include": [cell]})
    for step, trace in traced(job, 2).items():
        assert ledger(job, rank=2, step=step).peak().num_bytes == pytest.approx(trace.peak().num_bytes, rel=5e-3), step


def test_what_is_not_run_is_refused_by_name():
    for changed, named in (
        ({"optimizer.name": "sgd"}, "optimizer.name"),
        ({"parallelism": {"data_parallel_size": 2, "sharding": "fsdp2"}}, "parallelism"),
    ):
        (job,) = expand({"base": BASE, "include": [changed]})
        with pytest.raises(CollectorError) as refusal:
            check(job)
        assert refusal.value.parameter == named


@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="megatron-core is installed")
def test_without_megatron_core_one_sentence_says_what_to_install():
    (job,) = expand({"base": BASE, "include": [{}]})
    with pytest.raises(CollectorError, match="pip install --no-deps megatron-core"):
        build(job, "cpu")
