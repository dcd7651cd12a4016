"""Python programs, notebooks and functions that make configurations are read from their text; nothing in them is run."""

from __future__ import annotations

import json
import sys

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.common.asked_versions import asked_versions
from peakcast.dialects.opening import opened
from peakcast.dialects.python.calls import NotGiven, calls_of
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of
from peakcast.jobs.conventions import conventions

TRAINING = """
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments
from peft import LoraConfig
from trl import SFTTrainer

rank = 8 * 2
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", quantization_config=bits, device_map={"": 0})
adapters = LoraConfig(r=rank, lora_alpha=rank * 2, target_modules=["q_proj", "v_proj"], task_type=TaskType.CAUSAL_LM)
arguments = TrainingArguments(output_dir="out", per_device_train_batch_size=4, optim="paged_adamw_32bit", bf16=True)
trainer = SFTTrainer(model=model, args=arguments, peft_config=adapters, max_seq_length=512, packing=False)
trainer.train()
if False:
    model = AutoModelForCausalLM.from_pretrained("out/merged")
"""


def test_a_training_program_is_a_job():
    job = translation_of(TRAINING).job
    assert (job.architecture.name, job.micro_batch_size, job.sequence_length) == ("llama-3.2-1b", 4, 512)
    tuning = job.finetuning
    assert (tuning.method, tuning.rank, tuning.alpha, tuning.targets) == ("qlora", 16, 32.0, ("q_proj", "v_proj"))
    assert job.optimizer.name == "paged_adamw_32bit"


def test_a_notebook_is_read_as_its_cells_without_the_lines_of_its_shell(tmp_path):
    first, *rest = TRAINING.split("\n\n")
    cells = [
        {"cell_type": "markdown", "source": "# Title"},
        {"cell_type": "code", "source": ["!pip install -q trl==0.22.2\n", "%matplotlib inline\n", first]},
        *({"cell_type": "code", "source": part} for part in rest),
    ]
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4, "metadata": {}}))
    job = translation_of(path).job
    assert (job.finetuning.rank, job.versions["trl"]) == (16, "0.22.2")


def test_what_only_running_gives_is_said():
    text = TRAINING.replace("max_seq_length=512", "max_seq_length=longest(dataset)")
    read = translation_of(text)
    assert any("trainer.max_seq_length is longest(dataset), which only running" in warning for warning in read.warnings)
    with pytest.raises(SpecError, match=r"the model's name is sys.argv.*; name it by --model"):
        translation_of(TRAINING.replace('"meta-llama/Llama-3.2-1B"', "sys.argv[1]"))


def test_calls_on_the_loaded_network_count():
    prepared = TRAINING.replace("adapters = ", "model = prepare_model_for_kbit_training(model)\nadapters = ")
    read = translation_of(prepared)
    assert read.job.activation_checkpointing.mode == "full"
    assert read.job.framework_options["ends_in_float32"]
    assert read.job.framework_options["norms_in_float32"]
    alone = translation_of(prepared.replace("bf16=True", "bf16=False")).job  # no autocast: attention is in float32 too
    assert (alone.precision.parameters, alone.precision.compute) == ("float32", "float32")
    assert alone.framework_options["quantized_compute_dtype"] == "bfloat16"
    plain = translation_of(prepared.replace("load_in_4bit=True", "load_in_4bit=False"))
    assert [finding.direction for finding in plain.findings if "kbit_training" in finding.parameter] == ["more"]


def test_texts_are_as_long_as_the_tokenizer_leaves_them():
    program = (
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "rows = rows.map(lambda row: tokenizer(row['text'], truncation=True, max_length=768))\n"
        "Trainer(model, args=TrainingArguments(per_device_train_batch_size=2)).train()\n"
    )
    assert translation_of(program).job.sequence_length == 768
    unsaid = translation_of(program.replace("truncation=True, max_length=768", ""))
    assert any("Give yours: --sequence-length" in sentence for sentence in unsaid.warnings)


def test_accelerates_file_beside_a_program_is_used(tmp_path):
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: bf16\n")
    read = translation_of(TRAINING, ReadOptions(files=(tmp_path / "acc.yaml",)))
    assert read.job.parallelism.data_parallel_size == 4
    assert not any("does not use it" in sentence for sentence in read.warnings)


def test_a_loader_of_transformers_4_loads_float32():
    """And float16 for what bitsandbytes quantises (transformers 4.57 quantizers, `update_dtype`)."""
    whole = "\n".join(line for line in TRAINING.splitlines() if "Bits" not in line or "import" in line)
    whole = whole.replace("quantization_config=bits, ", "")
    old = "# pip install transformers==4.56.2\n"
    assert translation_of(old + whole).job.precision.parameters == "float32"
    assert translation_of(whole).job.precision.parameters == "bfloat16"
    assert translation_of(old + TRAINING).job.precision.parameters == "float16"
    asked = ReadOptions(versions=asked_versions("transformers=4.57.1"))
    assert translation_of(whole, asked).job.precision.parameters == "float32"


TRANSLATION = """
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments
model = AutoModelForSeq2SeqLM.from_pretrained("google/flan-t5-base")
def prepared(row):
    inputs = tokenizer(row["text"], max_length=1024, truncation=True)
    inputs["labels"] = tokenizer(SUMMARY, max_length=TARGET, truncation=True)["input_ids"]
    return inputs
arguments = Seq2SeqTrainingArguments("out", per_device_train_batch_size=8, bf16=True)
Seq2SeqTrainer(model=model, args=arguments, train_dataset=rows.map(prepared)).train()
"""


@pytest.mark.parametrize(
    ("summary", "length", "lengths"),
    [
        ('text_target=row["summary"]', "128", (1024, 128)),
        ('row["summary"]', "96", (1024, 96)),
        ('text_target=row["summary"]', "1024", (1024, 1024)),
        ('row["summary"]', "1024", (1024, None)),
    ],
)
def test_the_target_of_an_encoder_decoder_has_a_length_of_its_own(summary, length, lengths):
    """Counted as long as the inputs, flan-t5-large needed 109 GiB for 59."""
    read = translation_of(TRANSLATION.replace("SUMMARY", summary).replace("TARGET", length))
    assert (read.job.sequence_length, read.job.decoder_sequence_length) == lengths
    assert any("nothing says how long targets are" in each for each in read.assumptions) == (lengths[1] is None)


def test_an_evaluation_of_a_classifier_needs_less_than_its_training():
    program = TRANSLATION.replace("Seq2SeqLM", "SequenceClassification").replace("google/flan-t5-base", "bert-base-uncased")
    program = program.replace("bf16=True", 'eval_strategy="epoch", per_device_eval_batch_size=SIZE')
    said = [
        any("Evaluation" in finding.sentence for finding in translation_of(program.replace("SIZE", size)).findings)
        for size in ("48", "512")
    ]
    assert said == [False, True]  # six times as many sequences, one of twelve layers at a time


@pytest.mark.parametrize(("stage", "first", "as_made"), [(3, True, False), (3, False, True), (2, True, True)])
def test_a_network_that_is_loaded_before_its_training_arguments_is_partitioned_later(tmp_path, stage, first, as_made):
    """transformers learns of ZeRO-3 from the training arguments (gpjt/fine-tune-2024-04 loads before it makes them)."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}))
    lines = [
        "model = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-3.2-1B')",
        "args = TrainingArguments('out', bf16=True, deepspeed='ds.json')",
    ]
    program = "\n".join([*(lines if first else reversed(lines)), "Trainer(model, args).train()"])
    (tmp_path / "train.py").write_text(f"from transformers import *\n{program}\n")
    asked = ReadOptions(num_gpus=4, versions=asked_versions({"deepspeed": "0.18.4"}))
    read = translation_of(tmp_path / "train.py", asked)
    assert read.job.parallelism.zero_stage == stage
    assert conventions(read.job)["partitions_as_made"] is as_made
    warned = " ".join(read.warnings)
    assert ("make the arguments first" in warned) is not as_made
    newest = translation_of(tmp_path / "train.py", ReadOptions(num_gpus=4))
    assert "make the arguments first" not in " ".join(newest.warnings)  # 0.19.4 replaces torch's Linear in any network


def test_values_are_followed_through_names_and_defaults():
    (call,) = (
        call
        for call in calls_of(
            "n = 3\nparser.add_argument('--length', default=64)\nargs = parser.parse_args()\n"
            "f(a=n * 2 + 1, b=args.length, c=torch.bfloat16, d=not is_bfloat16_supported(), e=os.environ.get('E', '5'), "
            "g=h(1),"
            " k={'x': [n]}, **dict(m=n))",
            "a program",
        )
        if call.name == "f"
    )
    assert call.keywords == {
        "a": 7, "b": 64, "c": "bfloat16", "d": False, "e": "5", "g": NotGiven("h(1)"), "k": {"x": [3]}, "m": 3,
    }  # fmt: skip


@pytest.mark.parametrize("config", ["OnlineDPOConfig", "GKDConfig", "GOLDConfig", "PPOConfig"])
def test_trainings_that_hold_more_than_a_step_are_refused(config):
    text = f"from trl import {config}\nargs = {config}(output_dir='o', learning_rate=1e-4)\nmodel = 1\n"
    with pytest.raises(SpecError, match="is not modelled"):
        translation_of(text + "model = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-3.2-1B')\n")


def test_a_program_without_training_arguments_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text("import torch\nfor batch in loader:\n    step(batch)\n")
    with pytest.raises(SpecError, match=r"peakcast dryrun -- python loop.py"):
        translation_of(path)
    path.write_text("import torch\nfor batch in:\n")
    with pytest.raises(SpecError, match=r"loop.py is not valid Python"):
        translation_of(path)


REGISTRY = """
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.trainer import Trainer
from . import model_registry

def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))),
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        activation_checkpoint=SelectiveAC.Config(),
    )

def llama3_8b_full() -> Trainer.Config:
    config = llama3_8b()
    config.activation_checkpoint = FullAC.Config()
    config.model_spec = model_registry("8B", attn_backend="varlen")
    config.training.local_batch_size = 4
    change(config)
    return config
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "torchtitan" / "models" / "llama3"
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text(REGISTRY)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config {} "
        "--parallelism.tensor_parallel_degree 2\n",
        "NGPU=8 MODULE=llama3 CONFIG={} ./run_train.sh --parallelism.tensor_parallel_degree 2\n",
    ],
)
def test_a_torchtitan_command_is_read_from_the_registry_around_it(checkout, command):
    (checkout / "run.sh").write_text(command.format("llama3_8b"))
    job = translation_of(checkout / "run.sh").job
    assert (job.architecture.name, job.micro_batch_size, job.sequence_length) == ("llama-3.1-8b", 1, 8192)
    assert (job.attention, job.activation_checkpointing.mode) == ("flex", "selective")
    assert (job.parallelism.tensor_parallel_size, job.parallelism.data_parallel_size) == (2, 4)


def test_functions_that_change_another_configuration_are_followed(checkout):
    (checkout / "run.sh").write_text(
        "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b_full\n"
    )
    read = translation_of(checkout / "run.sh")
    assert (read.job.micro_batch_size, read.job.attention) == (4, "flash_attention_2")
    assert read.job.activation_checkpointing.mode == "full"
    assert read.job.framework_options["loss_chunks"] == 8
    assert any("'change(config)'" in sentence and "is not followed" in sentence for sentence in read.assumptions)


def test_a_registry_alone_must_have_one_configuration(tmp_path):
    path = tmp_path / "config_registry.py"
    path.write_text(REGISTRY)
    with pytest.raises(SpecError, match=r"has 2 configurations of torchtitan \(llama3_8b, llama3_8b_full\)"):
        translation_of(path)
    path.write_text(REGISTRY.partition("def llama3_8b_full")[0])
    assert opened(path).values["training"] == {"local_batch_size": 1, "seq_len": 8192, "steps": 1000}


RECIPES = """
def small_pretrain_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Llama-3.2-1B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 4096
    cfg.train.micro_batch_size = 4
    return cfg
"""
COMMON = """
def _pretrain_common() -> ConfigContainer:
    cfg = ConfigContainer(
        model=None,
        train=TrainingConfig(global_batch_size=32, micro_batch_size=2),
        ddp=DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True,
        grad_reduce_in_fp32=True),
        mixed_precision="bf16_mixed",
    )
    return cfg
"""


def test_a_recipe_of_megatron_bridge_is_read_from_the_package(tmp_path, monkeypatch):
    folder = tmp_path / "megatron" / "bridge" / "recipes"
    (folder / "llama").mkdir(parents=True)
    (folder / "common.py").write_text(COMMON)
    (folder / "llama" / "small.py").write_text(RECIPES)
    monkeypatch.syspath_prepend(tmp_path)
    text = "torchrun --nproc_per_node=8 run_recipe.py --recipe small_pretrain_config train.micro_batch_size=1\n"
    read = translation_of(text)
    job = read.job
    assert (job.architecture.name, job.micro_batch_size, job.sequence_length) == ("llama-3.2-1b", 1, 4096)
    assert (job.parallelism.tensor_parallel_size, job.parallelism.data_parallel_size) == (2, 4)
    assert (job.gradient_accumulation_steps, job.parallelism.zero_stage) == (8, 1)
    assert (read.unknown, read.warnings) == ((), ())
    (warning,) = translation_of(text.replace("train.micro", "dataset.sequence_length=2048 train.micro")).warnings
    assert warning.startswith("dataset.sequence_length=2048 differs from model.seq_length=4096")
    assert "megatron.bridge" not in sys.modules


@pytest.mark.parametrize("trainer", ["DPO", "KTO"])
@pytest.mark.parametrize(
    ("given", "reference"),
    [("model, ref", "model"), ("model, ref_model=ref", "model"), ("model, None", "adapter_off"), ("model", "adapter_off"),
     ("model, ref_model=None if adapters else ref", "adapter_off")],
)  # fmt: skip
def test_a_reference_that_the_trainer_gets_is_a_network_of_its_own_beside_adapters(trainer, given, reference):
    """trl 1.16 trainer/dpo_trainer.py and kto_trainer.py: `self.ref_model = ref_model`."""
    text = TRAINING.replace("from trl import SFTTrainer", f"from trl import {trainer}Config, {trainer}Trainer")
    text = text.replace("arguments = TrainingArguments(", f"ref = load('a')\narguments = {trainer}Config(max_length=512, ")
    text = text.replace("SFTTrainer(model=model, ", f"{trainer}Trainer({given}, ")
    found = translation_of(text.replace(", max_seq_length=512, packing=False", ""))
    assert found.job.reference == reference
    assert any("ref_model=load" in said for said in found.assumptions) == (reference == "model")


_EVALUATED = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
args = TrainingArguments(per_device_train_batch_size=4, per_device_eval_batch_size=2, eval_strategy="steps", MORE)
trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=held_out, TRAINER)
trainer.train()
"""


@pytest.mark.parametrize(
    ("more", "trainer", "says"),
    [
        ("", "compute_metrics=accuracy", "until the evaluation has ended"),
        ("eval_accumulation_steps=4", "compute_metrics=accuracy", "until 4 batches of them are moved"),
        ("", "compute_metrics=accuracy, preprocess_logits_for_metrics=largest", ""),
        ("", "", ""),
    ],
)
def test_metrics_of_whole_logits_keep_those_of_all_batches(more, trainer, says):
    text = _EVALUATED.replace("MORE", more).replace("TRAINER", trainer)
    found = [one.sentence for one in translation_of(text).findings if one.parameter == "eval_accumulation_steps"]
    assert bool(found) is bool(says)
    assert all(says in sentence for sentence in found)


@pytest.mark.parametrize("name", ["GKD", "GOLD", "OnlineDPO", "NashMD", "PPO", "SDFT"])
def test_a_trainer_that_is_refused_says_what_it_holds(name):
    """Not that its model is missing, which it names."""
    text = f"""
from trl import {name}Config, {name}Trainer

args = {name}Config(per_device_train_batch_size=4)
trainer = {name}Trainer(model="Qwen/Qwen2.5-0.5B", args=args, train_dataset=train)
trainer.train()
"""
    with pytest.raises(SpecError, match="holds more than one training step's tensors"):
        translation_of(text)
