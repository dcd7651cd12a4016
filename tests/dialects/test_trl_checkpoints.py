"""TRL's trainers decide whether checkpoints are reentrant: for adapters under ZeRO-3 they make them so."""

import json

import pytest

from peakcast import api
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.asked_versions import AskedVersions
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of

ADAPTERS = {"use_peft": True, "lora_r": 8}
GIVEN = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "max_length": 512, "dtype": "bfloat16", "gradient_checkpointing": True}


@pytest.fixture
def read(tmp_path):
    """The job of a command of TRL on four GPUs, under the given stage of ZeRO."""

    def job_of(method, versions, stage=3, **given):
        engine = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        (tmp_path / "engine.json").write_text(json.dumps(engine))
        (tmp_path / "arguments.yaml").write_text(json.dumps({**GIVEN, "deepspeed": "engine.json", **given}))
        command = tmp_path / "run.sh"
        command.write_text(f"trl {method} --config arguments.yaml --num_processes 4\n")
        return translation_of(command, ReadOptions(versions=AskedVersions(given=FrozenMapping(versions)))).job

    return job_of


@pytest.mark.parametrize(
    ("method", "trl", "reentrant"),
    [("sft", "0.28.0", True), ("sft", "0.27.2", False), ("dpo", "1.9.0", True), ("dpo", "1.8.0", False)],
)
def test_adapters_under_stage_3_have_reentrant_checkpoints_by_trls_release(read, method, trl, reentrant):
    asked = {"use_reentrant": False}  # newer releases of trl overrule it
    job = read(method, {"trl": trl}, **ADAPTERS, gradient_checkpointing_kwargs=asked)
    assert job.activation_checkpointing.use_reentrant is reentrant


@pytest.mark.parametrize(("stage", "adapters"), [(2, ADAPTERS), (3, {})])
def test_other_runs_have_the_checkpoints_that_they_ask_for(read, stage, adapters):
    for asked in (True, False):
        job = read("sft", {"trl": "1.16.0"}, stage, **adapters, gradient_checkpointing_kwargs={"use_reentrant": asked})
        assert job.activation_checkpointing.use_reentrant is asked


@pytest.mark.parametrize(("trl", "reentrant"), [("0.27.2", True), ("0.28.0", False)])
def test_the_default_beside_transformers_4_is_trls_since_0_28(read, trl, reentrant):
    job = read("sft", {"trl": trl, "transformers": "4.57.1"}, stage=2)
    assert job.activation_checkpointing.use_reentrant is reentrant


def test_a_job_without_arguments_has_what_trls_preference_trainers_make():
    job = {
        "architecture": "qwen2.5-0.5b", "framework": "deepspeed", "loss": {"kind": "dpo", "reference": "adapter_off"},
        "finetuning": {"method": "lora", "rank": 8}, "activation_checkpointing": {"mode": "full"},
        "parallelism": {"data_parallel_size": 4, "zero_stage": 3},
    }  # fmt: skip
    assert job_from_mapping(job).activation_checkpointing.use_reentrant
    assert not job_from_mapping({**job, "versions": {"trl": "1.8.0"}}).activation_checkpointing.use_reentrant
    assert not job_from_mapping({**job, "loss": {}}).activation_checkpointing.use_reentrant


def test_all_weights_stay_gathered_where_a_reentrant_checkpoint_recomputes_frozen_ones(read):
    """A dry run of this command, of trl 1.16 and DeepSpeed 0.19.8 with Qwen2.5-1.5B on 8 ranks, has 4.32 GiB."""
    answer, older = (
        api.predict(read("sft", versions, model_name_or_path="Qwen/Qwen2.5-1.5B", **ADAPTERS), "L4")
        for versions in ({"trl": "1.16.0", "deepspeed": "0.19.8"}, {"trl": "1.16.0", "deepspeed": "0.19.2"})
    )
    [found] = [finding for finding in answer.findings if finding.code == "weights_stay_gathered"]
    assert "use_reentrant=false" in found.sentence
    weights_bytes = 1_543_714_304 * 2
    assert answer.peak_allocated_bytes.point > weights_bytes
    assert older.peak_allocated_bytes.point < answer.peak_allocated_bytes.point - weights_bytes / 4
    assert "weights_stay_gathered" not in {finding.code for finding in older.findings}


@pytest.mark.parametrize(("deepspeed", "fails"), [("0.19.2", True), ("0.19.3", False)])
def test_frozen_weights_need_reentrant_checkpoints_before_deepspeed_0_19_3(read, deepspeed, fails):
    asked = {"use_reentrant": False}
    job = read("sft", {"trl": "0.24.0", "deepspeed": deepspeed}, **ADAPTERS, gradient_checkpointing_kwargs=asked)
    answer = api.predict(job, "A100-80GB")
    assert ("CheckpointError" in " ".join(answer.warnings)) is fails
    assert (answer.fits == "yes") is not fails


def test_a_file_that_the_command_names_may_be_given_beside_it_too(tmp_path):
    (tmp_path / "arguments.yaml").write_text(json.dumps(GIVEN))
    (tmp_path / "run.sh").write_text("trl sft --config arguments.yaml --num_processes 4\n")
    alone = translation_of(tmp_path / "run.sh").job
    assert translation_of(tmp_path / "run.sh", ReadOptions(files=(tmp_path / "arguments.yaml",))).job == alone
