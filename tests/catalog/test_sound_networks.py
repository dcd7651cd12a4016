"""Networks that are given sound are trained whole, with sound of 30 seconds for each sequence of words."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast import catalog
from peakcast.jobs.audio import sound_shape
from peakcast.printing.screen import asked

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from peakcast.collectors.stacks.batches import batch_of  # noqa: E402
from peakcast.collectors.stacks.huggingface_model import model_of  # noqa: E402
from peakcast.dialects.common.job_file import job_from_mapping  # noqa: E402

WHISPER: dict[str, Any] = {"model_type": "whisper", "d_model": 32, "vocab_size": 64, "max_target_positions": 40}
WHISPER |= {
    f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 1), ("attention_heads", 2))
}
WHISPER |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 16, "max_source_positions": 20}
WHISPER |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)


def test_whisper_is_trained_with_its_encoder_and_writes_as_many_tokens_as_it_has_positions() -> None:
    asked_for = job_from_mapping({"architecture": WHISPER, "micro_batch_size": 2, "precision": {"parameters": "float32"}})
    batch = batch_of(asked_for)
    assert {name: tuple(one.shape) for name, one in batch.items()} == {"input_features": (2, 16, 40), "labels": (2, 40)}
    model = model_of(asked_for)
    assert type(model).__name__ == "WhisperForConditionalGeneration"
    assert model(**batch).loss.dim() == 0
    assert "micro-batch 2 × (40 tokens and 40 frames of sound)" in asked(asked_for)


def test_a_published_network_hears_thirty_seconds() -> None:
    """3,000 frames of 10 ms, of 80 frequencies or, of its third large network, 128."""
    assert sound_shape(catalog.architecture("openai/whisper-small")) == (80, 3000)
    assert sound_shape(catalog.architecture("openai/whisper-large-v3")) == (128, 3000)
