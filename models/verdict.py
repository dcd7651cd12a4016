"""Whether a job fits: its intervals against the capacity, and what they leave out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from peakcast.findings import Direction, Finding
from peakcast.prediction import Fits, Interval
from peakcast.units import format_gib


def judge(
    intervals: Mapping[str, Interval], capacity_bytes: int, findings: Iterable[Finding] = ()
) -> tuple[Fits, Finding | None]:
    """Whether the job fits, and a finding where the answer needs one.

    `yes`: the one-sided 95 % bound of device memory is below the capacity, and nothing is left out that needs more. `no`:
    even the lower ends are above it, both of device memory and of the tensors with what lies outside PyTorch, and nothing
    is left out that needs less. Else `uncertain`. (Near its limit the allocator frees cached segments and tries again, so a
    job whose cache alone would not fit may still run.)

    Left out is what a finding calls uncounted (`findings.KINDS`): what the ledger does not count or a configuration asks
    for and a job cannot say. Its size is not known, so no bar covers it; its direction decides which verdict it changes.
    Where the direction is unknown too, and where something was only not measured, bars are wider, and no verdict changes.
    """
    found = tuple(findings)
    device, allocated = intervals["peak_device_bytes"], intervals["peak_allocated_bytes"]
    outside_torch = max(0, device.point - intervals["peak_reserved_bytes"].point)
    if device.upper_95 < capacity_bytes:
        return ("uncertain" if leaves_out(found, "more") else "yes"), None
    if device.lower <= capacity_bytes:
        return "uncertain", None
    if allocated.lower + outside_torch <= capacity_bytes:
        return "uncertain", Finding(
            "cache_beyond_capacity",
            "allocator.expandable_segments",
            "less",
            f"the allocator's cache would not fit ({format_gib(device.point)} of {format_gib(capacity_bytes)}), the "
            "tensors might: it may run slowly, giving cached memory back and retrying; try expandable_segments.",
        )
    return ("uncertain" if leaves_out(found, "less") else "no"), None


def leaves_out(findings: Iterable[Finding], direction: Direction) -> bool:
    """Whether something of unknown size is left out that moves the peak in `direction`."""
    return any(finding.uncounted and finding.direction == direction for finding in findings)
