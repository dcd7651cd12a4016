"""How many chunks Unsloth's loss has: by hand, and in an answer that knows the GPU."""

from __future__ import annotations

import peakcast
from peakcast.core.units import GIB
from peakcast.models.prediction.loss_chunks import chunks_of

JOB = {
    "architecture": "llama-3.1-8b",
    "micro_batch_size": 1,
    "optimizer": {"name": "adamw_8bit"},
    "finetuning": {"method": "qlora", "rank": 32, "targets": ["all-linear"], "quantization": "nf4"},
    "attention": "flash_attention_2",
    "activation_checkpointing": {"mode": "full", "use_reentrant": True},
    "offload": {"activations": True},
    "versions": {"unsloth": "2025.11.4"},
}


def test_a_chunks_logits_take_half_of_the_free_memory_in_multiples_of_four():
    assert [chunks_of(logits * GIB, 20 * GIB) for logits in (5, 19, 21, 80, 160)] == [1, 1, 4, 8, 16]


def test_long_sequences_do_not_make_all_logits_at_once():
    """Unsloth's page trains 153,977 tokens of an 8B network within 40 GB; their logits alone are 37 GiB in 16 bits."""
    long = peakcast.predict({**JOB, "sequence_length": 153_977}, "H100-80GB")
    assert 0.8 < long.peak_allocated_bytes.point / (40 * GIB) < 1
    assert any("chunks" in finding.sentence for finding in long.findings)
    short = peakcast.predict({**JOB, "sequence_length": 2048}, "H100-80GB")
    assert not any("chunks" in finding.sentence for finding in short.findings)
