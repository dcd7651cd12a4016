"""Unsloth's arguments, as its notebooks have them: what its kernels and its checkpoints on the host make of a job."""

import pytest

from peakcast.dialects.huggingface.job import from_huggingface

NOTEBOOK = {
    "r": 16, "lora_alpha": 16, "lora_dropout": 0, "bias": "none", "use_gradient_checkpointing": "unsloth",
    "random_state": 3407, "use_rslora": False, "loftq_config": None,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip


def test_unsloths_notebook_arguments_are_its_kernels_and_checkpoints_on_the_host():
    given = {"load_in_4bit": True, "max_seq_length": 2048, "packing": True, "per_device_train_batch_size": 4, "bf16": True}
    answer = from_huggingface("llama-3.2-1b", given, NOTEBOOK)
    job = answer.job
    assert (job.finetuning.quantization, "unsloth" in job.versions) == ("nf4", True)
    assert (job.activation_checkpointing.mode, job.activation_checkpointing.use_reentrant) == ("full", True)
    assert job.offload.activations
    assert not any("not known here" in sentence for sentence in answer.assumptions)


@pytest.mark.parametrize(
    ("peft", "training", "mode", "offloaded"),
    [
        (NOTEBOOK, {"max_seq_length": 128, "packing": True, "per_device_train_batch_size": 1}, "full", False),
        ({**NOTEBOOK, "use_gradient_checkpointing": True}, {}, "full", False),
        ({**NOTEBOOK, "use_gradient_checkpointing": False}, {}, "none", False),
        (None, {"gradient_checkpointing": "unsloth"}, "full", True),
    ],
)
def test_unsloths_checkpoints_stay_where_they_are_small_or_not_asked_for(peft, training, mode, offloaded):
    job = from_huggingface("llama-3.2-1b", training, peft, versions={"unsloth": "2025.11.4"}).job
    assert (job.activation_checkpointing.mode, job.offload.activations) == (mode, offloaded)


def test_importing_unsloth_sets_the_allocator():
    arguments = {"max_length": 2048, "per_device_train_batch_size": 1, "use_gradient_checkpointing": "unsloth"}
    translation = from_huggingface("llama-3.1-8b", arguments, {"r": 16})
    assert translation.job.allocator.expandable_segments
    assert translation.job.allocator.divisions[0] == 256


def test_tables_among_the_targets_are_trained_whole():
    """unsloth models/llama.py `get_peft_model`: embed_tokens and lm_head of target_modules go to modules_to_save."""
    tables = {**NOTEBOOK, "target_modules": [*NOTEBOOK["target_modules"], "embed_tokens", "lm_head"]}
    arguments = {"load_in_4bit": True, "max_length": 512, "per_device_train_batch_size": 1}
    answer = from_huggingface("mistral-7b-v0.3", arguments, tables)
    assert answer.job.finetuning.targets == tuple(NOTEBOOK["target_modules"])
    assert answer.job.finetuning.modules_to_save == ("embed_tokens", "lm_head")
    assert [each.direction for each in answer.findings if each.parameter == "target_modules"] == ["less"]
