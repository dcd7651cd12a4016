"""The sentences of an answer that say what it assumes: one function for each part of the question that leaves something
open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from peakcast.core.units import format_gib
from peakcast.core.versions import remarks
from peakcast.jobs.conventions import assumed_network, assumed_versions, conventions
from peakcast.jobs.lengths import CHANGING_STEPS, lengths_change
from peakcast.jobs.ranks import worst_rank
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import Baseline
from peakcast.models.baseline.evenly_routed import fullest_expert
from peakcast.models.baseline.measured_constants import rests_on_readings
from peakcast.models.ledger.recorded.covering import recorded_with
from peakcast.models.ledger.scope.assumptions import (
    assumption_on_adapter_targets,
    assumption_on_caches,
    assumption_on_fsdps_offload,
    assumption_on_liger_kernels,
    assumption_on_prompts,
)
from peakcast.models.prediction.verdict import ranks_of_a_node
from peakcast.models.recipes.baseline_choice import seen_run, tracer

if TYPE_CHECKING:
    from peakcast.catalog import Device

NOTABLE_SPREAD = 0.02
"""If nearly the same order of requests changes reserved memory by more than this share, the answer says so."""


def assumptions(job: TrainingJob, device: Device, base: Baseline, rank: int | None) -> tuple[str, ...]:
    """Every assumption of the answer for `rank` (None: the worst) of `job` on `device`, as sentences."""
    sentences = (
        *_of_rank_and_versions(job, base, rank),
        *_outside_the_allocator(job, device, base),
        *_of_experts(job),
        assumption_on_adapter_targets(job),
        assumption_on_fsdps_offload(job),
        assumption_on_liger_kernels(job),
        assumption_on_prompts(job),
        assumption_on_caches(job) if job.task == "train" else "",
        *_of_reserved_memory(job, base),
        *_of_host_memory(job, device, base),
    )
    return tuple(sentence for sentence in sentences if sentence)


def _of_rank_and_versions(job: TrainingJob, base: Baseline, rank: int | None) -> Iterator[str | None]:
    if rank is None and job.parallelism.world_size > 1:
        yield worst_rank(job, base.rank)
    yield from remarks(job.versions)
    recorded = recorded_with(job)
    unseen = seen_run() is None and tracer() is None  # else the tensors are those of the user's own network
    yield from (assumed_versions(job), recorded or (assumed_network(job) if unseen else ""), fullest_expert(job))


def _outside_the_allocator(job: TrainingJob, device: Device, base: Baseline) -> Iterator[str | None]:
    if base.communicator_bytes and (base.outside is None or base.outside.missing):
        yield f"NCCL uses {format_gib(base.communicator_bytes)}, an estimate that depends on the machine's links."
    yield rests_on_readings(job, device)
    if job.other_memory_fraction:
        yield (
            f"other processes hold {job.other_memory_fraction:.0%} of the GPU's memory (other_memory_fraction), which is "
            "neither part of the peaks nor available to the run."
        )


def _of_experts(job: TrainingJob) -> Iterator[str]:
    if job.framework == "megatron" and job.architecture.moe is not None:
        equal = conventions(job).get("moe_routing", "balanced") == "balanced"
        yield (
            "the router sends every rank's experts an equal share of the tokens; framework_options.moe_routing=worst_case "
            "sends this rank's all of them."
            if equal
            else "the router sends every token to this rank's experts (framework_options.moe_routing=worst_case)."
        )
    elif job.parallelism.expert_parallel_size > 1:
        yield "the router sends every rank's experts an equal share of the tokens."
    plain_experts = job.finetuning.quantization in ("nf4", "int8") and not conventions(job).get("quantized_experts")
    if plain_experts and job.architecture.moe is not None:
        yield (
            f"the experts stay in {job.precision.parameters}: bitsandbytes quantizes nn.Linear, and transformers 5 has "
            "them as plain parameters; framework_options.quantized_experts=true counts them quantized."
        )


def _of_reserved_memory(job: TrainingJob, base: Baseline) -> Iterator[str]:
    if lengths_change(job) and seen_run() is None:
        yield (
            f"tensors are those of steps whose sequences are all as long as sequence_length={job.sequence_length}; what is "
            f"reserved is that of {CHANGING_STEPS} steps with lengths drawn from batch.shortest_sequence="
            f"{job.batch.shortest_sequence} on (batch.seed={job.batch.seed}), one of them the longest."
        )
    if base.reserved_range_bytes is not None:
        least, most = base.reserved_range_bytes
        if most / least - 1 > NOTABLE_SPREAD:
            yield (
                f"what the allocator reserves depends on the exact order of requests: {format_gib(least)} to "
                f"{format_gib(most)} where some tensors go a few operations later, as with another release; the bar covers "
                "it."
            )


def _of_host_memory(job: TrainingJob, device: Device, base: Baseline) -> Iterator[str]:
    if job.optimizer.is_paged:
        yield "paged optimizer states count as host memory; the driver moves them to the GPU as they are used."
    if base.peak_host_bytes:
        yield "host memory is one pinned copy of what is offloaded, without processes and data loaders."
        if job.parallelism.world_size > 1:
            ranks = ranks_of_a_node(job, device)
            total = format_gib(ranks * base.peak_host_bytes)
            yield f"a node of {ranks} such ranks needs {total} of host memory for it."
