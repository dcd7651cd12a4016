"""Which weights of 16 bits accelerate casts to float32 where FSDP mixes precisions, by its release."""

from __future__ import annotations

import pytest

from peakcast.dialects.huggingface.job import from_huggingface

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def precision(fsdp_version, accelerate, peft=None, **model):
    versions = {"accelerate": accelerate} if accelerate else {}
    fsdp = {"fsdp_version": fsdp_version}
    return from_huggingface({**LLAMA, **model}, {"bf16": True}, peft, None, fsdp, 2, versions=versions).job.precision


@pytest.mark.parametrize(
    ("fsdp_version", "accelerate", "peft", "dtype"),
    [
        (1, "1.10.1", None, "float32"),
        (1, "1.10.1", LORA, "bfloat16"),
        (2, "1.10.1", None, "float32"),
        (2, "1.12.0", LORA, "float32"),  # the whole model: model.to(torch.float32)
        (2, "1.13.0", None, "bfloat16"),  # what it casts it drops
        (2, "1.13.0", LORA, "bfloat16"),
        (2, "1.14.0", None, "float32"),
        (2, "1.14.0", LORA, "bfloat16"),
        (2, None, LORA, "bfloat16"),
    ],
)
def test_the_weights_that_accelerate_widens_depend_on_its_release(fsdp_version, accelerate, peft, dtype):
    found = precision(fsdp_version, accelerate, peft)
    assert found.parameters == dtype
    assert found.compute == "bfloat16"


def test_weights_of_4_bits_are_not_widened():
    quantized = {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16", "quant_method": "bitsandbytes"}
    assert precision(2, "1.10.1", LORA, quantization_config=quantized).parameters == "bfloat16"


@pytest.mark.parametrize(
    ("versions", "peft", "said"),
    [
        ({"transformers": "4.56"}, LORA, True),
        ({"transformers": "4.56", "accelerate": "1.10"}, LORA, False),
        ({"transformers": "4.56"}, None, False),
        ({}, LORA, False),
    ],
)
def test_an_old_transformers_without_its_accelerate_is_said(versions, peft, said):
    training = {"bf16": True, "dtype": "bfloat16"}
    found = from_huggingface(LLAMA, training, peft, None, {"fsdp_version": 2}, 2, versions=versions)
    assert any("The release of accelerate is not given" in str(note) for note in found.warnings) is said
