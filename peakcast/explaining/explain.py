"""`explain`: makes an `Explanation` from a job and its timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from peakcast.answers.advised import Advice
from peakcast.answers.explanation import Explanation, ModuleRow
from peakcast.catalog import Device
from peakcast.explaining import advice as advising
from peakcast.explaining.communication import communication, notes
from peakcast.explaining.compare import compare
from peakcast.explaining.groups import communication_groups
from peakcast.explaining.layer_table import module_rows
from peakcast.explaining.rank_parameters import parameter_rows, unsharded
from peakcast.explaining.reason import peak_reason
from peakcast.jobs.ranks import worst_rank
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.fullest_ranks import fullest_ranks
from peakcast.models.baseline.ledger import ledger
from peakcast.models.baseline.measured_constants import rests_on_readings
from peakcast.models.ledger.scope.scope import scope_findings, traced_findings
from peakcast.timelines.timeline import Timeline

NO_KERNELS = "a trace has no kernels: their workspaces, and libraries', are not in it."
SOME_KERNELS = (
    "of what kernels of {} allocate for themselves, the trace includes only cuBLAS's workspaces, sums and sorted indices."
)
Source = Callable[[TrainingJob, int], Timeline]
"""Returns the timeline of a steady step of a job's rank."""


def explain(
    job: TrainingJob,
    device: Device | None = None,
    rank: int | None = None,
    against: TrainingJob | None = None,
    source: Literal["ledger", "trace"] = "ledger",
    timeline_of: Source | None = None,
) -> Explanation:
    """The explanation of `rank` (None: the worst) of `job`. `timeline_of` makes the timelines, by default with the ledger
    for `device`; `against` is a second job to compare with."""
    timeline_of = timeline_of or (lambda other, number: ledger(other, device=device, rank=number))
    chosen, timeline = _worst(job, timeline_of) if rank is None else (rank, timeline_of(job, rank))
    parameters = parameter_rows(job, chosen)
    comparison = None
    if against is not None:
        other_rank = rank if rank is not None and rank < against.parallelism.world_size else None
        other = _worst(against, timeline_of)[1] if other_rank is None else timeline_of(against, other_rank)
        comparison = compare((job, timeline), (against, other))
    return Explanation(
        architecture=job.architecture.name,
        gpu=device.name if device else None,
        rank=chosen,
        source=source,
        peak=peak_reason(timeline, job),
        timeline=timeline,
        modules=module_rows(timeline, job, parameters),
        unsharded_modules=_unsharded(job, timeline_of) if source == "ledger" else (),
        parameters=parameters,
        groups=communication_groups(job, chosen),
        communication=communication(job, chosen),
        communication_notes=notes(job) if job.parallelism.world_size > 1 else (),
        advice=_advice(job, device, chosen),
        together=advising.first_to_try(job, device, chosen),
        comparison=comparison,
        assumptions=tuple(_assumptions(job, device, source, rank, chosen)),
        findings=scope_findings(job) if source == "ledger" else traced_findings(job),
    )


def of_module(timeline: Timeline, name: str, device: Device | None = None) -> Explanation:
    """The explanation of a traced step of the user's own module (for `device`, if given): the parts that need no job."""
    reason = peak_reason(timeline, None)
    return Explanation(
        architecture=name,
        gpu=device.name if device else None,
        rank=0,
        source="trace",
        peak=reason,
        timeline=timeline,
        modules=module_rows(timeline, None, ()),
        assumptions=(_kernels(device),),
    )


def _kernels(device: Device | None) -> str:
    """A sentence on which kernels' memory a trace for `device` includes."""
    return NO_KERNELS if device is None else SOME_KERNELS.format(device.name)


def _worst(job: TrainingJob, timeline_of: Source) -> tuple[int, Timeline]:
    found = [(rank, timeline_of(job, rank)) for rank in fullest_ranks(job)]
    return max(found, key=lambda item: item[1].peak().num_bytes)


def _unsharded(job: TrainingJob, timeline_of: Source) -> tuple[ModuleRow, ...]:
    whole = unsharded(job) if job.parallelism.world_size > 1 else None
    return module_rows(timeline_of(whole, 0), whole, parameter_rows(whole, 0)) if whole is not None else ()


def _advice(job: TrainingJob, device: Device | None, rank: int) -> tuple[Advice, ...]:
    found = advising.advice(job, device, rank)
    if device is not None:
        found += advising.expandable_segments(job, device, rank)
    return tuple(sorted(found, key=lambda item: -item.saved_bytes))


def _assumptions(job: TrainingJob, device: Device | None, source: str, asked: int | None, rank: int) -> list[str]:
    sentences = []
    if source == "trace":
        sentences.append(_kernels(device))
    elif device is None:
        sentences.append("no GPU type is given, so library workspaces and what kernels allocate inside are left out.")
    elif sentence := rests_on_readings(job, device):
        sentences.append(sentence)
    if asked is None and job.parallelism.world_size > 1:
        sentences.append(worst_rank(job, rank))
    return sentences
