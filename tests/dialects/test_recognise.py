"""One door: what a configuration is, what must come beside it, and what happens when it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from peakcast import api
from peakcast.core.errors import CatalogError, PeakcastError, SpecError
from peakcast.dialects.megatron_arguments import from_arguments
from peakcast.dialects.opening import opened
from peakcast.dialects.recognise import dialect_of
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.batching import predict_batch
from peakcast.doors.questions import translation_of

RECORDED = Path(__file__).parent / "recorded"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000,
    "torch_dtype": "float32",
}  # fmt: skip
ARGUMENTS = {
    "output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True,
    "learning_rate": 1e-4, "max_length": 512,
}  # fmt: skip
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "gpt2"}
ENGINE = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}


@pytest.fixture
def files(tmp_path):
    for name, values in {"config": CONFIG, "args": ARGUMENTS, "adapter_config": ADAPTER, "ds_config": ENGINE}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    return tmp_path


def beside(folder: Path, *names: str, **more: object) -> ReadOptions:
    return ReadOptions(files=tuple(folder / f"{name}.json" for name in names), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["config", "args", "adapter_config", "ds_config"])
def test_the_files_of_a_run_make_one_job_whichever_comes_first(files, first):
    names = ["config", "args", "adapter_config", "ds_config"]
    others = [name for name in names if name != first]
    job = translation_of(files / f"{first}.json", beside(files, *others, num_gpus=4)).job
    assert (job.architecture.hidden_size, job.micro_batch_size, job.gradient_accumulation_steps) == (256, 2, 4)
    assert (job.finetuning.method, job.finetuning.rank, job.framework) == ("lora", 4, "deepspeed")
    assert (job.parallelism.zero_stage, job.parallelism.data_parallel_size) == (2, 4)
    assert job.precision.main_parameters == "float32"


def test_bf16_over_float32_weights_is_autocast(files):
    job = translation_of(files / "args.json", beside(files, "config")).job
    assert (job.precision.parameters, job.precision.compute) == ("float32", "bfloat16")


def test_the_base_of_an_adapter_is_its_model(files):
    assert translation_of(files / "adapter_config.json").job.architecture.name == "gpt2"
    changed = translation_of(files / "adapter_config.json", ReadOptions(model="gpt2-xl"))
    assert changed.job.architecture.name == "gpt2-xl"


def test_a_config_alone_trains_with_every_default_said(files):
    translation = translation_of(files / "config.json", ReadOptions(num_gpus=1))
    assert translation.job.architecture.hidden_size == 256
    said = " ".join(translation.assumptions)
    for words in (
        "config.json is read as a Hugging Face config.json",
        "per_device_train_batch_size is not given",
        "optim is not",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("first", "others", "more", "says"),
    [
        ("ds_config", [], {}, "which does not say what is trained: the training arguments and the model are missing"),
        (
            "ds_config",
            ["args"],
            {},
            "the model is missing; add the model's config.json by --with FILE, or its name by --model",
        ),
        ("args", ["args", "config"], {}, "is given twice"),
        ("args", ["ds_config", "ds_config"], {}, "another was given already"),
        ("args", ["nowhere"], {}, "cannot be read"),
        ("args", ["config"], {"dialect": "axolotol"}, "did you mean 'axolotl'"),
        ("args", ["config"], {"dialect": "axolotl"}, "micro_batch_size is required and missing"),
    ],
)
def test_what_is_missing_or_too_much_is_said(files, first, others, more, says):
    with pytest.raises(SpecError) as caught:
        translation_of(files / f"{first}.json", beside(files, *others, **more))
    assert says in caught.value.message


def test_a_value_that_contradicts_deepspeed_is_refused_as_transformers_does(files):
    (files / "ds_config.json").write_text(json.dumps({**ENGINE, "train_micro_batch_size_per_gpu": 8}))
    with pytest.raises(SpecError, match=r"train_micro_batch_size_per_gpu=8 contradicts per_device_train_batch_size=2"):
        translation_of(files / "args.json", beside(files, "config", "ds_config"))
    (files / "ds_config.json").write_text(json.dumps({**ENGINE, "train_batch_size": 64}))
    with pytest.raises(SpecError, match=r"4 GPUs × 2 per GPU × 4 accumulation steps = 32"):
        translation_of(files / "args.json", beside(files, "config", "ds_config", num_gpus=4))
    assert translation_of(files / "args.json", beside(files, "config", "ds_config", num_gpus=8)).job.micro_batch_size == 2


def test_deepspeeds_own_optimizer_holds(files):
    (files / "ds_config.json").write_text(json.dumps({**ENGINE, "optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}))
    optimizer = translation_of(files / "args.json", beside(files, "config", "ds_config")).job.optimizer
    assert (optimizer.name, optimizer.momentum, optimizer.implementation) == ("sgd", 0.9, "fused")
    (files / "ds_config.json").write_text(json.dumps({**ENGINE, "optimizer": {"type": "OneBitAdam"}}))
    unsupported = translation_of(files / "args.json", beside(files, "config", "ds_config")).unsupported
    assert any("OneBitAdam" in sentence for sentence in unsupported)


def test_a_file_that_a_configuration_names_is_looked_for_beside_it_or_asked_for(tmp_path):
    config = tmp_path / "full.yaml"
    shutil.copy(RECORDED / "axolotl" / "llama3_8b_full.yaml", config)
    with pytest.raises(SpecError, match=r"deepspeed='deepspeed_configs/zero3_bf16.json' in full.yaml .* give it by --with"):
        translation_of(config)
    given = ReadOptions(files=(RECORDED / "axolotl" / "zero3_bf16.json",), num_gpus=8)
    assert translation_of(config, given).job.parallelism.zero_stage == 3
    (tmp_path / "deepspeed_configs").mkdir()
    shutil.copy(RECORDED / "axolotl" / "zero3_bf16.json", tmp_path / "deepspeed_configs")
    assert translation_of(config, ReadOptions(num_gpus=8)).job.parallelism.zero_stage == 3


def test_a_text_opens_no_files(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text('{"zero_optimization": {"stage": 3}}')
    text = (
        (RECORDED / "llamafactory" / "llama3_full_sft.yaml")
        .read_text()
        .replace("examples/deepspeed/ds_z3_config.json", str(secret))
    )
    with pytest.raises(SpecError, match="is another file, and it is not here"):
        translation_of(text)


def test_a_launch_command_and_the_file_that_it_names(tmp_path):
    shutil.copy(RECORDED / "llamafactory" / "llama3_lora_sft.yaml", tmp_path / "sft.yaml")
    script = tmp_path / "run.sh"
    script.write_text(
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\nllamafactory-cli train sft.yaml cutoff_len=4096\n"
    )
    job = translation_of(script).job
    assert (job.sequence_length, job.allocator.expandable_segments) == (4096, True)
    shutil.copy(RECORDED / "torchtitan" / "llama3_8b.toml", tmp_path / "titan.toml")
    script.write_text(
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file titan.toml --training.seq_len 4096\n"
    )
    job = translation_of(script).job
    assert (job.sequence_length, job.parallelism.data_parallel_size) == (4096, 8)


def test_arguments_alone_are_a_configuration_too():
    words = (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 2 --vocab-size 1000"
    )
    env = {
        "WORLD_SIZE": "8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "HOME": "/",
    }
    job = from_arguments(words.split(), env).job
    assert job.allocator.expandable_segments
    assert (job.parallelism.data_parallel_size, job.framework_options["cuda_device_max_connections"]) == (8, "1")
    assert from_arguments(words.split(), {}, 2).job.parallelism.data_parallel_size == 2
    with pytest.raises(SpecError, match="'stray' belongs to no flag"):
        from_arguments(["stray", *words.split()], {})
    text = words.replace(" --num-attention", " \\\n --num-attention")
    assert translation_of(text).job == from_arguments(words.split(), {}, 1).job


def test_a_variable_that_is_not_set_is_named():
    text = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $LAYERS --hidden-size 64 --seq-length 64"
    with pytest.raises(SpecError, match="num-layers has no value in the text: its variable is not set"):
        translation_of(text + "\n")


def test_megatrons_file_of_settings_goes_with_flags(tmp_path):
    shutil.copy(RECORDED / "megatron" / "gpt_config.yaml", tmp_path / "gpt.yaml")
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 4 pretrain_gpt.py --yaml-cfg gpt.yaml --micro-batch-size 4\n"
    )
    job = translation_of(tmp_path / "run.sh").job
    assert (job.micro_batch_size, job.architecture.num_hidden_layers, job.parallelism.data_parallel_size) == (4, 24, 4)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("torchtitan", {"model": {"name": "llama3", "flavor": "debugmodel"}, "training": {}}, "dryrun -- torchrun"),
        (
            "torchtitan",
            {"model": {"flavor": "8B"}, "training": {"global_batch_size": 7}},
            "must be a multiple of 8 per rank",
        ),
        ("axolotl", {"base_model": "gpt2", "micro_batch_size": 1, "load_in_4bit": True}, "without an adapter cannot train"),
        ("axolotl", {"base_model": "gpt2", "micro_batch_size": 1, "rl": "gdpo"}, "GDPO holds more than one training step"),
        ("llamafactory", {"model_name_or_path": "gpt2", "stage": "rm"}, "TRL's reward modelling is"),
        ("llamafactory", {"model_name_or_path": "gpt2", "stage": "ppo"}, "PPO holds more than one training step"),
        ("llamafactory", {"model_name_or_path": "gpt2", "stage": "sft", "finetuning_type": "freeze"}, "full needs more"),
        ("torchtune", {"model": {"_component_": "torchtune.models.t5.t5_v1_1"}}, "has no known shape here"),
        ("litgpt", {"checkpoint_dir": "x/gpt2", "precision": "int4", "train": {}}, "must be one of bf16-true"),
        (
            "litgpt",
            {"model_name": "gpt2", "precision": "32-true", "train": {"global_batch_size": 1}, "devices": 8},
            "must be at",
        ),
        (
            "nanotron",
            {"model": {"model_config": {"x": 1}}, "parallelism": {"dp": 1, "tp": 1, "pp": 1}},
            "of a known family",
        ),
        ("accelerate", {"distributed_type": "MEGATRON_LM"}, "is not modelled"),
        ("deepspeed", {"zero_optimization": {"stage": 7}}, "must be 0, 1, 2 or 3"),
        ("megatron", {"num-layers": 2, "hidden-size": 64, "seq-length": 8, "model": 1}, "num-attention-heads is required"),
    ],
)
def test_each_dialect_refuses_with_the_key_and_the_rule(name, values, says):
    model = "gpt2" if name in ("accelerate", "deepspeed") else None
    with pytest.raises(PeakcastError) as caught:
        translation_of(values, ReadOptions(model=model))
    assert says in caught.value.message
    assert dialect_of(values) == name


def test_a_model_and_a_folder_alone_are_no_training_arguments():
    """Scripts that convert or start a model have both, and train nothing."""
    with pytest.raises(SpecError, match=r"is not recognised .*peakcast dryrun -- expand\.py"):
        translation_of("python scripts/expand.py --model_name_or_path gpt2 --output_dir out\n")
    assert dialect_of({"model_name_or_path": "gpt2", "dataset_name": "x", "output_dir": "out"}) == "training"


def test_a_file_is_searched_in_the_folders_above_as_its_project_runs_there(tmp_path):
    config, engine = tmp_path / "examples" / "full" / "sft.yaml", tmp_path / "examples" / "deepspeed" / "z3.json"
    for path in (config, engine):
        path.parent.mkdir(parents=True)
    config.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\nfinetuning_type: full\nper_device_train_batch_size: 1\n"
        "deepspeed: examples/deepspeed/z3.json\n"
    )
    engine.write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    assert translation_of(config, ReadOptions(num_gpus=2)).job.parallelism.zero_stage == 3


def test_an_unknown_mapping_lists_what_is_known():
    with pytest.raises(
        SpecError, match=r"is not recognised \(its keys: foo\).*--dialect"
    ):
        translation_of({"foo": 1})
    with pytest.raises(SpecError, match="architecture is required and missing"):
        translation_of({"micro_batch_size": 1, "sequence_length": 2})
    with pytest.raises(SpecError, match="is a Python program, which is not run here"):
        translation_of(Path(__file__))
    with pytest.raises(CatalogError):
        translation_of("no-such-model")
    assert opened("model_type: llama\n").values == {"model_type": "llama"}


def test_a_batch_takes_a_foreign_mapping_as_its_job():
    entry = {
        "id": 1,
        "gpu": "H100-80GB",
        "job": {"base_model": "gpt2", "micro_batch_size": 1, "sequence_len": 512, "bf16": True},
    }
    (answer,) = predict_batch([entry])
    assert answer["id"] == 1
    said = "the configuration is read as an Axolotl configuration, by base_model and micro_batch_size."
    assert said in answer["assumptions"]
    (refusal,) = predict_batch([{**entry, "job": {"base_model": "gpt2", "micro_batch_size": 0}}])
    assert refusal["error"]["parameter"] == "micro_batch_size"


def test_the_python_door_reads_and_predicts(files):
    read = api.read(files / "ds_config.json", [files / "args.json"], num_gpus=2, model="gpt2")
    assert read.job.parallelism.zero_stage == 2
    assert api.predict(read, "H100-80GB").peak_allocated_bytes.point > 0


def test_the_stages_of_torchtitan_count_the_embedding_and_the_head_as_layers():
    values = {
        "model": {"flavor": "8B"},
        "training": {"local_batch_size": 8, "seq_len": 64},
        "parallelism": {"pipeline_parallel_degree": 4},
    }
    job = translation_of(values, ReadOptions(num_gpus=8)).job
    assert job.parallelism.pipeline_layers == (8, 9, 8, 7)  # 34 units on 4 stages: 9 9 8 8, less the embedding and the head
    assert (job.micro_batch_size, job.gradient_accumulation_steps, job.parallelism.data_parallel_size) == (1, 8, 2)


def test_a_config_beside_another_projects_file_is_its_model(files):
    values = {"base_model": "someone/private", "micro_batch_size": 1, "sequence_len": 64, "bf16": True}
    (files / "axolotl.yml").write_text(json.dumps(values))
    translation = translation_of(files / "axolotl.yml", beside(files, "config", num_gpus=1))
    assert translation.job.architecture.hidden_size == 256
    assert not any("does not use it" in warning for warning in translation.warnings)


def test_a_file_that_is_not_needed_is_said(files):
    values = {"base_model": "gpt2", "micro_batch_size": 1, "sequence_len": 64}
    (files / "axolotl.yml").write_text(json.dumps(values))
    warnings = translation_of(files / "axolotl.yml", beside(files, "ds_config", num_gpus=1)).warnings
    assert any("ds_config.json is given with axolotl.yml, which does not use it" in warning for warning in warnings)


def test_a_job_file_says_its_layout_itself(tmp_path):
    (tmp_path / "job.yaml").write_text("architecture: gpt2\nparallelism: {data_parallel_size: 2}\n")
    assert translation_of(tmp_path / "job.yaml", ReadOptions(num_gpus=2)).job.parallelism.world_size == 2
    with pytest.raises(SpecError, match=r"num_gpus=4 is not the 2 ranks of job\.yaml"):
        translation_of(tmp_path / "job.yaml", ReadOptions(num_gpus=4))
    form = {"huggingface": {"config": "gpt2"}}
    assert translation_of(form, ReadOptions(num_gpus=4)).job.parallelism.world_size == 4


def test_one_line_can_be_a_text():
    line = "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"
    job = translation_of(f"{line} --seq-length 64 --micro-batch-size 1 --vocab-size 100").job
    assert job.parallelism.data_parallel_size == 2
    assert translation_of('{"base_model": "gpt2", "micro_batch_size": 1}').job.architecture.name == "gpt2"


def test_the_least_number_of_gpus_for_a_layout_is_taken_where_none_is_given():
    words = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --vocab-size 100"
    layout = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-experts 8 --expert-model-parallel-size 4"
    )
    translation = from_arguments(f"{words} {layout}".split(), {})
    assert translation.job.parallelism.world_size == 2 * 8  # 2 stages × (4 experts' ranks × tensor-parallel size 2)
    assert any("16 is assumed, the least for this layout" in sentence for sentence in translation.assumptions)
