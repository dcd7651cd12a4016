"""On what a recognition rests, how sure it is, and what is shown where a configuration may mean two jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peakcast import api, catalog
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.asked_versions import AskedVersions, asked_versions
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import AlternativeReading, Translation
from peakcast.dialects.huggingface.whose_trainer import whose_trainer
from peakcast.dialects.recognise import DIALECTS, PROGRAMS, recognised
from peakcast.dialects.translate import ReadOptions, translated
from peakcast.doors.batching import predict_batch
from peakcast.doors.questions import translation_of
from peakcast.doors.readings import with_others

PLAIN = {"model_name_or_path": "gpt2", "output_dir": "o", "per_device_train_batch_size": 8, "block_size": None}
GPU = "A100-80GB"


def read(program: str = "", **values: Any) -> Translation:
    return translated(Pasted(values={**PLAIN, **values}, program=program))


def programs(found: Translation) -> tuple[AlternativeReading, ...]:
    """Its other readings, without those of another release."""
    return tuple(other for other in found.others if "transformers 4" not in other.name and "trl before" not in other.name)


# -- TRL's or transformers' own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "values", "trl"),
    [
        ("run_clm.py", {"dataset_name": "wikitext"}, False),
        ("examples/pytorch/language-modeling/run_mlm.py", {"dataset_name": "wikitext", "max_seq_length": 512}, False),
        ("run_clm.py", {"dataset_name": "wikitext", "packing": True}, False),  # the program is the better sign
        ("", {"dataset_name": "wikitext", "block_size": 512}, False),
        ("", {"dataset_name": "wikitext", "do_train": True}, False),
        ("", {}, False),
        ("trl sft", {"dataset_name": "wikitext"}, True),
        ("examples/scripts/sft.py", {"dataset_name": "wikitext"}, True),
        ("", {"dataset_name": "wikitext", "packing": True}, True),
        ("", {"use_peft": True}, True),
        ("train.py", {"dataset_name": "wikitext", "max_length": 512}, True),
    ],
)
def test_whose_arguments_they_are_is_told_and_said(program: str, values: dict[str, Any], trl: bool) -> None:
    found = read(program, **values)
    assert found.job.activation_checkpointing.mode == ("full" if trl else "none")
    assert programs(found) == ()
    if program or values:
        said = "the training arguments are TRL's by" if trl else "the training arguments are transformers' own by"
        assert any(sentence.startswith(said) for sentence in found.assumptions)


def test_arguments_that_may_be_of_either_are_read_as_both() -> None:
    found = read("train.py", dataset_name="wikitext")
    assert found.job.activation_checkpointing.mode == "none"
    (other,) = programs(found)
    assert other.name == "a run of TRL's trainers, with their defaults"
    assert other.job.activation_checkpointing.mode == "full"
    assert "--dialect trl or --dialect transformers" in other.way_out


def test_beta_alone_is_dpos_or_that_of_a_method_without_a_reference() -> None:
    (other,) = programs(read(beta=0.1))
    assert (other.job.loss.kind, other.job.micro_batch_size) == ("cross_entropy", 2 * 8)
    assert read(beta=0.1).job.reference == "model"
    assert programs(read("dpo.py", beta=0.1)) == programs(read(beta=0.1, rpo_alpha=1.0)) == ()
    assert programs(read(beta=0.0, num_generations=8)) == ()  # GRPO's


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [("trl-lib/ultrafeedback_binarized", "dpo"), ("trl-lib/kto-mix-14k", "kto"), ("my/orca-dpo", "dpo")],
)
def test_a_dataset_of_preferences_may_mean_another_of_trls_trainers(dataset: str, kind: str) -> None:
    """TRL's trainers share their arguments, and the reference network of DPO and KTO needs much more."""
    found = read(dataset_name=dataset, max_length=512)
    assert found.job.loss.kind == "cross_entropy"
    (other,) = programs(found)
    assert other.job.loss.kind == kind
    assert dataset in other.name
    assert programs(read("sft.py", dataset_name=dataset, max_length=512)) == (), "the program says it"
    assert programs(read(dataset_name="trl-lib/Capybara", max_length=512)) == ()


@pytest.mark.parametrize(("dialect", "mode"), [("trl", "full"), ("transformers", "none")])
def test_saying_whose_they_are_settles_it(dialect: str, mode: str) -> None:
    found = translation_of({**PLAIN, "dataset_name": "wikitext"}, ReadOptions(dialect=dialect))
    assert (found.job.activation_checkpointing.mode, programs(found)) == (mode, ())


def test_what_both_readings_agree_on_needs_no_second() -> None:
    same = {"gradient_checkpointing": True, "bf16": True, "torch_dtype": "bfloat16"}
    (other,) = read("train.py", dataset_name="x", **same).others
    assert other.job.framework_options["loss_kernel"] == "tiles"  # from trl 1.15 on they differ in the loss

    def others(trl: str) -> tuple[AlternativeReading, ...]:
        options = ReadOptions(versions=AskedVersions(FrozenMapping({"trl": trl, "transformers": "5.17.0"})))
        return translation_of({**PLAIN, "dataset_name": "x", **same}, options).others

    assert [other.job.framework_options["sft_metrics"] for other in others("1.5.1")] == ["entropy_of_a_copy"]
    assert others("0.14.0") == ()


@pytest.mark.parametrize(("program", "dtype"), [("sft.py", "float32"), ("trl dpo", "float32"), ("train.py", "bfloat16")])
def test_trl_loads_weights_in_float32_unless_it_is_told_another_dtype(program: str, dtype: str) -> None:
    """trl 1.16 trainer/model_config.py: `dtype` defaults to float32. (Llama's checkpoint is in bfloat16.)"""
    found = read(program, model_name_or_path="meta-llama/Llama-3.2-1B")
    assert found.job.precision.parameters == dtype
    assert any("trl loads weights in float32" in sentence for sentence in found.assumptions) == (dtype == "float32")
    assert read(program, dtype="bfloat16").job.precision.parameters == "bfloat16"


def test_adapters_that_nothing_asks_for_are_shown_as_another_reading() -> None:
    values = {"lora_r": 8, "lora_alpha": 16, "gradient_checkpointing": True, "bf16": True}
    found = read("train.py", **values)
    assert found.job.finetuning.method == "full"
    (other,) = [reading for reading in found.others if reading.job.finetuning.method == "lora"]
    assert other.job.finetuning.rank == 8
    assert "use_peft" in other.way_out
    assert read("train_lora.py", **values).job.finetuning.method == "lora"  # FastChat's, without a switch


@pytest.mark.parametrize(("key", "method"), [("use_lora", "lora"), ("lora_enable", "lora"), ("q_lora", "qlora")])
def test_switches_of_scripts_with_adapters_of_their_own_are_read(key: str, method: str) -> None:
    """Qwen's finetune.py, LLaVA's train.py and FastChat's train_lora.py: full training would need far more."""
    found = read("finetune.py", **{key: True}, bf16=True)
    assert found.job.finetuning.method == method
    assert [finding.parameter for finding in found.findings if finding.code == "setting_not_modelled"] == [key]


def test_a_script_of_qlora_by_its_name_has_weights_of_four_bits_and_its_own_key_for_the_length() -> None:
    """As `torchrun scripts/run_fsdp_qlora.py --config a.yaml`, which many guides to FSDP with QLoRA have."""
    found = read("run_fsdp_qlora.py", bf16=True, max_seq_len=3072, fsdp="full_shard auto_wrap", gradient_checkpointing=True)
    assert (found.job.finetuning.method, found.job.sequence_length) == ("qlora", 3072)
    assert any("run_fsdp_qlora.py: weights are assumed in 4 bits by its name" in said for said in found.assumptions)
    assert read("run_lora.py", bf16=True).job.finetuning.method == "lora"


def test_transformers_4_loads_float32_where_its_script_says_no_dtype() -> None:
    name = "meta-llama/Llama-3.2-1B"
    values = {"model_name_or_path": name, "dataset_name": "wikitext", "output_dir": "o", "bf16": True}
    four, five = (
        translated(
            Pasted(values=values, program="run_clm.py"), ReadOptions(versions=asked_versions(f"transformers={version}"))
        ).job
        for version in ("4.57.1", "5.17")
    )
    assert (four.precision.parameters, five.precision.parameters) == ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("settled", "shown"),
    [
        ({}, True),
        ({"torch_dtype": "bfloat16"}, False),
        ({"torch_dtype": "auto"}, False),
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}, False),
    ],
)
def test_without_a_dtype_or_a_release_weights_may_be_float32(settled: dict[str, Any], shown: bool) -> None:
    """Twice the memory: transformers 4 loads float32, 5 what the checkpoint has. FSDP's mixed precision widens either."""
    values = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "dataset_name": "wikitext", "output_dir": "o", "bf16": True}
    pasted = Pasted(values={**values, **settled}, program="run_clm.py", num_gpus=8)
    others = [other for other in translated(pasted).others if "transformers 4" in other.name]
    assert [other.job.precision.parameters for other in others] == ["float32"] * shown
    asked = ReadOptions(versions=asked_versions("transformers=5.17"))
    assert not [other for other in translated(pasted, asked).others if "transformers 4" in other.name]


@pytest.mark.parametrize(
    ("said", "before"),
    [
        ({}, "trl before 0.19, which has gradient_checkpointing and bf16 off"),
        ({"fp16": True}, "trl before 0.22, which has gradient_checkpointing off"),
        ({"gradient_checkpointing": True}, "trl before 0.19, which has bf16 off"),
        ({"gradient_checkpointing": True, "bf16": True}, ""),
        ({"gradient_checkpointing": False, "fp16": True}, ""),
    ],
)
def test_what_an_older_trl_has_off_is_another_reading(said: dict[str, Any], before: str) -> None:
    """trl 0.18 and 0.21 have transformers' defaults: without checkpoints, or in float32, several times the memory."""
    values = {"model_name_or_path": "Qwen/Qwen2.5-7B", "max_length": 2048, "output_dir": "o"}
    found = translated(Pasted(values={**values, **said}, program="sft.py"))
    names = [other.name for other in found.others]
    assert len(names) == bool(before)
    assert not before or before in names[0]
    asked = ReadOptions(versions=asked_versions("trl=0.18"))
    assert not translated(Pasted(values={**values, **said}, program="sft.py"), asked).others


def test_keys_of_the_example_scripts_are_known_but_for_a_changed_network() -> None:
    keys = {
        "train_file": "a.txt",
        "validation_split_percentage": 5,
        "preprocessing_num_workers": 4,
        "keep_linebreaks": True,
    }
    found = read("run_clm.py", **keys, config_overrides="n_embd=10")
    assert found.unknown == ("config_overrides",)
    assert set(keys) <= set(found.ignored)


def test_whose_trainer_names_what_tells() -> None:
    assert whose_trainer("", ["packing", "dataset_name"]).rests_on == "TRL's by packing"
    assert not whose_trainer("", ["dataset_name"]).sure
    assert whose_trainer("", ["bf16"]).sure


FSDP = "--model_name_or_path gpt2 --output_dir o --per_device_train_batch_size 1 --fsdp full_shard --fsdp_config fsdp.json"


def test_the_file_that_fsdp_config_names_is_read_or_asked_for() -> None:
    script = f"torchrun --nproc_per_node 2 run_clm.py {FSDP}\n"
    with pytest.raises(SpecError, match=r"fsdp_config='fsdp\.json'.* is another file, and it is not here"):
        translation_of(script)
    inside = '{"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}'
    assert translation_of(f"{script}--- fsdp.json\n{inside}\n").job.parallelism.sharding == "fsdp2"
    with pytest.raises(SpecError, match="is an FSDP configuration of transformers' Trainer"):
        translation_of(inside)
    with pytest.raises(SpecError, match=r"fsdp_config='fsdp.json' is a path"):
        translation_of({"huggingface": {"config": "gpt2", "training_arguments": {"fsdp_config": "fsdp.json"}}})


# -- dialects -----------------------------------------------------------------------------------------------------------


def test_the_sentence_says_on_what_a_recognition_rests() -> None:
    (first, *_) = translation_of({"base_model": "gpt2", "micro_batch_size": 1, "sequence_len": 64}).assumptions
    assert first == "the configuration is read as an Axolotl configuration, by base_model and micro_batch_size."
    values = {"model_name_or_path": "gpt2", "cutoff_len": 64, "finetuning_type": "full"}
    (first, *_) = translated(Pasted(values=values, program="llamafactory-cli train")).assumptions
    assert first.endswith("is read as a LLaMA-Factory configuration, by the program llamafactory-cli.")
    (first, *_) = translation_of(values, ReadOptions(dialect="llamafactory")).assumptions
    assert first.endswith("is read as a LLaMA-Factory configuration, as asked.")


def test_a_recognition_by_shared_keys_is_no_sure_one_and_the_next_is_shown() -> None:
    values = {"model_name_or_path": "gpt2", "lora_rank": 8, "output_dir": "o", "learning_rate": 1e-4}
    assert [(found.name, found.sure) for found in recognised(values)] == [("llamafactory", False), ("training", True)]
    found = translation_of(values)
    assert "by model_name_or_path and lora_rank alone, which other projects have too" in found.assumptions[0]
    assert [reading.name for reading in found.others] == ["Hugging Face training arguments"]
    assert translation_of({**values, "cutoff_len": 64}).others == ()


def test_programs_name_dialects_that_there_are() -> None:
    assert {name for names in PROGRAMS.values() for name in names} <= set(DIALECTS)


def test_open_instruct_is_not_llamafactory() -> None:
    values = {"model_name_or_path": "gpt2", "lora_rank": 8, "use_lora": True, "max_seq_length": 512}
    assert [found.name for found in recognised({**values, "use_qlora": True})] == ["open_instruct"]
    lora = translation_of({**values, "with_tracking": True, "gradient_checkpointing": True})
    assert lora.job.activation_checkpointing.mode == "none"  # finetune.py: `elif args.gradient_checkpointing`
    assert any("gradient_checkpointing has no effect" in sentence for sentence in lora.warnings)
    assert lora.job.framework_options["outputs_dropped"] is False


@pytest.mark.parametrize(
    ("program", "loss", "sharding"),
    [
        ("open_instruct/finetune.py", ("cross_entropy", "none"), "none"),
        ("open_instruct/dpo_tune.py", ("dpo", "model"), "none"),
        ("open_instruct/dpo_tune_cache.py", ("dpo", "precomputed"), "none"),
        ("open_instruct/dpo.py", ("dpo", "precomputed"), "fsdp2"),
    ],
)
def test_the_program_of_open_instruct_says_which_loss(program: str, loss: tuple[str, str], sharding: str) -> None:
    values = {"model_name_or_path": "gpt2", "dataset_mixer_list": "x", "max_seq_length": 512}
    job = translated(Pasted(values=values, program=program, num_gpus=8)).job
    assert ((job.loss.kind, job.reference), job.parallelism.sharding) == (loss, sharding)
    assert job.micro_batch_size == (8 if loss[0] == "cross_entropy" else 16)  # chosen and rejected sequences together


def test_a_program_of_open_instruct_that_is_not_known_is_named() -> None:
    values = {"model_name_or_path": "gpt2", "dataset_mixer_list": "x", "max_seq_length": 512}
    found = translated(Pasted(values=values, program="open_instruct/reward_modeling.py"))
    assert found.unsupported[0].startswith("reward_modeling.py of open-instruct is not known here")


# -- answers ------------------------------------------------------------------------------------------------------------

EITHER = {"model_name_or_path": "llama-3.1-8b", "output_dir": "o", "per_device_train_batch_size": 8, "max_seq_length": 4096,
          "dataset_name": "x", "bf16": True, "torch_dtype": "bfloat16"}  # fmt: skip


def test_an_answer_shows_both_readings_and_is_uncertain_where_they_differ() -> None:
    found = api.predict(EITHER, "H200")
    trl = api.predict(api.read(EITHER, dialect="trl").job, "H200")
    own = api.predict(api.read(EITHER, dialect="transformers"), "H200")
    assert (own.fits, trl.fits) == ("no", "yes")
    assert found.fits == "uncertain"
    assert found.peak_allocated_bytes == own.peak_allocated_bytes
    (sentence,) = [warning for warning in found.warnings if "may also be a run of TRL's trainers" in warning]
    assert f"{trl.peak_allocated_bytes.point / 2**30:,.2f} GiB would be allocated" in sentence
    assert "that fits" in sentence


def test_readings_that_agree_on_the_verdict_keep_it() -> None:
    small = {**EITHER, "model_name_or_path": "gpt2", "max_seq_length": 512, "per_device_train_batch_size": 1}
    found = api.predict(small, catalog.gpu(GPU))
    assert found.fits == "yes"
    assert any("may also be a run of TRL's trainers" in warning for warning in found.warnings)


def test_a_reading_that_needs_as_much_is_not_shown() -> None:
    prediction = api.predict(PLAIN | {"max_seq_length": 512}, GPU)
    same = AlternativeReading("another run", api.read(PLAIN | {"max_seq_length": 512}), "Say which.")
    assert with_others(prediction, (same,), lambda _: prediction) == prediction
    point = prediction.peak_allocated_bytes.point + 1_000
    hardly_more = replace(prediction, peak_allocated_bytes=replace(prediction.peak_allocated_bytes, point=point))
    assert with_others(prediction, (same,), lambda _: hardly_more) == prediction  # the same number of GiB


def test_a_batch_shows_them_too() -> None:
    (answer,) = predict_batch([{"id": 1, "gpu": "H200", "job": EITHER}])
    assert answer["fits"] == "uncertain"
    assert any("TRL's trainers" in warning for warning in answer["warnings"])


def test_flags_and_versions_change_every_reading() -> None:
    from peakcast.doors.job_flags import job_from_flags

    found = translation_of(EITHER, ReadOptions(versions=asked_versions("torch=2.9")))
    assert {reading.job.versions["torch"] for reading in found.others} == {"2.9"}
    text = "\n".join(f"{key}: {value}" for key, value in EITHER.items()) + "\n"
    changed = job_from_flags(text, {"micro_batch_size": 3}, [])
    assert isinstance(changed, Translation)
    assert {changed.job.micro_batch_size, *(reading.job.micro_batch_size for reading in changed.others)} == {3}


def test_a_program_most_of_whose_keys_nobody_knows_is_another_ones() -> None:
    """A few of the Trainer's keys by chance say too little for an answer; --dialect says that it is one."""
    own = {f"key_of_its_own_{number}": number for number in range(8)}
    with pytest.raises(SpecError, match="is not recognised"):
        read("learn.py", **own)
    values = {"model_name_or_path": "qwen2.5-7b", "per_device_train_batch_size": 1, **own}
    pasted = Pasted(values=values, program="learn.py")
    assert len(translated(pasted, ReadOptions(dialect="training", num_gpus=1)).unknown) == 8
    assert read("learn.py", key_of_its_own_1=1, bf16=True).unknown == ("key_of_its_own_1",)


def test_the_balancing_loss_that_trl_is_asked_for_is_said() -> None:
    """trl 1.16 trainer/sft_trainer.py: `router_aux_loss_coef` switches `output_router_logits` on."""
    asked = {**PLAIN, "model_name_or_path": "Qwen/Qwen3-30B-A3B", "router_aux_loss_coef": "0.001"}
    found = [each.direction for each in translated(Pasted(values=asked, program="sft.py")).findings
             if each.parameter == "router_aux_loss_coef"]  # fmt: skip
    assert found == ["more"]
    assert not any("balancing" in said for said in read("sft.py", router_aux_loss_coef=0.0).unsupported)
