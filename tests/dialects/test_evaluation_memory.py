"""Evaluations that need more than training are said: larger batches, and Liger's loss, which fuses in training alone."""

import pytest

from peakcast.dialects.huggingface.job import from_huggingface

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def translate(versions=None, **training):
    return from_huggingface(LLAMA, training, versions=versions)


def test_an_evaluation_of_larger_batches_than_training_is_a_finding_with_its_size():
    """8 sequences unless said otherwise: 10 bytes for each logit of 8 × 1,024 tokens."""
    asked = {"eval_strategy": "steps", "per_device_train_batch_size": 2, "max_length": 1024}
    found = translate(**asked)
    sentence = next(one for one in found.unsupported if "Evaluation" in one)
    assert f"{10 * 8 * 1024 * found.job.architecture.vocab_size / 2**30:.1f} GiB" in sentence
    assert not any("Evaluation" in one for one in translate(**asked, per_device_eval_batch_size=2).unsupported)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, True),
        ({"gradient_checkpointing": False}, True),
        ({"use_liger_kernel": False}, False),
        ({"eval_strategy": "no"}, False),
        ({"versions": {"trl": "0.28.0"}}, True),
        ({"versions": {"trl": "1.5.1"}}, False),  # asks Liger's forward to skip them there too
        ({"max_length": 16}, False),  # gradients need more
    ],
)
def test_ligers_loss_makes_whole_logits_where_it_evaluates(changes, says):
    asked = {"eval_strategy": "steps", "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    asked |= {"max_length": 4096, "use_liger_kernel": True, "gradient_checkpointing": True}
    found = translate(**{**asked, **changes})
    size = f"{10 * 2 * 4096 * found.job.architecture.vocab_size / 2**30:.1f} GiB"
    sentences = [one for one in found.unsupported if "training mode alone" in one]
    assert bool(sentences) is says
    assert all(size in one for one in sentences)
