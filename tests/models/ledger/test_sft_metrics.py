"""What SFTTrainer computes from whole logits for its logs, beside the log-softmax that the loss keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.core.units import BF16, FP32
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Phase

SEQUENCE = 512
MORE = 1024
"""Rows by which the vocabulary is enlarged."""


def growth(metrics: str, batch: int = 4, *, autocast: bool = True, phase: Phase = Phase.LOSS) -> float:
    """By how much the phase's peak grows with the vocabulary, in units of all fp32 logits, without the frozen head."""
    job = job_from_mapping(
        {
            "architecture": "llama-3.2-1b",
            "micro_batch_size": batch,
            "sequence_length": SEQUENCE,
            "finetuning": {"method": "lora", "rank": 8},
            "framework_options": {"autocast": autocast, "sft_metrics": metrics},
        }
    )
    job = job.replace(architecture=replace(job.architecture, num_hidden_layers=2, tie_word_embeddings=False))
    return (_peak(_larger(job), phase) - _peak(job, phase)) / (batch * SEQUENCE * MORE * FP32)


def _larger(job: TrainingJob) -> TrainingJob:
    return job.replace(architecture=replace(job.architecture, vocab_size=job.architecture.vocab_size + MORE))


def _peak(job: TrainingJob, phase: Phase) -> int:
    return ledger(job).peak(phase).num_bytes - 2 * job.architecture.hidden_size * job.architecture.vocab_size * BF16


@pytest.mark.parametrize(
    ("metrics", "batch", "logits"),
    [
        ("", 4, 2.5),  # log-softmax, fp32 and bf16 logits in the loss
        ("accuracy", 4, 3),  # log-softmax, what the network returned in fp32, its copy
        ("entropy_of_a_copy", 4, 4),
        ("entropy_of_a_copy", 1, 2.75),  # of one sequence a view does
        ("entropy_of_sequences", 1, 5),
        ("entropy_of_a_view", 4, 3 + 3 * 128 / (4 * SEQUENCE)),
    ],
)
def test_logits_that_are_there_at_once(metrics, batch, logits):
    """Traces of trl 1.5.1's own compute_loss are equal (442.66 MiB of a small network, of which backward has 365.13)."""
    assert growth(metrics, batch) == pytest.approx(logits, abs=0.02)


@pytest.mark.parametrize("metrics", ["accuracy", "entropy", "entropy_of_a_copy", "entropy_of_a_view"])
def test_without_autocast_the_loss_had_more(metrics):
    """16-bit logits that nobody widens are smaller than what the loss made of them in passing."""
    assert growth(metrics, autocast=False) == growth("", autocast=False)


def test_backward_does_not_know_them():
    assert growth("entropy_of_a_copy", phase=Phase.BACKWARD) == growth("", phase=Phase.BACKWARD)


def test_only_cross_entropy_has_them():
    plain = job_from_mapping({"architecture": "llama-3.2-1b", "micro_batch_size": 2, "loss": {"kind": "reward"}})
    asked = plain.replace(framework_options=FrozenMapping({"sft_metrics": "entropy_of_a_copy"}))
    assert _peak(asked, Phase.LOSS) == _peak(plain, Phase.LOSS)
