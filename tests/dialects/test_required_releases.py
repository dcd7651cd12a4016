"""What projects' own installations decide: the newest DeepSpeed that they allow, and whether checkpoints are reentrant."""

import json

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.asked_versions import AskedVersions
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of

ENGINE = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
OF_PROJECT = {
    "axolotl": {
        "base_model": "Qwen/Qwen2.5-0.5B", "adapter": "lora", "lora_r": 8, "micro_batch_size": 1, "sequence_len": 512,
        "datasets": [{"path": "x", "type": "alpaca"}], "gradient_checkpointing": True, "bf16": True,
        "lora_target_linear": True,
    },
    "llamafactory": {
        "model_name_or_path": "Qwen/Qwen2.5-0.5B", "stage": "sft", "finetuning_type": "lora", "dataset": "identity",
        "template": "qwen", "cutoff_len": 512, "per_device_train_batch_size": 1, "bf16": True,
    },
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """The job of a project's configuration with DeepSpeed on four GPUs."""

    def job_of(project, versions=None, **given):
        (tmp_path / "engine.json").write_text(json.dumps(ENGINE))
        (tmp_path / "job.yaml").write_text(json.dumps({**OF_PROJECT[project], "deepspeed": "engine.json", **given}))
        asked = AskedVersions(given=FrozenMapping(versions or {}))
        return translation_of(tmp_path / "job.yaml", ReadOptions(num_gpus=4, versions=asked)).job

    return job_of


@pytest.mark.parametrize(("project", "release"), [("axolotl", "0.18.9"), ("llamafactory", "0.16.9")])
def test_deepspeed_is_the_newest_that_the_project_allows_unless_it_is_given(read, project, release):
    assert read(project).versions["deepspeed"] == release
    assert read(project, {"deepspeed": "0.19.8"}).versions["deepspeed"] == "0.19.8"
    assert "deepspeed" not in read(project, deepspeed=None).versions


@pytest.mark.parametrize(("given", "reentrant"), [({}, True), ({"unfrozen_parameters": ["lm_head"]}, False)])
def test_axolotls_checkpoints_are_reentrant_in_supervised_training_of_whole_networks_and_adapters(read, given, reentrant):
    assert read("axolotl", deepspeed=None, **given).activation_checkpointing.use_reentrant is reentrant


@pytest.mark.parametrize(("engine", "reentrant"), [("engine.json", True), (None, False)])
def test_axolotls_preference_trainers_are_trls(read, engine, reentrant):
    """trl 1.9, which axolotl 0.19 requires, makes them reentrant for adapters under ZeRO-3; otherwise they are not."""
    assert read("axolotl", rl="dpo", deepspeed=engine).activation_checkpointing.use_reentrant is reentrant


@pytest.mark.parametrize(
    ("words", "reentrant"),
    [("", False), ("--deepspeed zero2", True), ("--deepspeed zero3", True), ("--gradient_checkpointing_kwargs x", True)],
)
def test_ms_swifts_checkpoints_are_reentrant_but_under_plain_ddp(words, reentrant):
    """ms-swift 4.6 trainers/mixin.py `_fix_gradient_checkpointing`."""
    words = words.replace(" x", """ '{"use_reentrant": true}'""")
    command = f"NPROC_PER_NODE=4 swift sft --model Qwen/Qwen2.5-0.5B --train_type lora --max_length 512 {words}\n"
    assert translation_of(command).job.activation_checkpointing.use_reentrant is reentrant
    alone = command.replace("NPROC_PER_NODE=4 ", "")
    assert translation_of(alone).job.activation_checkpointing.use_reentrant


@pytest.mark.parametrize(("version", "reentrant"), [(1, True), (2, False)])
def test_llamafactorys_checkpoints_are_not_reentrant_under_fsdp2(tmp_path, version, reentrant):
    """LLaMA-Factory 0.9.5 model/model_utils/checkpointing.py prepare_model_for_training."""
    fsdp = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True}
    launcher = {"distributed_type": "FSDP", "fsdp_config": fsdp, "num_processes": 4, "mixed_precision": "bf16"}
    (tmp_path / "fsdp.yaml").write_text(json.dumps(launcher))
    (tmp_path / "job.yaml").write_text(json.dumps(OF_PROJECT["llamafactory"]))
    (tmp_path / "run.sh").write_text("accelerate launch --config_file fsdp.yaml src/train.py job.yaml\n")
    assert translation_of(tmp_path / "run.sh").job.activation_checkpointing.use_reentrant is reentrant
