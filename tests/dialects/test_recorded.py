"""Configurations as their projects document them: every field of the job that they settle, read by hand beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from peakcast import render
from peakcast.dialects.opening import opened
from peakcast.dialects.pasted import flat
from peakcast.dialects.recognise import DIALECTS, NOTHING, Beside, dialect_of, translated
from peakcast.questions import translation_of
from peakcast.spec import job_to_mapping

RECORDED = Path(__file__).parent / "recorded"


class Expected(NamedTuple):
    """What a recorded configuration is and says."""

    dialect: str
    fields: dict[str, Any]
    says: tuple[str, ...] = ()
    """Words that its assumptions, warnings or unsupported sentences must have."""
    unknown: tuple[str, ...] = ()
    beside: Beside = NOTHING


def pieces(parameters: str, compute: str, gradients: str, states: str, main: str | None = None) -> dict[str, Any]:
    names = ("parameters", "compute", "gradients", "optimizer_states", "main_parameters")
    values = (parameters, compute, gradients, states, main)
    return {f"precision.{name}": value for name, value in zip(names, values, strict=True)}


HALF = pieces("bfloat16", "bfloat16", "bfloat16", "bfloat16")
LORA_FP32 = pieces("bfloat16", "bfloat16", "float32", "float32")
ENGINE = pieces("bfloat16", "bfloat16", "bfloat16", "float32", "float32")
MEGATRON_BF16 = pieces("bfloat16", "bfloat16", "float32", "float32", "float32")
MISTRAL_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SFT = RECORDED / "trl" / "zephyr_7b_sft_qlora.yaml"
ZEPHYR = {
    "architecture.name": "mistral-7b", "framework": "huggingface", "micro_batch_size": 4, "sequence_length": 2048,
    "gradient_accumulation_steps": 2, "finetuning.method": "qlora", "finetuning.rank": 16, "finetuning.alpha": 16.0,
    "finetuning.dropout": 0.05, "finetuning.targets": MISTRAL_TARGETS, "finetuning.quantization": "nf4",
    "finetuning.double_quantization": False, "attention": "flash_attention_2", "activation_checkpointing.mode": "full",
    "activation_checkpointing.use_reentrant": False, "optimizer.name": "adamw", **LORA_FP32,
}  # fmt: skip

EXAMPLES: dict[str, Expected] = {
    "megatron/gpt3_175b.sh": Expected(
        "megatron",
        {
            "architecture.num_hidden_layers": 96, "architecture.hidden_size": 12288, "architecture.num_attention_heads": 96,
            "architecture.intermediate_size": 4 * 12288, "architecture.position_embedding": "learned",
            "architecture.vocab_size": 51200,  # 50,257 up to a multiple of 128 × 8
            "architecture.hidden_dropout": 0.1, "framework": "megatron", "micro_batch_size": 1, "sequence_length": 2048,
            "gradient_accumulation_steps": 1536, "parallelism.tensor_parallel_size": 8,
            "parallelism.pipeline_parallel_size": 16, "parallelism.data_parallel_size": 1,
            **pieces("float16", "float16", "float16", "float32", "float32"),
            "framework_options.cuda_device_max_connections": "1",
        },
        ("rampup-batch-size", "hidden-dropout is not given"),
    ),
    "megatron/llama3_8b_fp8.sh": Expected(
        "megatron",
        {
            "architecture.num_hidden_layers": 32, "architecture.num_key_value_heads": 8, "architecture.head_dim": 128,
            "architecture.intermediate_size": 14336, "architecture.gated_mlp": True,
            "architecture.vocab_size": 128384,  # 128,256 + 1 (NullTokenizer's end of document), up to a multiple of 128
            "architecture.tie_word_embeddings": False, "architecture.position_embedding": "rope",
            "architecture.mlp_bias": False, "sequence_length": 8192, "micro_batch_size": 1,
            "gradient_accumulation_steps": 16, "parallelism.data_parallel_size": 8, "parallelism.zero_stage": 1,
            **pieces("bfloat16", "float8", "bfloat16", "float32", "float32"),
            "framework_options.overlap_grad_reduce": True, "framework_options.attention_backend": "fused",
            "framework_options.create_attention_mask_in_dataloader": False,
            "framework_options.empty_unused_memory_level": 1, "framework_options.decoupled_lr": True,
        },
        ("FP8 parameters", "$(dirname"),
    ),
    "megatron/mixtral_8x7b_slurm.sh": Expected(
        "megatron",
        {
            "architecture.moe.num_experts": 8, "architecture.moe.num_experts_per_tok": 2,
            "architecture.moe.moe_intermediate_size": 14336, "architecture.normalization": "rmsnorm",
            "architecture.vocab_size": 32000, "sequence_length": 4096, "parallelism.pipeline_parallel_size": 4,
            "parallelism.expert_parallel_size": 4, "parallelism.data_parallel_size": 4,  # 2 nodes × 8 GPUs / 4 stages
            "gradient_accumulation_steps": 64, **MEGATRON_BF16, "allocator.expandable_segments": True,
            "framework_options.moe_grouped_gemm": True, "framework_options.moe_token_dispatcher_type": "alltoall",
        },
        ("sequence-parallel has no effect",),
    ),
    "megatron/gpt_config.yaml": Expected(
        "megatron_yaml",
        {
            "architecture.num_hidden_layers": 24, "architecture.hidden_size": 1024, "architecture.gated_mlp": True,
            "architecture.intermediate_size": 2688,  # int(4 · 1024 · 2/3 / 64) · 64
            "architecture.hidden_dropout": 0.0, "architecture.mlp_bias": False, "architecture.position_embedding": "rope",
            "architecture.tie_word_embeddings": False, "micro_batch_size": 2, "sequence_length": 4096,
            "gradient_accumulation_steps": 64, "attention": "eager", "parallelism.zero_stage": 0, **MEGATRON_BF16,
            "framework_options.apply_layernorm_1p": True, "framework_options.persist_layer_norm": False,
            "framework_options.rotary_percent": 0.5, "framework_options.transformer_impl": "local",
        },
        ("rampup-batch-size", "does not settle the vocabulary"),
    ),
    "torchtitan/llama3_8b.toml": Expected(
        "torchtitan",
        {
            "architecture.name": "llama-3.1-8b", "framework": "torch", "versions.torchtitan": "main", "micro_batch_size": 1,
            "sequence_length": 8192, "gradient_accumulation_steps": 1, "parallelism.data_parallel_size": 64,
            "parallelism.sharding": "fsdp2", "compile": False, "attention": "sdpa", "optimizer.implementation": "fused",
            "activation_checkpointing.mode": "selective", **pieces("float32", "bfloat16", "float32", "float32"),
        },
        ("every second matrix product, as torchtitan 0.2", "mixed_precision_param is not given"),
        beside=Beside(num_gpus=64),
    ),
    "torchtitan/llama3_405b.toml": Expected(
        "torchtitan",
        {
            "architecture.name": "llama-3.1-405b", "micro_batch_size": 2, "parallelism.data_parallel_size": 16,
            "parallelism.tensor_parallel_size": 8, "parallelism.sequence_parallel": True, "parallelism.sharding": "fsdp2",
            "compile": True, "activation_checkpointing.mode": "full", "precision.compute": "float8",
        },
        ("FP8 training",),
        beside=Beside(num_gpus=128),
    ),
    "torchtitan/llama3_70b_registry.json": Expected(
        "torchtitan",
        {
            "architecture.name": "llama-3.1-70b", "micro_batch_size": 8, "sequence_length": 8192,
            "parallelism.tensor_parallel_size": 8, "parallelism.data_parallel_size": 32, "compile": False,
            "activation_checkpointing.mode": "full",
        },
        beside=Beside(num_gpus=256),
    ),
    "torchtitan/deepseek_v3_671b.toml": Expected(
        "torchtitan",
        {
            "architecture.name": "deepseek-v3", "micro_batch_size": 4, "parallelism.data_parallel_size": 256,
            "parallelism.sharding": "fsdp2", "compile": False,  # the loss alone is compiled
        },
        ("A compiled loss (compile.components=loss)", "the experts are torchtitan 0.3's module"),
        beside=Beside(num_gpus=256),
    ),
    "axolotl/llama3_8b_lora.yml": Expected(
        "axolotl",
        {
            "architecture.name": "llama-3-8b", "micro_batch_size": 2, "sequence_length": 4096,
            "gradient_accumulation_steps": 4, "finetuning.method": "qlora", "finetuning.quantization": "int8",
            "finetuning.rank": 32, "finetuning.alpha": 16.0, "finetuning.targets": ["all-linear"],
            "optimizer.name": "adamw_8bit", "attention": "flash_attention_2", "activation_checkpointing.mode": "full",
            "activation_checkpointing.use_reentrant": False, **LORA_FP32,
        },
        ("modules_to_save", "sample_packing joins", "the number of GPUs is not given"),
    ),
    "axolotl/llama3_70b_qlora_fsdp.yaml": Expected(
        "axolotl",
        {
            "architecture.name": "llama-3-70b", "micro_batch_size": 1, "sequence_length": 512,
            "parallelism.sharding": "fsdp1", "parallelism.data_parallel_size": 2, "offload.parameters": True,
            "offload.optimizer": True, "finetuning.method": "qlora", "finetuning.quantization": "nf4",
            "finetuning.double_quantization": True, "finetuning.rank": 8, "activation_checkpointing.use_reentrant": True,
            "optimizer.implementation": "foreach",
        },
        beside=Beside(num_gpus=2),
    ),
    "axolotl/llama3_8b_full.yaml": Expected(
        "axolotl",
        {
            "architecture.name": "llama-3-8b", "framework": "deepspeed", "parallelism.zero_stage": 3,
            "parallelism.data_parallel_size": 8, "sequence_length": 8192, "gradient_accumulation_steps": 8,
            "finetuning.method": "full", "optimizer.name": "paged_adamw_8bit", **ENGINE,
            "framework_options.reduce_bucket_size": 4096**2,
        },
        ("15,099,494 elements", "40,960 elements"),
        beside=Beside(num_gpus=8),
    ),
    "axolotl/llama3_8b_dpo_lora.yml": Expected(
        "axolotl",
        {
            "architecture.name": "llama-3-8b", "micro_batch_size": 4, "finetuning.method": "qlora", "sequence_length": 4096,
            "loss.kind": "dpo", "framework_options.preference_logits": "whole",
        },
        ("2 × 2 = 4", "trl 1.9, which axolotl 0.19 requires, makes whole logits"),
    ),
    "axolotl/llama31_8b_liger_fsdp.yaml": Expected(
        "axolotl",
        {
            "architecture.name": "llama-3.1-8b", "micro_batch_size": 2, "sequence_length": 4096,
            "attention": "flash_attention_2", "parallelism.sharding": "fsdp1", "parallelism.data_parallel_size": 8,
            "offload.parameters": True, "loss.fused_linear_cross_entropy": True, "finetuning.method": "full",
            "gradient_accumulation_steps": 4, "activation_checkpointing.use_reentrant": False,
            "framework_options.liger_kernels": True,
        },
        ("sample_packing joins",),
        beside=Beside(num_gpus=8, model="llama-3.1-8b"),
    ),
    "llamafactory/llama3_lora_sft.yaml": Expected(
        "llamafactory",
        {
            "architecture.name": "llama-3-8b", "micro_batch_size": 1, "sequence_length": 2048,
            "gradient_accumulation_steps": 8, "finetuning.method": "lora", "finetuning.rank": 8, "finetuning.alpha": 16.0,
            "finetuning.targets": ["all-linear"], "finetuning.dropout": 0.0, "attention": "sdpa",
            "activation_checkpointing.mode": "full", "activation_checkpointing.use_reentrant": True,
            "optimizer.implementation": "foreach", **LORA_FP32,
        },
        ("gradient checkpointing is on", "lora_alpha is not given"),
    ),
    "llamafactory/llama3_full_sft.yaml": Expected(
        "llamafactory",
        {
            "framework": "deepspeed", "parallelism.zero_stage": 3, "parallelism.data_parallel_size": 8,
            "gradient_accumulation_steps": 2, "finetuning.method": "full", **ENGINE,
        },
        beside=Beside(num_gpus=8),
    ),
    "llamafactory/llama3_qlora_sft.yaml": Expected(
        "llamafactory",
        {"finetuning.method": "qlora", "finetuning.quantization": "nf4", "finetuning.double_quantization": False},
    ),
    "llamafactory/llama3_lora_dpo.yaml": Expected(
        "llamafactory",
        {
            "micro_batch_size": 2, "finetuning.method": "lora", "loss.kind": "dpo",
            "framework_options.preference_logits": "whole",
        },
        ("2 × 1 = 2", "LLaMA-Factory (train/dpo/trainer.py) makes whole logits"),
    ),
    "llamafactory/llama3_qlora_fsdp.yaml": Expected(
        "llamafactory",
        {"parallelism.sharding": "fsdp1", "parallelism.data_parallel_size": 2, "offload.parameters": True},
        beside=Beside(files=(RECORDED / "accelerate" / "fsdp_offload.yaml",)),
    ),
    "llamafactory/fsdp_qlora.sh": Expected(
        "llamafactory",
        {
            "architecture.name": "llama-3-8b", "parallelism.sharding": "fsdp1", "parallelism.data_parallel_size": 2,
            "offload.parameters": True, "finetuning.method": "qlora", "finetuning.targets": ["q_proj", "v_proj"],
            "sequence_length": 1024, "gradient_accumulation_steps": 8, "precision.parameters": "float16",
        },
    ),
    "nanotron/config_tiny_llama.yaml": Expected(
        "nanotron",
        {
            "architecture.name": "nanotron-2-layers-16", "architecture.vocab_size": 256, "framework": "torch",
            "architecture.tie_word_embeddings": True, "micro_batch_size": 2, "sequence_length": 256,
            "parallelism.data_parallel_size": 2, "parallelism.tensor_parallel_size": 2,
            "parallelism.sequence_parallel": True, "parallelism.pipeline_parallel_size": 2,
            "parallelism.pipeline_schedule": "1f1b", "attention": "flash_attention_2", "optimizer.implementation": "fused",
            **MEGATRON_BF16,
        },
        ("an even split of the layers is taken",),
    ),
    "nanotron/config_qwen_with_moe.yaml": Expected(
        "nanotron",
        {
            "architecture.model_type": "qwen2_moe", "architecture.moe.num_experts": 8,
            "architecture.moe.num_experts_per_tok": 1, "architecture.moe.moe_intermediate_size": 768,
            "architecture.moe.shared_expert_intermediate_size": 768, "architecture.moe.shared_expert_gate": True,
            "architecture.attention_bias": False, "architecture.sliding_window": 20, "micro_batch_size": 3,
            "parallelism.data_parallel_size": 2, "parallelism.sequence_parallel": False, **MEGATRON_BF16,
        },
        ("moe_intermediate_size is not given", "fused RMSNorm and rotary embedding keep less"),
    ),
    "accelerate/fsdp.yaml": Expected(
        "accelerate",
        {**ZEPHYR, "parallelism.sharding": "fsdp1", "parallelism.data_parallel_size": 8},
        beside=Beside(files=(SFT,)),
    ),
    "accelerate/fsdp2.yaml": Expected(
        "accelerate",
        {**ZEPHYR, "parallelism.sharding": "fsdp2", "parallelism.data_parallel_size": 2},
        beside=Beside(files=(SFT,)),
    ),
    "accelerate/deepspeed_zero3.yaml": Expected(
        "accelerate",
        {"parallelism.zero_stage": 3, "parallelism.data_parallel_size": 8, "architecture.name": "qwen2.5-7b", **ENGINE},
        ("per_device_train_batch_size is not given",),
        beside=Beside(model="Qwen/Qwen2.5-7B"),
    ),
    "trl/zephyr_7b_sft_qlora.yaml": Expected("training", ZEPHYR, ("the number of GPUs is not given",)),
    "trl/gemma_2b_sft_qlora.sh": Expected(
        "training",
        {
            "architecture.name": "gemma-2b", "micro_batch_size": 2, "finetuning.rank": 16, "finetuning.alpha": 32.0,
            "finetuning.targets": ["q_proj", "k_proj", "v_proj", "o_proj"], "finetuning.quantization": "nf4",
        },
    ),
    "trl/zephyr_7b_dpo_full.yaml": Expected(
        "training",
        {
            "architecture.name": "mistral-7b", "micro_batch_size": 16, "sequence_length": 1024, "loss.kind": "dpo",
            "finetuning.method": "full", "gradient_accumulation_steps": 2, "activation_checkpointing.mode": "full",
        },
        ("2 × 8 = 16", "a frozen copy of the network beside it", "as in trl since 1.15"),
    ),
    "trl/dpo_lora.sh": Expected(
        "training",
        {
            "architecture.name": "qwen2.5-0.5b", "framework": "deepspeed", "parallelism.zero_stage": 3,
            "parallelism.data_parallel_size": 8, "micro_batch_size": 4, "sequence_length": 1024, "finetuning.rank": 32,
            "finetuning.dropout": 0.05, "activation_checkpointing.mode": "full", "loss.kind": "dpo",
        },
        ("2 × 2 = 4", "the network with its adapters switched off", "the default of trl, 0.05"),
    ),
    "litgpt/llama31_8b_qlora.yaml": Expected(
        "litgpt",
        {
            "architecture.name": "llama-3.1-8b", "framework": "torch", "micro_batch_size": 2, "sequence_length": 512,
            "gradient_accumulation_steps": 4, "finetuning.method": "qlora", "finetuning.rank": 32,
            "finetuning.quantization": "nf4", "finetuning.targets": ["q_proj", "v_proj"], "parallelism.sharding": "none",
            "finetuning.adapter_dtype": "bfloat16", "activation_checkpointing.mode": "none", **HALF,
        },
        ("chunks of 128 tokens",),
    ),
    "litgpt/llama2_7b_full.yaml": Expected(
        "litgpt",
        {
            "architecture.name": "llama-2-7b", "micro_batch_size": 4, "gradient_accumulation_steps": 4,
            "parallelism.data_parallel_size": 4, "parallelism.sharding": "fsdp1", "activation_checkpointing.mode": "full",
        },
    ),
    "torchtune/llama31_8b_lora.yaml": Expected(
        "torchtune",
        {
            "architecture.name": "llama-3.1-8b", "micro_batch_size": 2, "gradient_accumulation_steps": 32,
            "finetuning.method": "lora", "finetuning.rank": 8, "finetuning.targets": ["q_proj", "v_proj"],
            "parallelism.sharding": "fsdp2", "parallelism.data_parallel_size": 2, "optimizer.implementation": "fused",
            **HALF,
        },
        ("max_seq_len is not given", "CEWithChunkedOutputLoss"),
        beside=Beside(num_gpus=2),
    ),
    "torchtune/llama31_70b_full.yaml": Expected(
        "torchtune",
        {
            "architecture.name": "llama-3.1-70b", "offload.parameters": True, "offload.optimizer": True,
            "activation_checkpointing.mode": "full", "parallelism.data_parallel_size": 8, "micro_batch_size": 2,
        },
        beside=Beside(num_gpus=8),
    ),
    "deepspeed/autotp.json": Expected(
        "deepspeed",
        {"parallelism.zero_stage": 2, "parallelism.data_parallel_size": 8, "optimizer.implementation": "fused", **HALF},
        ("tensor parallelism", "bf16.enabled='auto' follows"),
        beside=Beside(model="llama-3.1-8b", num_gpus=8),
    ),
    "deepspeed/zenflow.json": Expected(
        "deepspeed",
        {"parallelism.zero_stage": 2, "offload.optimizer": True, **ENGINE},
        unknown=("zero_optimization.zenflow",),
        beside=Beside(model="llama-3.1-8b", num_gpus=8),
    ),
}  # fmt: skip


@pytest.fixture(params=EXAMPLES)
def example(request):
    return RECORDED / request.param, EXAMPLES[request.param]


def test_the_job_is_what_a_reader_finds(example):
    file, expected = example
    translation = translation_of(file, expected.beside)
    job = flat(job_to_mapping(translation.job))
    assert {key: job.get(key) for key in expected.fields} == expected.fields
    said = " ".join((*translation.assumptions, *translation.warnings, *translation.unsupported))
    assert [words for words in expected.says if words not in said] == []
    assert translation.unknown == expected.unknown


def test_it_is_recognised_by_what_it_contains(example):
    file, expected = example
    assert dialect_of(opened(file).values) == expected.dialect
    lone = file.name not in ("dpo_lora.sh", "fsdp_qlora.sh")  # their text alone names other files
    text = opened(file.read_text(encoding="utf-8") if lone else file)
    assert dialect_of(text.values) == expected.dialect


def test_print_job_gives_a_file_whose_reading_gives_the_same_job(example, tmp_path):
    file, expected = example
    translation = translation_of(file, expected.beside)
    for as_json, ending in ((False, ".yaml"), (True, ".json")):
        printed = tmp_path / f"job{ending}"
        printed.write_text(render.job_text(translation, as_json=as_json), encoding="utf-8")
        assert translation_of(printed).job == translation.job


def test_no_key_is_passed_over_in_silence(example):
    file, expected = example
    pasted = opened(file)
    translation = translated(replace(pasted, values={**pasted.values, "no_such_key": 7}), expected.beside)
    assert [name for name in translation.unknown if name.replace("-", "_") == "no_such_key"]
    assert any("no" in warning and "is not known here" in warning for warning in translation.warnings)


def test_every_dialect_has_a_recorded_example_or_is_a_part_of_one():
    covered = {expected.dialect for expected in EXAMPLES.values()}
    assert set(DIALECTS) - covered == {"job", "peft", "hf_config"}  # tested in test_recognise.py


PARTS = {
    "accelerate/fsdp.yaml",
    "llamafactory/ds_z3_config.json",
    "axolotl/zero3_bf16.json",
    "accelerate/fsdp_offload.yaml",
}
"""What says too little by itself (test_recorded_parts.py), or stands beside another."""


def test_every_recorded_file_is_used():
    used = {*EXAMPLES, *PARTS, "README.md"}
    assert {str(path.relative_to(RECORDED)) for path in RECORDED.rglob("*") if path.is_file()} == used
