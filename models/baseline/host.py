"""Pinned host memory of a rank that offloads: the tensors that were moved to the host, as PyTorch's pinned allocator rounds
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from peakcast.core.units import power_of_two
from peakcast.jobs.conventions import conventions, fsdp_offloads
from peakcast.jobs.spec import Offload, TrainingJob
from peakcast.models.ledger.huggingface.host import paged_state_bytes, pinned_activation_bytes, zero_host_memory
from peakcast.timelines.timeline import Category, Timeline

_OFFLOADED = {
    "parameters": (Category.PARAMETERS, Category.GRADIENTS),
    "optimizer": (Category.OPTIMIZER_STATES, Category.MAIN_PARAMETERS),
    "activations": (Category.ACTIVATIONS,),
}
"""Which categories each switch of `Offload` moves to the host."""


def host_bytes(job: TrainingJob, steady_step: Callable[[TrainingJob], Timeline]) -> int:
    """Pinned host bytes of a rank: 0 without offloading. With it, every tensor that the same job without offloading has on
    the GPU at its fullest moment and the offloading job does not, each rounded up to a power of two. For Hugging Face's
    offloaded activations, each copy is counted.

    Assumes: one pinned copy of each; pageable memory of loaders and processes is not counted. An estimate.

    Source: CachingHostAllocator rounds every request to the next power of two (torch 2.11; where-memory-goes J).

    States of a paged optimizer count too: managed memory, which the driver moves between host and GPU as it is used. ZeRO's
    tensors are counted one by one (`models/ledger/layouts/zero_host.py`), including pageable ones.
    """
    megatron = job.framework == "megatron"  # its optimizer is neither ZeRO's nor bitsandbytes'
    if job.parallelism.zero_stage and not megatron and (job.offload.optimizer or job.offload.parameters):
        return zero_host_memory(job).num_bytes(pinned=bool(conventions(job).get("offload_pin_memory", True)))
    one_by_one = job.framework in ("huggingface", "torch") and job.offload.activations
    copies = sum(power_of_two(size) for size in pinned_activation_bytes(job)) if one_by_one else 0
    if job.optimizer.is_paged and job.task == "train" and not megatron:
        copies += paged_state_bytes(job)
    offload = replace(job.offload, optimizer=True) if fsdp_offloads(job) else job.offload
    switches = [s for s in _OFFLOADED if getattr(offload, s) and not (one_by_one and s == "activations")]
    moved = [category for switch in switches for category in _OFFLOADED[switch]]
    if not moved:
        return copies
    resident = _fullest(steady_step(job.replace(offload=Offload())), moved)
    staying = _fullest(steady_step(job), moved)
    copies += max(0, sum(resident.values()) - sum(staying.values()))
    if megatron and job.offload.optimizer:  # fp32 parameters and gradients, as large as two fp32 states
        states = Category.OPTIMIZER_STATES  # (megatron-core 0.16.1 `hybrid_optimizer.py` `cpu_copy_map_grad`)
        copies += max(0, resident[states] - staying[states])
    return copies


def _fullest(step: Timeline, categories: list[Category]) -> dict[Category, int]:
    """Bytes of each category at the instant where it has most, every tensor rounded up to a power of two."""
    most: dict[Category, int] = {}
    sizes = np.array([power_of_two(size) for size in step.num_bytes.tolist()], dtype=np.int64)
    for category in categories:
        mine = step.categories == category
        change = np.zeros(len(step.phases) + 1, dtype=np.int64)
        np.add.at(change, np.minimum(step.born[mine], len(step.phases)), sizes[mine])
        np.subtract.at(change, np.minimum(step.dies[mine], len(step.phases)), sizes[mine])
        most[category] = int(np.cumsum(change)[:-1].max(initial=0))
    return most

