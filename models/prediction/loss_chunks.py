"""The number of chunks in which Unsloth computes its loss, which depends on the memory that is free on the GPU.

Source: unsloth_zoo 2025.11.5 `fused_losses/cross_entropy_loss.py` _get_chunk_multiplier, get_chunk_size: float32 logits
over half the free memory, in multiples of 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peakcast.core.fields import FrozenMapping
from peakcast.core.units import FP32
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import Ledger, baseline

if TYPE_CHECKING:
    from peakcast.catalog import Device

MULTIPLE = 4
SHARE = 0.5
"""The part of the free memory that a chunk's logits may take."""


def with_loss_chunks(job: TrainingJob, device: Device, rank: int | None, ledger: Ledger | None) -> TrainingJob:
    """`job` with the number of chunks that Unsloth takes on `device`, where that is more than one and the job does not say;
    other jobs as they are."""
    if conventions(job).get("loss_kernel") != "chunked" or "loss_chunks" in job.framework_options:
        return job
    logits = job.num_tokens * job.architecture.vocab_size * FP32
    if chunks_of(logits, device.cuda_memory_bytes // 2) == 1:  # also where half of the GPU is taken
        return job
    base = baseline(job, device, rank, ledger=ledger)
    taken = base.phase_peaks_bytes["forward"] + base.context_bytes
    chunks = chunks_of(logits, max(device.cuda_memory_bytes - taken, device.cuda_memory_bytes // 64))
    if chunks == 1:
        return job
    return job.replace(framework_options=FrozenMapping({**job.framework_options, "loss_chunks": chunks}))


def chunks_of(logits_bytes: int, free_bytes: int) -> int:
    """The number of chunks for float32 logits of `logits_bytes` where `free_bytes` are free."""
    return max(MULTIPLE * round(logits_bytes / (SHARE * free_bytes) / MULTIPLE), 1)
