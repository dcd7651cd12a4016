"""Known reasons why published runs hold more memory than the simulated allocator reserves, which cannot be simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from peakcast.core.findings import Finding
from peakcast.core.versions import compare
from peakcast.jobs.conventions import conventions
from peakcast.jobs.lengths import lengths_change
from peakcast.jobs.spec import TrainingJob

LOADS_SHARDS_ON_GPU = "<4.35"
"""Releases of transformers with which published runs kept what loading had left in the cache: 4.34.1
(huggingface/optimum-benchmark at commit 6a25a6db, ten rows of Llama-2-7B, 9.6 to 10 GB; its checkpoint is 13.48 GB, the
first shard of it 9.98). Runs of commit 9a0db86b in the same month hold nothing of it."""


def reserved_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """Findings for a job whose replay is known to reserve too little: its tensors are counted, but what they leave in the
    cache depends on timing or data. The bars come from rows that have this effect."""
    cases = _OF_TRAINING if job.task == "train" else _OF_INFERENCE
    found = (*(case for case in cases if case.holds(job)), *(case for case in _OF_BOTH if case.holds(job)))
    return tuple(Finding("reserved_beyond_replay", case.parameter, "more", case.sentence) for case in found)


class _Case(NamedTuple):
    """A kind of job of which published runs hold more than the replay reserves."""

    holds: Callable[[TrainingJob], bool]
    parameter: str
    sentence: str


def _has_experts_of_transformers(job: TrainingJob) -> bool:
    return job.framework == "huggingface" and job.architecture.moe is not None


def _has_experts_of_torchtitan(job: TrainingJob) -> bool:
    return conventions(job).get("experts_implementation") == "torchtitan"


def _shards_nf4_with_fsdp1(job: TrainingJob) -> bool:
    return job.finetuning.quantization == "nf4" and job.parallelism.sharding == "fsdp1"


def _has_no_shard(job: TrainingJob) -> bool:
    return job.parallelism.sharding == "no_shard"


def _has_zero_optimizer_on_host(job: TrainingJob) -> bool:
    return job.framework != "megatron" and job.parallelism.zero_stage in (1, 2) and job.offload.optimizer


def _loads_shards_on_gpu(job: TrainingJob) -> bool:
    """Whether an old release of transformers loads each shard of the checkpoint on the GPU."""
    release = job.versions.get("transformers")
    return job.framework == "huggingface" and release is not None and compare(release, LOADS_SHARDS_ON_GPU)


_OF_TRAINING = (
    _Case(
        _has_experts_of_transformers,
        "moe",
        "experts' tensors change size with what the router sends, so the allocator's cache grows step by step: "
        "published runs hold 0.5 to 8 GiB more than is simulated with equal shares.",
    ),
    _Case(
        _has_experts_of_torchtitan,
        "moe",
        "experts' tensors change size with what the router sends, so the allocator's cache grows step by step: in "
        "a published run of torchtitan from 63.6 GiB after the first step to 78.1 after 100.",
    ),
    _Case(
        _shards_nf4_with_fsdp1,
        "finetuning.quantization",
        "published runs of 4-bit weights under FSDP1 reserved up to 1.7 GiB more than is simulated, the more the "
        "larger the network, for a reason that is not known.",
    ),
    _Case(
        _has_no_shard,
        "parallelism.sharding",
        "FSDP's NO_SHARD is replayed as DistributedDataParallel, without what building its units leaves in the "
        "cache: two published runs reserved 0.4 and 0.5 GiB more.",
    ),
    _Case(
        _has_zero_optimizer_on_host,
        "offload.optimizer",
        "published runs of stage 2 with the optimizer on the host reserved up to 9 % more than is simulated, for a "
        "reason that is not known.",
    ),
)
_OF_INFERENCE = (
    _Case(
        _loads_shards_on_gpu,
        "task",
        "what loading the weights leaves in the cache is not counted: published runs held 9.6 GB "
        "more, as much as a shard of the checkpoint; torch.cuda.empty_cache() after loading gives it back.",
    ),
)
_OF_BOTH = (
    _Case(
        lengths_change,
        "batch.shortest_sequence",
        "what sequences of changing lengths leave in the cache depends on which come when: published runs of "
        "ms-swift reserved up to 72 % more than is simulated over eight steps.",
    ),
)
