"""What a plan costs beside memory: operations done again, and bytes sent. Both decide the order of plans that fit."""

from __future__ import annotations

from peakcast.explaining.communication import sent_per_iteration
from peakcast.spec import TrainingJob

FORWARD_SHARE = 1 / 3
"""Of a step's operations; backward has twice as many (Narayanan et al. 2021, arXiv:2104.04473, appendix)."""


def recompute(job: TrainingJob) -> float:
    """Operations recomputed in backward, as a fraction of a step without recomputation.

    A layer's forward is 24·b·s·h² + 4·b·s²·h operations, its attention scores 4·b·s²·h (Korthikanti et al. 2022,
    arXiv:2205.05198, section 5): full checkpointing recomputes all of it, selective checkpointing the scores.
    """
    checkpointing, a = job.activation_checkpointing, job.architecture
    if checkpointing.mode == "none":
        return 0.0
    if checkpointing.mode == "selective":
        return FORWARD_SHARE * job.sequence_length / (6 * a.hidden_size + job.sequence_length)
    return FORWARD_SHARE / checkpointing.every_n_layers


def price(job: TrainingJob) -> tuple[float, int]:
    """What a plan is ordered by before what it sends: operations done again, then kinds of tensors that are offloaded."""
    return recompute(job), sum((job.offload.optimizer, job.offload.parameters, job.offload.activations))


def sent_bytes(job: TrainingJob) -> int:
    """What the first or the last pipeline stage's rank sends per optimizer step, whichever sends more."""
    last = job.parallelism.world_size - 1
    return max(sent_per_iteration(job, rank) for rank in {0, last})
