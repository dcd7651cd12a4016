"""Advice is a job whose peak was really computed, is valid for the job at hand, and saves what it says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from peakcast import catalog
from peakcast.doors.questions import translation_of
from peakcast.explaining.advice import CANDIDATES, WORTH_SHOWING_BYTES, advice, changed, expandable_segments, first_to_try
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.scope import out_of_scope

A100 = catalog.gpu("A100-80GB")


def job(**values: Any) -> TrainingJob:
    return translation_of({"architecture": "llama-3.2-1b", **values}).job


def names(asked: TrainingJob) -> set[str]:
    return {item.name for item in advice(asked, A100, 0)}


@pytest.mark.parametrize("name", ["full", "long_lora", "big_vocabulary", "checkpointed", "megatron"])
def test_each_piece_of_advice_is_a_job_that_saves_what_it_says(jobs: dict[str, TrainingJob], name: str) -> None:
    before = ledger(jobs[name], device=A100, rank=0).peak().num_bytes
    found = advice(jobs[name], A100, 0)
    assert found
    for item in found:
        after = changed(jobs[name], item.changes)
        assert not out_of_scope(after)
        assert ledger(after, device=A100, rank=0).peak().num_bytes == item.peak_bytes == before - item.saved_bytes
    assert all(a.saved_bytes > b.saved_bytes - WORTH_SHOWING_BYTES for a, b in pairwise(found))


@pytest.mark.parametrize("name", ["full", "long_lora", "big_vocabulary", "megatron"])
def test_first_to_try_is_a_chain_whose_savings_add_up(jobs: dict[str, TrainingJob], name: str) -> None:
    at, before = jobs[name], ledger(jobs[name], device=A100, rank=0).peak().num_bytes
    chain = first_to_try(at, A100, 0)
    for item in chain:
        at = changed(at, item.changes)
        assert ledger(at, device=A100, rank=0).peak().num_bytes == item.peak_bytes
    assert before - sum(item.saved_bytes for item in chain) == chain[-1].peak_bytes
    kinds = [item.same_training for item in chain]
    assert kinds == sorted(kinds, reverse=True)


def test_two_peaks_of_one_height_give_way_together() -> None:
    """Backward and the optimizer step need about the same: each change alone saves little, both together much."""
    level = translation_of({"architecture": "llama-3.1-8b", "sequence_length": 4096}).job
    alone = {item.name: item.saved_bytes for item in advice(level, A100, 0)}
    chain = first_to_try(level, A100, 0)
    assert [item.name for item in chain[:2]] == ["fused-loss", "fused-optimizer"]
    assert chain[1].saved_bytes > 4 * 2**30 > 4 * alone.get("fused-optimizer", 0)


def test_where_three_changes_are_not_enough_the_mildest_that_is_comes_next() -> None:
    """8 billion weights and states do not fit 24 GB however little else there is; adapters on bfloat16 weights do."""
    small = catalog.gpu("RTX4090")
    chain = first_to_try(translation_of({"architecture": "llama-3.1-8b", "sequence_length": 4096}).job, small, 0)
    assert [item.same_training for item in chain] == [True, True, True, False]
    assert (chain[-1].name, chain[-2].peak_bytes > 44 * 2**30, chain[-1].peak_bytes < 23 * 2**30) == ("lora", True, True)


def test_the_same_change_again_is_only_for_what_does_not_fit_yet() -> None:
    asked = job(micro_batch_size=16, sequence_length=2048, activation_checkpointing={"mode": "full"})
    tried = [item.name for item in first_to_try(asked, A100, 0)]
    assert "smaller-micro-batch" in tried
    assert len(set(tried)) == len(tried)


def test_the_batch_stays_the_same_when_micro_batches_get_smaller() -> None:
    asked = job(micro_batch_size=6, gradient_accumulation_steps=2, finetuning={"method": "lora", "rank": 8})
    (item,) = [item for item in advice(asked, A100, 0) if item.name == "smaller-micro-batch"]
    assert item.changes == {"micro_batch_size": 3, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("values", "unwanted"),
    [
        ({"activation_checkpointing": {"mode": "full"}}, "checkpointing"),
        ({"optimizer": {"implementation": "fused"}}, "fused-optimizer"),
        ({"micro_batch_size": 1}, "smaller-micro-batch"),
        ({"finetuning": {"method": "lora", "rank": 8}}, "lora"),
        ({"attention": "sdpa"}, "sdpa"),
        ({"framework": "megatron"}, "lora"),
        ({"framework": "megatron"}, "sequence-parallel"),
        ({"framework": "megatron"}, "no-main-weights"),
        ({"precision": {"parameters": "bfloat16"}}, "bfloat16"),
    ],
)
def test_what_holds_already_or_cannot_be_is_not_advised(values: dict[str, Any], unwanted: str) -> None:
    assert unwanted not in names(job(**values))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"micro_batch_size": 8}, "checkpointing"),
        ({"micro_batch_size": 8}, "smaller-micro-batch"),
        ({"attention": "eager", "sequence_length": 4096}, "sdpa"),
        ({"finetuning": {"method": "lora", "rank": 8}}, "quantised-base"),
        (
            {"precision": {"parameters": "float32", "gradients": "float32", "optimizer_states": "float32"}},
            "bfloat16",
        ),
        (
            {"framework": "megatron", "parallelism": {"data_parallel_size": 4}, "precision": {"gradients": "float32"}},
            "distributed-optimizer",
        ),
        ({"framework": "megatron", "parallelism": {"tensor_parallel_size": 2}}, "sequence-parallel"),
        ({"framework": "torch", "activation_checkpointing": {"mode": "full"}}, "optimizer-in-backward"),
    ],
)
def test_what_saves_is_advised(values: dict[str, Any], wanted: str) -> None:
    assert wanted in names(job(**values))


def test_a_job_that_the_ledger_does_not_cover_gets_no_advice() -> None:
    assert advice(job(compile=True, attention="eager"), A100, 0) == ()


def test_expandable_segments_are_replayed() -> None:
    from peakcast.models.baseline.baseline import baseline

    asked = translation_of({"architecture": "llama-3.1-8b"}).job
    (item,) = expandable_segments(asked, A100, 0)
    assert item.quantity == "peak_reserved_bytes"
    before = baseline(asked, A100, 0).peak_reserved_bytes
    after = baseline(changed(asked, item.changes), A100, 0).peak_reserved_bytes
    assert (item.saved_bytes, item.peak_bytes) == (before - after, after)


def test_every_candidate_says_what_it_costs() -> None:
    assert all(candidate.price and candidate.sentence for candidate in CANDIDATES)
