"""LoRA over Megatron's layers, as ms-swift, Megatron-Bridge, verl and LLaMA-Factory write it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from peakcast.doors.questions import translation_of

RECORDED = Path(__file__).parent / "recorded"
SWIFT = "megatron sft --model Qwen/Qwen2.5-7B-Instruct --micro_batch_size 1 --max_length 2048 --torch_dtype bfloat16"
VERL = (RECORDED / "verl" / "grpo_megatron.sh").read_text()

BRIDGE = yaml.safe_load((RECORDED / "bridge" / "run_config.yaml").read_text())


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
    return {**BRIDGE, "peft": peft}


def test_bridges_section():
    target = "megatron.bridge.peft.lora.LoRA"
    assert adapters(bridge(_target_=target)) == ("lora", 32, (), 0.0, "megatron_bridge")
    given = bridge(_target_=target, dim=8, alpha=16, dropout=0.1, target_modules=["linear_qkv"])
    assert adapters(given) == ("lora", 8, ("linear_qkv",), 0.1, "megatron_bridge")
    for kind, told in (("dora.DoRA", "peft=DoRA is not"), ("qlora.QLoRA", "peft=QLoRA is not")):
        other = translation_of(bridge(_target_=f"megatron.bridge.peft.{kind}", dim=8))
        assert any(told in sentence for sentence in other.unsupported)
    for detail in ({"exclude_modules": ["linear_fc1"]}, {"lora_dtype": "float32"}):
        (finding,) = translation_of(bridge(_target_=target, **detail)).findings
        assert finding.parameter == f"peft.{next(iter(detail))}"
    quantised = {**bridge(_target_=target), "model": {**BRIDGE["model"], "restore_modelopt_state": True}}
    assert [finding.direction for finding in translation_of(quantised).findings] == ["less"]


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


@pytest.mark.parametrize(
    ("precision", "gradients", "compute", "recipe"),
    [
        ({"bf16": True, "grad_reduce_in_fp32": False}, "bfloat16", "bfloat16", None),
        ({"bf16": True, "grad_reduce_in_fp32": True}, "float32", "bfloat16", None),
        ("bf16_mixed", "float32", "bfloat16", None),
        ("fp16_mixed", "float16", "float16", None),
        ("fp16_with_fp8_delayed_scaling_mixed", "float16", "float8", "delayed"),
        ("bf16_with_fp8_subchannel_scaling_mixed", "float32", "float8", "blockwise"),
        ("bf16_with_mxfp8_mixed", "float32", "float8", "mxfp8"),
    ],
)
def test_bridges_mixed_precision(precision, gradients, compute, recipe):
    job = translation_of({**BRIDGE, "mixed_precision": precision}).job
    assert (job.precision.gradients, job.precision.compute) == (gradients, compute)
    assert recipe in (None, job.framework_options.get("fp8_recipe", "delayed"))
    gathers = recipe in ("delayed", "mxfp8")  # Megatron-Bridge 0.6.2 training/mixed_precision.py
    assert bool(job.framework_options.get("fp8_param_gather")) == gathers


def test_verls_stages_and_gradients():
    """As in verl's run_qwen3-236b_megatron.sh: 94 layers on 8 stages, of which the first and the last hold five."""
    override = "+actor_rollout_ref.actor.megatron.override_"
    given = (
        "python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' algorithm.adv_estimator=grpo "
        "data.max_prompt_length=2048 data.max_response_length=4096 data.train_batch_size=256 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
        "actor_rollout_ref.model.path=Qwen3-235B-A22B actor_rollout_ref.model.enable_gradient_checkpointing=True "
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8 actor_rollout_ref.rollout.n=4 "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 trainer.n_gpus_per_node=8 trainer.nnodes=32 "
        f"actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 {override}ddp_config.grad_reduce_in_fp32=False "
        f"{override}transformer_config.num_layers_in_first_pipeline_stage=5 "
        f"{override}transformer_config.num_layers_in_last_pipeline_stage=5\n"
    )
    found = translation_of(given)
    assert found.job.parallelism.pipeline_layers == (5, *[14] * 6, 5)
    assert (found.job.precision.gradients, found.job.activation_checkpointing.mode) == ("bfloat16", "none")
    assert any("enable_gradient_checkpointing has no effect" in sentence for sentence in found.assumptions)
    assert found.unknown == ()


def test_verls_optimizer_under_megatron():
    """verl's `override_optimizer_config` are fields of Megatron's OptimizerConfig; `optim`'s dtypes hold with
    `use_precision_aware_optimizer` alone."""
    given = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=qwen3-8b actor_rollout_ref.actor.strategy=megatron "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=8 {}\n"
    )
    optim = "actor_rollout_ref.actor.optim."
    hosts = translation_of(given.format(f"+{optim}override_optimizer_config.optimizer_cpu_offload=True")).job
    assert hosts.offload.optimizer
    dtypes = f"{optim}exp_avg_dtype=bf16 {optim}exp_avg_sq_dtype=bf16"
    narrow = translation_of(given.format(f"{dtypes} {optim}use_precision_aware_optimizer=True")).job
    assert narrow.framework_options["exp_avg_dtype"] == "bf16"
    assert "exp_avg_dtype" not in translation_of(given.format(dtypes)).job.framework_options
    assert translation_of(given.format(f"{optim}optimizer=muon")).job.optimizer.name == "muon"
