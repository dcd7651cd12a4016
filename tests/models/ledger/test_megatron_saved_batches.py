"""Megatron-LM 0.18 saves every micro-batch of a step with its tensors on the GPU. Hand counts, and a published run."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.catalog import gpu
from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.timelines.timeline import Timeline

BATCH, SEQUENCE = 4, 1024
SMALL: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "micro_batch_size": BATCH, "global_batch_size": 32,
    "seq_length": SEQUENCE, "max_position_embeddings": SEQUENCE, "vocab_size": 512, "bf16": True,
}  # fmt: skip
IDS, FLOATS, MASK = 8 * BATCH * SEQUENCE, 4 * BATCH * SEQUENCE, BATCH * SEQUENCE * SEQUENCE


def job(num_gpus: int = 1, version: str = "0.18.0", **arguments: Any) -> TrainingJob:
    return from_megatron({**SMALL, **arguments}, num_gpus, versions={"megatron_core": version}).job


def saved(timeline: Timeline, instant: int) -> int:
    """Bytes of saved batches at `instant`."""
    chosen = [name.startswith("saved.") for name in timeline.names]
    alive = (timeline.born <= instant) & (instant < timeline.dies)
    return int(timeline.num_bytes[alive & chosen].sum())


def after_step(job: TrainingJob, rank: int = 0) -> int:
    timeline = megatron_ledger(job, rank=rank)
    assert saved(timeline, 0) == 0, "the next step begins with `advance`, which drops them"
    return saved(timeline, len(timeline.phases) - 1)


def test_one_stage_saves_all_of_every_micro_batch():
    assert after_step(job()) == 8 * (3 * IDS + FLOATS + MASK)  # tokens, positions, labels; loss mask; attention mask


def test_an_end_of_a_pipeline_saves_what_it_reads_and_a_middle_stage_nothing():
    four = job(4, pipeline_model_parallel_size=4)
    assert [after_step(four, rank) for rank in range(4)] == [8 * (2 * IDS + MASK), 0, 0, 8 * (IDS + FLOATS + MASK)]


def test_context_parallel_ranks_save_their_part():
    halves = 3 * IDS // 2 + FLOATS // 2 + MASK // 2
    assert after_step(job(2, context_parallel_size=2)) == 8 * halves


def test_only_the_rank_that_reads_batches_saves_them():
    two = job(2, tensor_model_parallel_size=2)
    assert after_step(two, 0) == 8 * (3 * IDS + FLOATS + MASK)
    assert after_step(two, 1) == 0


@pytest.mark.parametrize("version", ["0.16.1", "0.19.0"])
def test_other_releases_save_none_on_the_gpu(version: str):
    assert after_step(job(version=version)) == 0


def test_published_pipeline_of_may_2026():
    """gpt3_mcore_te_tp1_pp4_vp1_resume_torch_decoupled_lr, A100, value of 2026-05-30: the last of 8 ranks, after a step.
    Without the saved batches it is 16 MiB short."""
    published = {
        "num_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 50257, "decoupled_lr": 2e-4,
        "pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 1, "deterministic_mode": True,
        "no_gradient_accumulation_fusion": True, "attention_softmax_in_fp32": True,
    }  # fmt: skip
    run = from_megatron(
        {**SMALL, **published},
        8,
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
        {"megatron_core": "0.18.0", "ngc_pytorch": "25.09"},
    ).job
    timeline = megatron_ledger(run, device=gpu("A100-80GB"), rank=7)
    end = len(timeline.phases)
    left = int(timeline.num_bytes[(timeline.born < end) & (timeline.dies >= end)].sum())
    assert left == pytest.approx(747_295_232, rel=1e-4)
