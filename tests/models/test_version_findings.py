"""The finding that other releases, or another stack, need another amount of memory."""

from __future__ import annotations

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.core.findings import CAUSES, OF_THE_CACHE, SILENT_ABOVE
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.records import Measurement
from peakcast.measurements.store import load
from peakcast.models.prediction.predict import predict

LORA = {"finetuning": {"method": "lora", "rank": 16}, "micro_batch_size": 4}
GENERATES = {"task": "inference", "inference": {"prompt_length": 256, "new_tokens": 512}, "micro_batch_size": 8}
SHARDED = {"framework": "torch", "parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"}}
WIDENED = {
    "framework_options": {"autocast": True},
    "attention": "flash_attention_2",
    "activation_checkpointing": {"mode": "full", "use_reentrant": True},
    "sequence_length": 1792,
    "micro_batch_size": 5,
}


FUSED = {"loss": {"fused_linear_cross_entropy": True}, "framework_options": {"liger_kernels": True}, "micro_batch_size": 8}
OFFLOADED = {
    "framework": "deepspeed",
    "precision": {"parameters": "float16", "compute": "float16", "gradients": "float16", "main_parameters": "float32"},
    "parallelism": {"data_parallel_size": 8, "zero_stage": 2},
    "activation_checkpointing": {"mode": "full", "use_reentrant": True},
    "offload": {"optimizer": True},
}


@pytest.mark.parametrize(
    ("given", "direction", "named"),
    [
        pytest.param({"architecture": "gemma-2-9b", **FUSED}, "more", "2024", id="a loss that Liger did not fuse yet"),
        pytest.param({"architecture": "llama-3-8b", **OFFLOADED}, "more", "DeepSpeed", id="partitions back in float32"),
        pytest.param({"architecture": "mistral-7b", "sequence_length": 4096}, "", "", id="the same in both"),
        pytest.param({"architecture": "mistral-7b", **LORA}, "more", "2024", id="a model that widened all logits"),
        pytest.param({"architecture": "llama-2-7b", **GENERATES}, "more", "2023", id="a cache copied in each step"),
        pytest.param({"architecture": "llama-3.1-8b", **SHARDED}, "less", "torchtitan", id="outputs that a stack drops"),
        pytest.param({"architecture": "gpt_bigcode-santacoder", **WIDENED}, "either", "2024", id="both ways"),
        pytest.param({"architecture": "llama-3.2-3b", "finetuning": {"method": "oft"}}, "more", "peft", id="not covered"),
    ],
)
def test_that_other_releases_need_another_amount_is_said_where_no_version_is(given, direction, named):
    job = job_from_mapping(given)
    said = _said(job)
    assert [(finding.direction, finding.severity) for finding in said] == [(direction, 0)] * bool(direction)
    assert all(named in finding.sentence for finding in said)
    assert _said(job.replace(versions=FrozenMapping({"transformers": "5.17"}))) == []


def _said(job: TrainingJob):
    return [one for one in predict(job, catalog.gpu("A100-80GB")).findings if one.code == "versions_not_given"]


OWN_PROGRAMS = ("litgpt", "torchtune")
"""Stacks that run the training only if `versions` name them: without a release of theirs, the question is another."""


@pytest.mark.whole
def test_no_published_row_without_its_versions_is_far_off_in_silence():
    """Of hundreds of peaks that are more than 10 % off, two answers name no cause, both of device memory: of a run of the
    table whose processes hold 1.1 GiB more than their equals elsewhere, 10.9 % off; and of one that is 10.0 % off, whose
    own releases would reserve 4.98 % less, just below what is said."""
    rows = {
        (row.job, row.gpu, row.rank): row
        for row in load()
        if row.outcome == "ok" and not row.out_of_scope and not row.spoiled
    }
    silent = [case for row in rows.values() for case in _silent(row)]
    assert sorted(silent) == [
        "peak_device_bytes of FMSH-249/bigcode/gpt_bigcode-santacoder/1 GPUs/batch 4/full/none",
        "peak_device_bytes of bigcode/gpt_bigcode-santacoder/1 GPUs/batch 8/full/foak-fast-kernels",
    ]


def _silent(row: Measurement) -> list[str]:
    unsaid = {stack: "main" for stack in OWN_PROGRAMS if stack in row.job.versions}
    answer = predict(row.job.replace(versions=FrozenMapping(unsaid)), catalog.gpu(row.gpu), row.rank)
    quantities = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
    return [
        f"{quantity} of {row.case}"
        for quantity in quantities
        if (measured := getattr(row, quantity))
        and abs(error := getattr(answer, quantity).point / measured - 1) > SILENT_ABOVE
        and not any(
            finding.code in (CAUSES - OF_THE_CACHE if quantity == "peak_allocated_bytes" else CAUSES)
            and finding.direction in ("either", "more" if error < 0 else "less")
            for finding in answer.findings
        )
    ]
