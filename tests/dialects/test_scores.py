"""Networks that make no logits of the vocabulary: classifiers, rerankers, embeddings."""

import pytest

from peakcast.doors.questions import translation_of
from peakcast.networks.trained_parts import trained_network

PROGRAM = """
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
model = {loader}.from_pretrained("{name}", num_labels=5)
trainer = Trainer(model=model, args=TrainingArguments("out", per_device_train_batch_size=8, bf16=True))
"""
SWIFT = "swift sft --model Qwen/Qwen3-8B --per_device_train_batch_size 4 --max_length 512 --torch_dtype bfloat16"


def head(question):
    """(the head that the job is counted with, the directions of what is said of it)."""
    found = translation_of(question)
    return trained_network(found.job).head, [one.direction for one in found.findings if one.parameter == "loss.kind"]


@pytest.mark.parametrize(
    ("loader", "name", "expected"),
    [
        ("AutoModelForCausalLM", "meta-llama/Llama-3.2-1B", ("language_model", [])),
        ("AutoModelForSequenceClassification", "meta-llama/Llama-3.2-1B", ("sequence_classifier", [])),
        ("LlamaForTokenClassification", "meta-llama/Llama-3.2-1B", ("token_classifier", [])),
        ("AutoModelForSequenceClassification", "gpt2", ("sequence_classifier", [])),
        ("AutoModel", "gpt2", ("sequence_classifier", ["more"])),  # its dropout runs, a reward model's does not
        ("AutoModelForSequenceClassification", "google-bert/bert-base-cased", ("sequence_classifier", [])),
    ],
)
def test_the_class_that_a_program_loads(loader, name, expected):
    assert head(PROGRAM.format(loader=loader, name=name)) == expected


def test_example_scripts_and_their_lengths():
    scripts = {"run_glue.py": (128, "sequence"), "run_qa_no_trainer.py": (384, "token"), "run_clm.py": (1024, "")}
    for script, (length, classes) in scripts.items():
        flags = "--model_name_or_path meta-llama/Llama-3.2-1B --do_train --per_device_train_batch_size 2 --output_dir o"
        command = f"python {script} {flags}\n"
        assert head(command)[0] == (f"{classes}_classifier" if classes else "language_model")
        assert translation_of(command).job.sequence_length == length


@pytest.mark.parametrize(
    ("script", "flags", "lengths"),
    [
        ("run_summarization.py", "", (1024, 128)),
        ("run_summarization_no_trainer.py", "--max_source_length 512 --max_target_length 64", (512, 64)),
        ("run_translation.py", "--source_lang en --target_lang ro --predict_with_generate", (1024, 128)),
        ("run_seq2seq_qa.py", "--max_answer_length 20", (384, 20)),
    ],
)
def test_example_scripts_of_encoder_decoders_have_two_lengths(script, flags, lengths):
    """transformers 5.17 examples/pytorch: DataTrainingArguments of each."""
    command = f"python {script} --model_name_or_path t5-base {flags} --per_device_train_batch_size 2 --output_dir o\n"
    read = translation_of(command)
    assert (read.job.sequence_length, read.job.decoder_sequence_length) == lengths
    assert not [finding.sentence for finding in read.findings if "not known here" in finding.sentence]


def test_a_length_of_targets_is_not_known_of_a_decoder():
    flags = "--model_name_or_path gpt2 --max_target_length 64 --per_device_train_batch_size 2 --output_dir o"
    read = translation_of(f"python train_dpo.py {flags}\n")
    assert read.job.decoder_sequence_length is None
    assert [finding.sentence for finding in read.findings if "max_target_length is not known here" in finding.sentence]


def test_the_architectures_of_a_config():
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    config = {"model_type": "llama", **sizes, "vocab_size": 99, "dtype": "bfloat16"}
    config["architectures"] = ["LlamaForSequenceClassification"]
    form = {"config": config, "training_arguments": {"per_device_train_batch_size": 2, "max_length": 64}}
    assert head({"huggingface": form})[0] == "sequence_classifier"
    form["config"] = {**config, "architectures": ["LlamaForCausalLM"]}
    assert head({"huggingface": form})[0] == "language_model"


@pytest.mark.parametrize(
    ("task", "kind", "batch"),
    [("causal_lm", "language_model", 4), ("seq_cls", "sequence_classifier", 4), ("reranker", "sequence_classifier", 8),
     ("embedding", "sequence_classifier", 8), ("generative_reranker", "language_model", 8)],
)  # fmt: skip
def test_ms_swifts_tasks(task, kind, batch):
    job = translation_of(f"{SWIFT} --task_type {task}\n").job
    assert (trained_network(job).head, job.micro_batch_size) == (kind, batch)


def test_a_trainer_with_a_method_of_its_own_makes_its_head():
    program = PROGRAM.format(loader="AutoModelForSequenceClassification", name="meta-llama/Llama-3.2-1B")
    program = program.replace("TrainingArguments(", "RewardConfig(").replace("= Trainer", "= RewardTrainer")
    found = translation_of(program)
    assert (found.job.loss.kind, found.job.micro_batch_size) == ("reward", 16)
    assert not any(finding.parameter == "loss.kind" for finding in found.findings)
