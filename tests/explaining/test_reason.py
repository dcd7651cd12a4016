"""Why the peak is where it is, for jobs whose peaks can be counted by hand."""

from __future__ import annotations

import pytest

from peakcast.answers.explanation import PeakReason
from peakcast.core.units import format_gib
from peakcast.doors.questions import translation_of
from peakcast.explaining.reason import peak_reason
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

INPUTS = 3 * 2048 * 8
"""ids, labels and mask of the first job, int64."""


def reason(job: TrainingJob, rank: int = 0) -> PeakReason:
    return peak_reason(ledger(job, rank=rank), job)


def says(found: PeakReason, *words: str) -> bool:
    return any(all(word in sentence for word in words) for sentence in found.sentences)


def test_full_finetuning_peaks_in_the_optimizer_step(jobs: dict[str, TrainingJob]) -> None:
    """Weights, gradients, two states, and the square roots of every matrix (norms are a group of their own)."""
    weights, norms = 2 * 8_030_261_248, 2 * 65 * 4096
    found = reason(jobs["full"])
    assert found.phase == "optimizer_step"
    assert found.standing_bytes == {"optimizer_states": 2 * weights, "parameters": weights, "inputs": INPUTS}
    assert found.on_top_bytes == {"gradients": weights, "optimizer_temporaries": weights - norms}
    assert found.grown_bytes["optimizer_temporaries"] == weights - norms
    assert found.next_phase == "backward"
    assert says(found, "square root", "226 tensors", "fused makes none")  # 32 layers of 7 matrices, two vocabularies
    assert says(found, "gradient clipping", format_gib(weights - norms))


def test_lora_on_a_long_sequence_peaks_in_the_logits_over_kept_activations(jobs: dict[str, TrainingJob]) -> None:
    logits = 16_384 * 128_256 * 4
    found = reason(jobs["long_lora"])
    assert (found.phase, found.previous_phase, found.next_phase) == ("backward", "loss", "loss")
    assert found.on_top_bytes["logits"] == logits
    assert found.on_top_bytes["temporaries"] == 2 * logits
    assert says(found, "16,384 tokens × 128,256 words", "3 tensors of their size", format_gib(logits))
    gates = 32 * 16_384 * 14_336 * 2
    assert ("mlp.gate_proj", "activations", gates, 32) in found.largest
    assert says(found, "32 layers keep", "for the backward pass")


def test_a_big_vocabulary_peaks_in_the_loss_and_its_gradient(jobs: dict[str, TrainingJob]) -> None:
    logits = 8_192 * 256_000 * 4
    found = reason(jobs["big_vocabulary"])
    assert found.largest[:3] == (
        ("log_softmax", "logits", logits, 1),
        ("nll_loss.gradient", "temporaries", logits, 1),
        ("log_softmax.gradient", "temporaries", logits, 1),
    )
    assert says(found, "8,192 tokens × 256,000 words", "7.81 GiB")
    narrow_logits = logits // 2
    assert found.grown_bytes["logits"] == -(logits + narrow_logits)  # the float32 copy, and the bf16 ones


def test_checkpointing_keeps_one_hidden_state_a_layer(jobs: dict[str, TrainingJob]) -> None:
    hidden = 8 * 4096 * 4096 * 2
    found = reason(jobs["checkpointed"])
    assert ("checkpoint", "activations", 32 * hidden, 32) in found.largest
    assert says(found, "Checkpointing keeps", "0.250 GiB of each of 32 layers", format_gib(32 * hidden))


def test_the_layer_being_recomputed_is_named() -> None:
    """A small vocabulary and a long sequence: the peak is inside the first layer that backward recomputes."""
    architecture = {
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 512, "tie_word_embeddings": True,
    }  # fmt: skip
    job = translation_of(
        {
            "architecture": architecture,
            "sequence_length": 8192,
            "activation_checkpointing": {"mode": "full"},
            "finetuning": {"method": "lora", "rank": 8},
        }
    ).job
    found = reason(job)
    assert (found.phase, found.module) == ("backward", "layers.3")
    assert says(found, "layers.3, which is being recomputed")


@pytest.mark.parametrize(
    ("name", "rank"), [("full", 0), ("long_lora", 0), ("checkpointed", 0), ("megatron", 0), ("megatron", 7)]
)
def test_what_stands_and_what_came_on_top_are_the_peak(jobs: dict[str, TrainingJob], name: str, rank: int) -> None:
    timeline = ledger(jobs[name], rank=rank)
    found = peak_reason(timeline, jobs[name])
    assert found.num_bytes == timeline.peak().num_bytes
    assert sum(found.standing_bytes.values()) + sum(found.on_top_bytes.values()) == found.num_bytes
    assert found.next_bytes == max(
        size for phase, size in timeline.phase_peaks().items() if phase.name.lower() != found.phase
    )


def test_a_timeline_of_three_tensors_by_hand() -> None:
    entries = [
        Entry("w", Category.PARAMETERS, 100 * 2**20, 0, 3),
        Entry("a", Category.ACTIVATIONS, 50 * 2**20, 1, 2, "layers.0"),
        Entry("g", Category.GRADIENTS, 80 * 2**20, 2, 3, "layers.0"),
    ]
    timeline = Timeline.from_entries(entries, [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD], ["x", "y", "z"])
    found = peak_reason(timeline, None)
    assert (found.phase, found.operation, found.module) == ("backward", "z", "layers.0")
    assert found.grown_bytes == {"gradients": 80 * 2**20, "activations": -50 * 2**20}
    assert (found.next_phase, found.next_bytes) == ("forward", 150 * 2**20)
