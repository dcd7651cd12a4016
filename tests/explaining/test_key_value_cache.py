"""What is said of generation: its cache, its two peaks, its own advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peakcast import api, catalog
from peakcast.answers.labels import phase_title
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.explaining.key_value_cache import cache_bytes_per_token
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.printing.screen import prediction_text
from peakcast.timelines.timeline import Category

PROMPT, NEW, BATCH = 512, 64, 4


def generation(**changes: object) -> TrainingJob:
    inference = {"prompt_length": PROMPT, "new_tokens": NEW}
    return job_from_mapping(
        {"architecture": "llama-3.2-1b", "task": "inference", "micro_batch_size": BATCH, "inference": inference, **changes}
    )


def test_a_token_keeps_keys_and_values_of_each_layer() -> None:
    """llama-3.2-1b: 16 layers, 8 key-value heads of 64, bfloat16."""
    assert cache_bytes_per_token(generation()) == 2 * 16 * 8 * 64 * 2


def test_the_cache_at_the_end_is_that_of_all_tokens_but_the_last() -> None:
    timeline = api.explain(generation(), "L4").timeline
    end = timeline.composition(len(timeline.phases) - 1)
    assert end[Category.KV_CACHE] == BATCH * (PROMPT + NEW - 1) * cache_bytes_per_token(generation())


def test_prefill_and_decoding_have_peaks_and_the_higher_is_the_peak() -> None:
    answer = api.predict(generation(), "L4")
    peaks = answer.phase_peaks_bytes
    assert max(peaks["prefill"], peaks["decode"]) == peaks["forward"]
    assert [phase_title(name) for name in ("prefill", "decode")] == ["prefill", "decoding"]
    assert "The peak is in prefill:" in prediction_text(answer)
    longer = generation(inference={"prompt_length": 16, "new_tokens": 2048})
    assert "The peak is in decoding:" in prediction_text(api.predict(longer, "L4"))


def test_ranks_of_tensor_parallelism_share_the_heads_and_each_keeps_its_part_of_the_cache() -> None:
    alone, shared = generation(), generation(parallelism={"tensor_parallel_size": 2})
    assert cache_bytes_per_token(shared) == cache_bytes_per_token(alone) // 2
    ends = [api.explain(job, "L4").timeline for job in (alone, shared)]
    caches = [end.composition(len(end.phases) - 1)[Category.KV_CACHE] for end in ends]
    assert caches[1] == caches[0] // 2
    cache, server = api.predict(shared, "L4").remarks
    assert "16 KiB for each token on each of 2 GPUs" in cache
    assert "of each GPU" in server


def test_what_only_training_needs_is_no_reason_against_generation_under_tensor_parallelism() -> None:
    shared = {"parallelism": {"tensor_parallel_size": 2}, "optimizer": {"name": "muon"}}
    assert out_of_scope(generation(**shared)) == ""
    assert "modelled in training only" in out_of_scope(generation(framework="torch", **shared))


def test_the_share_that_a_server_needs_holds_weights_activations_and_the_cache_of_all_tokens() -> None:
    answer = api.predict(generation(micro_batch_size=64), "L4")
    needed = float(answer.remarks[1].rsplit("=", 1)[1].rstrip("."))
    cache = 64 * (PROMPT + NEW - 1) * cache_bytes_per_token(generation())
    taken = answer.peak_allocated_bytes.point - answer.composition.get("kv_cache", 0)
    assert 0 <= needed * catalog.gpu("L4").cuda_memory_bytes - taken - cache <= 0.01 * catalog.gpu("L4").cuda_memory_bytes


def test_training_has_neither_a_cache_nor_its_sentences() -> None:
    answer = api.predict("llama-3.2-1b", "L4")
    assert answer.remarks == ()
    assert not {"prefill", "decode"} & set(answer.phase_peaks_bytes)
    assert "kv_cache" not in answer.composition


def test_the_first_screen_says_how_large_the_cache_is_and_what_a_server_has_room_for() -> None:
    answer = api.predict(generation(), "L4")
    cache, server = answer.remarks
    assert cache == "Key-value cache: 32 KiB for each token, 4 × 575 tokens: 0.07 GiB."
    assert "gpu_memory_utilization" in server
    assert all(sentence in " ".join(prediction_text(answer).split()) for sentence in answer.remarks)


def test_advice_for_generation_trains_nothing() -> None:
    found = api.explain(generation(micro_batch_size=8), "L4").advice
    names = {item.name for item in found}
    assert {"fewer-sequences", "4-bit-weights", "8-bit-weights"} <= names
    assert not names & {"qlora", "lora", "checkpointing", "smaller-micro-batch"}
    for item in found:
        assert "finetuning.method" not in item.changes


@pytest.mark.parametrize("find", ["micro_batch_size", "sequence_length"])
def test_the_largest_batch_and_prompt_are_searched(find: str) -> None:
    whole = generation()
    shallow = whole.replace(architecture=replace(whole.architecture, num_hidden_layers=4))
    found = api.search(shallow, "T4", find=find)
    assert found.value
    assert api.predict(found.plan.job, "T4").fits == "yes"


def test_a_network_of_another_stack_has_no_such_sentences() -> None:
    answer = api.predict(generation(framework="megatron"), "L4")
    assert answer.remarks == ()
    assert not answer.is_covered
