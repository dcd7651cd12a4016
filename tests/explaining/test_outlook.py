"""What follows a prediction: other GPU types, every rank, what is not modelled."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast import api, catalog
from peakcast.doors.questions import question, translation_of
from peakcast.explaining.outlook import not_modelled, stages
from peakcast.models.ledger.layouts.pipeline import pipeline_rank

LAYOUT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 4, "data_parallel_size": 2}
MEGATRON: dict[str, Any] = {
    "architecture": "llama-3.1-8b",
    "framework": "megatron",
    "parallelism": LAYOUT,
    "gradient_accumulation_steps": 8,
}


@pytest.mark.parametrize(
    "job",
    [
        {"architecture": "llama-3.2-1b", "sequence_length": 512},
        {"architecture": "llama-3.1-8b", "finetuning": {"method": "lora", "rank": 16}},
    ],
)
def test_other_gpus_get_the_verdict_that_predict_gives_them(job: dict[str, Any]) -> None:
    found = api.predict(job, "A100-80GB").gpus
    assert [item.gpu for item in found] == sorted(catalog.gpu_names(), key=lambda name: catalog.gpu(name).cuda_memory_bytes)
    asked = {item.gpu: api.answer(question(job, item.gpu)).fits for item in found}
    assert {item.gpu: item.fits for item in found} == asked


def test_more_memory_never_fits_worse_under_one_calibration() -> None:
    order = {"no": 0, "uncertain": 1, "yes": 2}
    found = api.predict("llama-3.1-8b", "H100-80GB").gpus
    by_generation = [item for item in found if item.gpu in ("A100-40GB", "A100-80GB")]
    assert [order[item.fits] for item in by_generation] == sorted(order[item.fits] for item in by_generation)


def test_every_rank_is_counted_once_and_each_stage_is_its_own_prediction() -> None:
    answer = api.predict(MEGATRON, "A100-80GB", all_ranks=True)
    assert sum(item.num_ranks for item in answer.ranks) == 16
    assert [layer for item in answer.ranks for layer in item.layers] == list(range(32))
    for item in answer.ranks:
        alone = api.predict(MEGATRON, "A100-80GB", rank=item.rank)
        assert item.peak_device_bytes == alone.peak_device_bytes
        assert item.fits == alone.fits
    assert answer.rank == max(answer.ranks, key=lambda item: item.peak_allocated_bytes.baseline).rank
    assert api.predict(MEGATRON, "A100-80GB").ranks == ()


def test_stages_follow_the_order_of_ranks() -> None:
    options = {"use_tp_pp_dp_mapping": True}
    job = translation_of({**MEGATRON, "framework_options": options}).job
    for stage in stages(job):
        assert pipeline_rank(job.parallelism, stage.rank, pipeline_innermost=True) == stage.number
    assert [stage.rank for stage in stages(job)] == [0, 2, 4, 6]


def test_what_is_not_modelled_depends_on_the_job() -> None:
    plain = not_modelled(translation_of({"architecture": "llama-3.2-1b"}).job)
    routed = not_modelled(translation_of({"architecture": "mixtral-8x7b", "compile": True}).job)
    assert not [sentence for sentence in plain if "routing" in sentence]
    assert [sentence for sentence in routed if "routing" in sentence]
    assert not [sentence for sentence in routed if "compile" in sentence]  # a finding says that
