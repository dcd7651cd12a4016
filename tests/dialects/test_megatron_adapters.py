"""LoRA over Megatron's layers, as ms-swift, Megatron-Bridge, verl and LLaMA-Factory write it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from peakcast.doors.questions import translation_of

RECORDED = Path(__file__).parent / "recorded"
SWIFT = "megatron sft --model Qwen/Qwen2.5-7B-Instruct --micro_batch_size 1 --max_length 2048 --torch_dtype bfloat16"
VERL = (RECORDED / "verl" / "grpo_megatron.sh").read_text()


def adapters(question: object) -> tuple[object, ...]:
    job = translation_of(question).job
    tuning = job.finetuning
    library = job.framework_options.get("adapter_library", "megatron_bridge")
    return tuning.method, tuning.rank, tuning.targets, tuning.dropout, library


def test_ms_swifts_tuner():
    assert adapters(f"{SWIFT} --tuner_type lora\n") == ("lora", 8, ("all-linear",), 0.05, "mcore_bridge")
    given = f"{SWIFT} --train_type lora --lora_rank 16 --lora_dropout 0 --target_modules linear_qkv linear_proj\n"
    assert adapters(given) == ("lora", 16, ("linear_qkv", "linear_proj"), 0.0, "mcore_bridge")
    assert adapters(f"{SWIFT} --tuner_type full\n")[0] == "full"


def bridge(**peft: object) -> dict[str, object]:
    return {**yaml.safe_load((RECORDED / "bridge" / "run_config.yaml").read_text()), "peft": peft}


def test_bridges_section():
    target = "megatron.bridge.peft.lora.LoRA"
    assert adapters(bridge(_target_=target)) == ("lora", 32, (), 0.0, "megatron_bridge")
    given = bridge(_target_=target, dim=8, alpha=16, dropout=0.1, target_modules=["linear_qkv"])
    assert adapters(given) == ("lora", 8, ("linear_qkv",), 0.1, "megatron_bridge")
    other = translation_of(bridge(_target_="megatron.bridge.peft.dora.DoRA", dim=8))
    assert any("peft=DoRA is not modelled" in sentence for sentence in other.unsupported)


def test_verls_section():
    lora = "actor_rollout_ref.model.lora"
    command = VERL.rstrip().removesuffix("$@").rstrip(" \\\n") + f" {lora}.rank=64 {lora}.alpha=32 {lora}.merge=True\n"
    assert adapters(command) == ("lora", 64, (), 0.0, "megatron_bridge")


@pytest.mark.parametrize(("target", "expected"), [(None, ("all-linear",)), ("linear_qkv", ("linear_qkv",))])
def test_llamafactorys_default_is_lora(target, expected):
    values = {
        "model_name_or_path": "qwen2.5-7b", "stage": "sft", "output_dir": "o", "bf16": True, "lora_rank": 16,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True,
    }  # fmt: skip
    found = translation_of(values if target is None else {**values, "lora_target": target})
    assert (found.job.framework, found.job.finetuning.rank, found.job.finetuning.targets) == ("megatron", 16, expected)
    assert (found.unknown, found.unsupported) == ((), ())
