"""Whether a job fits: its intervals compared with the memory that a rank has, and what the intervals leave out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from peakcast.answers.prediction import Fits, Interval, Limit
from peakcast.core.findings import KINDS, Direction, Finding, guessed
from peakcast.core.units import GIB, format_gib
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import usable_bytes

if TYPE_CHECKING:
    from peakcast.catalog import Device

USUAL_HOST_BYTES_PER_GPU = 256 * GIB
"""Host memory for each GPU of a usual node, a large one: 2 TB for 8 GPUs (NVIDIA DGX H100 data sheet)."""

FROM_BEST: tuple[Fits, ...] = ("yes", "uncertain", "no")
AGAINST: dict[Fits, Direction] = {"yes": "more", "no": "less"}
"""Verdict -> direction of a finding that contradicts it."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, the limit that decides it, and a finding if one is needed."""

    fits: Fits
    limit: Limit
    finding: Finding | None = None


def limits(job: TrainingJob, device: Device) -> tuple[Limit, ...]:
    """The memory that a rank of `job` has, in bytes: of the GPU, of what its allocator may reserve, and of the node's host
    memory, which the ranks on a node share. Without `device.host_memory_bytes`, a usual node's, marked as not known."""
    found = [Limit("peak_device_bytes", usable_bytes(job, device))]
    fraction = job.allocator.per_process_memory_fraction
    if fraction is not None:
        found.append(Limit("peak_reserved_bytes", int(fraction * device.cuda_memory_bytes)))
    if device.host_memory_bytes is None:
        return (*found, Limit("peak_host_bytes", USUAL_HOST_BYTES_PER_GPU, known=False))
    return (*found, Limit("peak_host_bytes", device.host_memory_bytes // ranks_of_a_node(job, device)))


def ranks_of_a_node(job: TrainingJob, device: Device) -> int:
    """How many ranks of `job` share a node's host memory."""
    return min(job.parallelism.world_size, device.gpus_per_node)


def judge(intervals: Mapping[str, Interval], limits: Sequence[Limit], findings: Iterable[Finding] = ()) -> Judgement:
    """Whether the job fits.

    Each limit has a verdict. `yes`: the one-sided 95 % bound of its quantity is not above it. `no`: even the lower end is
    above it and, for GPU memory, so is the lower end of the tensors alone plus what is outside PyTorch. Otherwise
    `uncertain`. (Near its limit the allocator frees cached segments and tries again, so a job whose cache does not fit may
    still run.) A limit that is not known never gives `no`. The worst verdict counts.

    Then the findings. One is called uncounted (`findings.KINDS`) if the ledger does not count something that the job has,
    or if a configuration asks for something that a job cannot express. Its size is not known, so no bar covers it: with
    direction "more" it turns `yes` into `uncertain`, with direction "less" it turns `no` into `uncertain`. If the direction
    is not known, or something was only never measured, bars are wider, and no verdict changes. A job that would fail
    (`findings.Kind.prevents`) does not fit either: `yes` becomes `uncertain`.
    """
    found = tuple(findings)
    judged = [_judged(intervals, limit) for limit in limits]
    worst = max(judged, key=lambda judgement: FROM_BEST.index(judgement.fits))
    against = AGAINST.get(worst.fits)
    if (against is not None and leaves_out(found, against)) or (worst.fits == "yes" and prevented(found)):
        return replace(worst, fits="uncertain")
    return worst


def leaves_out(findings: Iterable[Finding], direction: Direction) -> bool:
    """Whether something of unknown size is left out that moves the peak in `direction`: of a network that is only guessed,
    either way."""
    found = tuple(findings)
    return guessed(found) or any(finding.uncounted and finding.direction == direction for finding in found)


def prevented(findings: Iterable[Finding]) -> bool:
    """Whether a finding says that the run would fail."""
    return any(KINDS[finding.code].prevents for finding in findings)


def _judged(intervals: Mapping[str, Interval], limit: Limit) -> Judgement:
    """The verdict of one limit. `there` is the memory that it allows."""
    bar, there = intervals[limit.quantity], limit.num_bytes
    if not limit.known:
        return Judgement("yes", limit) if bar.point <= there else Judgement("uncertain", limit, _host_memory(bar, there))
    if bar.upper_95 <= there:
        return Judgement("yes", limit)
    if bar.lower <= there:
        return Judgement("uncertain", limit)
    device, reserved = intervals["peak_device_bytes"], intervals["peak_reserved_bytes"]
    outside_torch = max(0, device.point - reserved.point) if limit.quantity == "peak_device_bytes" else 0
    if limit.quantity != "peak_host_bytes" and intervals["peak_allocated_bytes"].lower + outside_torch <= there:
        return Judgement("uncertain", limit, _cache(bar, there))
    return Judgement("no", limit)


def _cache(bar: Interval, there: int) -> Finding:
    sentence = (
        f"the allocator's cache would not fit ({format_gib(bar.point)} of {format_gib(there)}), the tensors might: the run "
        "may be slow, since the allocator frees its cache and tries again; try allocator.expandable_segments=true."
    )
    return Finding("cache_beyond_capacity", "allocator.expandable_segments", "less", sentence)


def _host_memory(bar: Interval, there: int) -> Finding:
    sentence = (
        f"a rank needs {format_gib(bar.point)} of host memory, and a usual node has at most {format_gib(there)} a GPU; "
        "give --host-memory-gib, the host memory of a node, to have it checked."
    )
    return Finding("host_memory_not_given", "host_memory_gib", "either", sentence)
