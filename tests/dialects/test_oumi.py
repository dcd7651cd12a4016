"""Oumi: what its recorded recipes do not show (trainers, DeepSpeed, casts under FSDP, accelerate around it)."""

from __future__ import annotations

import pytest

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.asked_versions import AskedVersions
from peakcast.dialects.common.pasted import Document, merged
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of

MODEL = {"model_name": "meta-llama/Llama-3.2-1B", "model_max_length": 512, "torch_dtype_str": "bf16"}
RUN = {"model": MODEL, "training": {"trainer_type": "TRL_SFT", "per_device_train_batch_size": 2}}
QLORA = {"training": {"use_peft": True}, "peft": {"q_lora": True, "bnb_4bit_quant_type": "nf4", "lora_r": 4}}
FSDP = {"fsdp": {"enable_fsdp": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
CHECKPOINTS = {"training": {"enable_gradient_checkpointing": True}}
ZERO = {"enable_deepspeed": True, "zero_stage": "ZERO_3", "precision": "BF16", "offload_optimizer": {"device": "CPU"}}


def read(*changes, gpus=1, files=()):
    values = RUN
    for change in changes:
        values = merged(values, change)
    return translation_of(values, ReadOptions(num_gpus=gpus, files=files))


def test_under_fsdp_accelerate_checkpoints_and_never_reenters():
    reentrant = {"training": {"gradient_checkpointing_kwargs": {"use_reentrant": True}}}
    found = [read(CHECKPOINTS, reentrant, each, gpus=2).job.activation_checkpointing for each in ({}, FSDP)]
    assert [(each.mode, each.use_reentrant) for each in found] == [("full", True), ("full", False)]
    assert read(CHECKPOINTS).job.activation_checkpointing.use_reentrant  # an empty mapping is left to torch


def test_on_one_gpu_neither_fsdp_nor_the_trainer_checkpoints():
    found = read(CHECKPOINTS, FSDP)
    assert found.job.activation_checkpointing.mode == "none"
    assert any("nothing checkpoints activations" in sentence for sentence in found.warnings)


def test_original_parameters_are_not_used_for_adapters_unless_compiled():
    adapters = {"training": {"use_peft": True}}
    jobs = [read(FSDP, change, gpus=2).job for change in ({}, adapters, merged(adapters, {"training": {"compile": True}}))]
    assert [job.framework_options.get("fsdp1_use_orig_params", False) for job in jobs] == [True, False, True]


def test_what_qlora_does_not_quantise_is_float32_on_one_gpu_and_cast_back_under_fsdp():
    alone, sharded = read(QLORA).job, read(QLORA, FSDP, gpus=2).job
    assert (alone.precision.parameters, alone.precision.compute) == ("float32", "float32")
    assert (sharded.precision.parameters, sharded.finetuning.adapter_dtype) == ("bfloat16", "bfloat16")


def test_4_bit_layers_multiply_in_float32_unless_the_configuration_says_otherwise():
    """`BitsAndBytesConfig` gets `bnb_4bit_compute_dtype` as Oumi's PeftParams has it, under FSDP too."""
    narrow = {"peft": {"bnb_4bit_compute_dtype": "bf16"}}
    jobs = [read(QLORA).job, read(QLORA, FSDP, gpus=2).job, read(QLORA, narrow).job]
    computed = [job.framework_options["quantized_compute_dtype"] for job in jobs]
    assert computed == ["float32", "float32", "bfloat16"]
    with pytest.raises(SpecError, match="bnb_4bit_compute_dtype='int3' must be one of bfloat16, float16, float32"):
        read(QLORA, {"peft": {"bnb_4bit_compute_dtype": "int3"}})


def test_accelerate_around_oumi_takes_the_place_of_its_own_section():
    launcher = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}\n"
    found = read(FSDP, gpus=None, files=(Document("accelerate.yaml", launcher),))
    assert (found.job.parallelism.data_parallel_size, found.job.parallelism.sharding) == (4, "fsdp1")
    assert found.job.framework_options["fsdp_reshard_after_forward"] is False
    assert any("section fsdp has no effect" in sentence for sentence in found.assumptions)


def test_deepspeed_is_written_as_oumi_writes_it():
    found = read({"deepspeed": ZERO}, gpus=2)
    layout, offload = found.job.parallelism, found.job.offload
    assert (found.job.framework, layout.zero_stage, offload.optimizer, offload.parameters) == ("deepspeed", 3, True, False)
    assert any("keeps float32 weights" in sentence for sentence in found.warnings)
    with pytest.raises(SpecError, match=r"cannot be given with fsdp\.enable_fsdp"):
        read({"deepspeed": ZERO}, FSDP, gpus=2)


@pytest.mark.parametrize(
    ("trainer", "kind", "length"),
    [("TRL_DPO", "dpo", 512), ("TRL_KTO", "kto", 1024), ("TRL_GRPO", "grpo", 768), ("HF", "cross_entropy", 512)],
)
def test_each_trainer_has_its_loss_and_its_length(trainer, kind, length):
    """KTO's is TRL's default, since Oumi's is not given to it; GRPO's is that of prompt and completion."""
    job = read({"training": {"trainer_type": trainer, "grpo": {"max_completion_length": 256}}}).job
    assert (job.loss.kind, job.sequence_length) == (kind, length)


def test_oumis_own_loop_fuses_and_keeps_the_outputs():
    found = read({"training": {"trainer_type": "OUMI", "optimizer": "adamw", "sgd_momentum": 0.9}})
    assert (found.job.optimizer.name, found.job.optimizer.implementation) == ("adamw", "fused")
    assert found.job.framework_options["outputs_dropped"] is False
    assert "trl" not in found.job.versions


def test_a_key_is_named_as_it_is_written():
    more = {"training": {"trainer_kwargs": {"no_such_key": 1, "beta": 0.2}, "optimizer": "adamw_torch"}}
    assert read(more).unknown == ("training.trainer_kwargs.no_such_key",)
    with pytest.raises(SpecError, match=r"training\.optimizer='zork' must be one of"):
        read({"training": {"optimizer": "zork"}})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"training": {"trainer_type": "VERL_GRPO"}}, "runs verl"),
        ({"training": {"trainer_type": "TRL_GKD", "gkd": {"teacher_model_name_or_path": "x"}}}, "is a teacher"),
        ({"training": {"mixed_precision_dtype": "BF16"}}, "needs model.torch_dtype_str: float32"),
        ({"model": {"torch_dtype_str": "float64"}}, "must be auto or one of"),
        ({"training": {"use_peft": True}, "peft": {"q_lora": True, "q_lora_bits": 3}}, "must be 4 or 8"),
    ],
)
def test_what_oumi_or_the_job_cannot_do_is_refused(change, says):
    with pytest.raises(SpecError, match=says):
        read(change)


OUMI = """
model: {{model_name: llama-3.2-1b, model_max_length: 1024, torch_dtype_str: bfloat16, attn_implementation: sdpa}}
training: {{trainer_type: {}, use_peft: {}, per_device_train_batch_size: 2, enable_gradient_checkpointing: true,
  gradient_checkpointing_kwargs: {{use_reentrant: false}}, optimizer: adamw_torch_fused}}
peft: {{lora_r: 8, lora_alpha: 16, lora_dropout: 0.0, lora_target_modules: [q_proj, v_proj]}}
"""
TRL = """
model_name_or_path: llama-3.2-1b
per_device_train_batch_size: 2
max_length: 1024
bf16: false
dtype: bfloat16
gradient_checkpointing_kwargs: {{use_reentrant: false}}
optim: adamw_torch_fused
attn_implementation: sdpa
lora_r: 8
lora_alpha: 16
lora_dropout: 0.0
lora_target_modules: [q_proj, v_proj]
use_peft: {}
{}
"""


@pytest.mark.parametrize(("trainer", "key"), [("TRL_SFT", ""), ("TRL_DPO", "precompute_ref_log_probs: false")])
@pytest.mark.parametrize("adapts", ["true", "false"])
def test_a_run_is_the_same_job_in_oumis_words_and_in_trls(trainer, key, adapts):
    versions = AskedVersions(FrozenMapping({"trl": "1.5", "transformers": "4.57.3"}))
    texts = OUMI.format(trainer, adapts), TRL.format(adapts, key)
    oumi, trl = (translation_of(text, ReadOptions(versions=versions)).job for text in texts)
    assert oumi == trl
