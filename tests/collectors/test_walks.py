"""What recordings say of a library that fails."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from peakcast.collectors.stacks.huggingface_model import model_of
from peakcast.collectors.tracing.installed_families import defaults_of, read_of
from peakcast.collectors.tracing.walks import refusal
from peakcast.core.errors import CollectorError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.networks.undescribed import for_tracing


def raised(action):
    try:
        action()
    except Exception as error:
        return refusal(error)
    raise AssertionError("it did not fail")


def test_the_line_of_the_library_that_failed_is_named() -> None:
    import transformers

    said = raised(lambda: transformers.AutoConfig.for_model("no_such_family"))
    assert said.startswith("it raised ")
    assert "in for_model (configuration_auto.py:" in said
    assert "peakcast dryrun" in said


def test_mixed_dtypes_are_told_how_to_agree() -> None:
    import torch

    said = raised(lambda: torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float64))
    assert "try float32 weights (precision.parameters)" in said


def test_a_network_that_needs_images_asks_for_them() -> None:
    def blip(pixel_values: object) -> None: ...

    said = raised(lambda: blip())  # type: ignore[call-arg]
    assert "give images.per_sequence and images.height" in said


def test_adapters_without_targets_are_asked_for_them() -> None:
    import peft
    from transformers import HeliumConfig, HeliumForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = HeliumForCausalLM(HeliumConfig(**sizes, head_dim=8, num_key_value_heads=2, vocab_size=32))
    said = raised(lambda: peft.get_peft_model(model, peft.LoraConfig()))
    assert "name the adapted layers (finetuning.targets)" in said


def test_a_family_that_the_library_lacks_has_no_defaults() -> None:
    """What is said of it then is what the library says when the network is built."""
    assert list(defaults_of({"model_type": "no_such_family"})) == []
    assert dict(defaults_of({"model_type": "gpt2"}))["n_embd"] == 768


def test_what_the_code_of_a_family_reads() -> None:
    """Not how to generate, nor what other programs wrote into published configurations."""
    read = set(read_of({"model_type": "bart"}))
    assert {"d_model", "scale_embedding", "activation_dropout", "num_hidden_layers", "tie_word_embeddings"} <= read
    assert not {"num_beams", "static_position_embeddings", "task_specific_params", "suppress_tokens"} & read
    assert "suppress_tokens" not in read_of({"model_type": "whisper"})  # a value of its class that no network uses
    assert read_of({"model_type": "no_such_family"}) == []


def test_a_layer_that_reuses_the_keys_of_no_layer_is_told_what_to_change() -> None:
    """Gemma 4's last layers reuse the keys of an earlier layer of their kind."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    tables = {"vocab_size": 32, "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8, "global_head_dim": 16}
    layers = {"num_hidden_layers": 3, "layer_types": kinds, "num_kv_shared_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **sizes, **tables, **layers))
    assert "num_kv_shared_layers" in raised(lambda: model(torch.zeros(1, 4, dtype=torch.int64)))


def test_only_an_encoder_decoder_has_targets_of_a_length_of_their_own() -> None:
    """The job cannot tell: of a family that the ledger does not know, only the library knows what it is."""
    network = {"model_type": "xglm", "d_model": 16, "ffn_dim": 16, "num_layers": 1, "attention_heads": 2, "vocab_size": 32}
    with for_tracing():
        job = job_from_mapping({"architecture": network, "decoder_sequence_length": 8})
    with pytest.raises(CollectorError, match="decoder_sequence_length=8 is the length of an encoder-decoder's targets"):
        model_of(job)
