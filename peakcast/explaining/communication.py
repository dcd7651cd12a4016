"""What one rank of a job sends, to which ranks and when: every kind of collective of a step, from shapes and layout.

A rule yields `CollectiveCall`s of one pipeline stage; `communication` turns them into volumes. Volumes are those of ring
algorithms, which NCCL's tests use to judge bandwidth. Source: NVIDIA/nccl-tests doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from peakcast.answers.explanation import Collective
from peakcast.explaining import communication_data, communication_model
from peakcast.explaining.collectives import CollectiveCall, StageOfJob
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts.pipeline import pipeline_rank

SENT: dict[str, Callable[[int], Fraction]] = {
    "all-reduce": lambda n: Fraction(2 * (n - 1), n),
    "all-gather": lambda n: Fraction(n - 1, n),
    "reduce-scatter": lambda n: Fraction(n - 1, n),
    "all-to-all": lambda n: Fraction(n - 1, n),
    "send/recv": lambda n: Fraction(1),
}
"""Collective -> which fraction of the message each of n ranks sends."""
RULES: tuple[Callable[[StageOfJob], Iterator[CollectiveCall]], ...] = (
    communication_model.tensor_parallel,
    communication_model.context_parallel,
    communication_model.expert_parallel,
    communication_model.pipeline_parallel,
    communication_data.data_parallel,
)


def communication(job: TrainingJob, rank: int) -> tuple[Collective, ...]:
    """Every kind of communication of a job in one iteration (optimizer step), from the view of `rank`: first those of the
    step's layers, last those that only other pipeline stages have, with 0 calls."""
    layout, own = job.parallelism, _stage(job, rank)
    ranks_per_stage = layout.world_size // layout.pipeline_parallel_size
    in_cluster: dict[tuple[str, ...], int] = {}
    calls_of = [_calls(StageOfJob.of(job, stage)) for stage in range(layout.pipeline_parallel_size)]
    for call in (call for calls in calls_of for call in calls):
        sent = _sent(call) * _per_iteration(call, job) * ranks_per_stage
        in_cluster[call.key] = in_cluster.get(call.key, 0) + sent
    mine = {call.key: call for call in calls_of[own]}
    others = {call.key: replace(call, count=0) for calls in calls_of for call in calls if call.key not in mine}
    return tuple(
        Collective(
            axis=call.axis,
            function=call.function,
            what=call.what,
            where=call.where,
            group_size=call.group_size,
            message_bytes=call.message_bytes,
            calls_per_micro_batch=0 if call.once else call.count,
            calls_per_iteration=_per_iteration(call, job),
            sent_per_micro_batch_bytes=0 if call.once else _sent(call) * call.count,
            sent_per_iteration_bytes=_sent(call) * _per_iteration(call, job),
            sent_in_cluster_bytes=in_cluster[call.key],
            source=call.source,
        )
        for call in (*calls_of[own], *others.values())
    )


def sent_by_call(job: TrainingJob, rank: int) -> list[tuple[CollectiveCall, int]]:
    """Each kind of communication of `rank`'s own stage with the bytes that it sends for it in one iteration."""
    return [(call, _sent(call) * _per_iteration(call, job)) for call in _calls(StageOfJob.of(job, _stage(job, rank)))]


def _stage(job: TrainingJob, rank: int) -> int:
    return pipeline_rank(job.parallelism, rank, pipeline_innermost=bool(conventions(job).get("use_tp_pp_dp_mapping")))


def _calls(share: StageOfJob) -> list[CollectiveCall]:
    return [call for rule in RULES for call in rule(share) if call.count and call.group_size > 1]


@dataclass(frozen=True, slots=True)
class _Note:
    holds: Callable[[TrainingJob], bool]
    sentence: str


NOTES = (
    _Note(lambda job: True, "Left out: barriers, the loss's and the gradient norm's sums (a few bytes each), checkpoints."),
    _Note(
        lambda job: job.framework != "megatron" and job.parallelism.tensor_parallel_size > 1,
        "Tensor parallelism is counted as in Megatron-LM.",
    ),
    _Note(
        lambda job: job.architecture.moe is not None and job.parallelism.expert_parallel_size > 1,
        "Expert parallelism assumes that tokens are spread evenly; routing probabilities are left out.",
    ),
    _Note(
        lambda job: job.parallelism.sharding == "hsdp",
        "HSDP: a job does not say how large its shard groups are, so all data-parallel ranks count as one.",
    ),
    _Note(
        lambda job: job.framework != "megatron" and job.parallelism.pipeline_parallel_size > 1,
        "Pipeline stages are counted as in Megatron-LM.",
    ),
)


def notes(job: TrainingJob) -> tuple[str, ...]:
    """Sentences about what the summary assumes."""
    return tuple(note.sentence for note in NOTES if note.holds(job))


def _sent(call: CollectiveCall) -> int:
    numerator, denominator = _part(call.function, call.group_size)
    return numerator * call.message_bytes // denominator


@cache
def _part(function: str, group_size: int) -> tuple[int, int]:
    return SENT[function](group_size).as_integer_ratio()


def _per_iteration(call: CollectiveCall, job: TrainingJob) -> int:
    return call.count * (1 if call.once else job.gradient_accumulation_steps)
