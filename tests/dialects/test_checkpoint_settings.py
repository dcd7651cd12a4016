"""What checkpoints keep, by the settings of transformers 5.17 and accelerate 1.15: of which layers, and where."""

from __future__ import annotations

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.huggingface.job import from_huggingface

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip
SHARDED = {"fsdp_version": 2, "fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True}


def read(fsdp=None, num_gpus=1, **training):
    return from_huggingface(LLAMA, training, None, None, fsdp, num_gpus)


def test_the_trainer_checkpoints_every_nth_layer_and_keeps_inputs_on_the_host():
    """transformers' Trainer takes both out of the arguments of torch's checkpoint."""
    details = {"every_n_layers": 2, "offload": True}
    translation = read(gradient_checkpointing=True, gradient_checkpointing_kwargs=details)
    job = translation.job
    assert (job.activation_checkpointing.mode, job.activation_checkpointing.every_n_layers) == ("full", 2)
    assert job.offload.activations
    assert not any(key in str(note) for note in translation.warnings for key in details)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_without_being_asked_inputs_stay_on_the_gpu(checkpoints):
    details = {"offload": not checkpoints}  # asked for without checkpoints, or denied with them
    assert not read(gradient_checkpointing=checkpoints, gradient_checkpointing_kwargs=details).job.offload.activations


def test_accelerate_keeps_the_inputs_of_fsdp2s_checkpoints_on_the_host():
    job = read(SHARDED, num_gpus=4).job
    assert (job.activation_checkpointing.mode, job.offload.activations) == ("full", True)
    assert not job.offload.parameters


@pytest.mark.parametrize("other", [{"fsdp_version": 1}, {"fsdp_activation_checkpointing": False}])
def test_what_accelerate_refuses_is_refused(other):
    with pytest.raises(SpecError, match="fsdp_activation_checkpointing_offload"):
        read(SHARDED | other, num_gpus=4)
