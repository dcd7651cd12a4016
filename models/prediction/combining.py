"""The four intervals of an answer: baseline and residual with their bar, made consistent with what was read, with nearly
the same order of requests, and with each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from peakcast.answers.prediction import QUANTITIES, Interval
from peakcast.core.findings import Finding
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import Baseline, usable_bytes
from peakcast.models.calibration.bars import bar_of
from peakcast.models.calibration.calibration import Calibration
from peakcast.models.calibration.features import of_quantity
from peakcast.models.calibration.grouping import bar_groups, residual_group

if TYPE_CHECKING:
    from peakcast.catalog import Device


def combine(
    job: TrainingJob,
    base: Baseline,
    row: Mapping[str, float],
    calibration: Calibration,
    device: Device,
    known: Sequence[Finding] = (),
) -> dict[str, Interval]:
    """Each quantity's baseline, corrected by the residual, with its bar, for a job on `device`. `known`: what the ledger
    does not cover, and what reading the question found.

    A point is never below what must exist: the held bytes, and each quantity contains the one before it (device contains
    reserved, which contains allocated).
    """
    intervals: dict[str, Interval] = {}
    groups = bar_groups(job)
    least = base.held_bytes
    for quantity in QUANTITIES:
        learned = calibration.quantities.get(quantity)
        own = of_quantity(row, base, quantity)
        correction = float(learned.residual.predict([own], [residual_group(job)])[0]) if learned else 0.0
        bar = bar_of(quantity, learned, job, own, groups, device.name, known)
        start, exact = getattr(base, quantity), base.start(quantity) * math.exp(correction)
        if quantity != "peak_host_bytes":
            start, exact = _with_readings(quantity, base, least, start, exact)
            exact = max(exact, least)
            least = round(exact)
        intervals[quantity] = Interval(
            baseline=start,
            point=round(exact),
            lower=math.floor(exact * math.exp(-bar.below)),
            upper=math.ceil(exact * math.exp(bar.half_width)),
            upper_95=math.ceil(exact * math.exp(bar.upper)),
            rests_on=bar.rests_on,
        )
    within = _within_memory(_with_let_go(_with_nearby_orders(intervals, base), base), base, usable_bytes(job, device))
    return nested(within)


def _with_readings(quantity: str, base: Baseline, reserved: int, start: int, exact: float) -> tuple[int, float]:
    """The baseline and the point of a quantity, given what was read on the machine. If all that the job holds outside
    PyTorch's allocator was read, device memory is `reserved` plus that, as the residual has only learned what other
    machines hold there. If something was not read, device memory is at least that sum."""
    read = base.outside
    if quantity != "peak_device_bytes" or read is None:
        return start, exact
    known = reserved + read.num_bytes
    return base.peak_reserved_bytes + read.num_bytes, max(exact, known) if read.missing else known


def _with_nearby_orders(intervals: Mapping[str, Interval], base: Baseline) -> dict[str, Interval]:
    """`intervals`, widened to include everything that the allocator reserves when requests come in nearly the same
    order."""
    widened = dict(intervals)
    for quantity in ("peak_reserved_bytes", "peak_device_bytes") if base.reserved_range_bytes else ():
        bar = intervals[quantity]
        least, most = (bar.point + end - base.peak_reserved_bytes for end in base.reserved_range_bytes or ())
        widened[quantity] = replace(
            bar, lower=min(bar.lower, least), upper=max(bar.upper, most), upper_95=max(bar.upper_95, most)
        )
    return widened


def _with_let_go(intervals: Mapping[str, Interval], base: Baseline) -> dict[str, Interval]:
    """`intervals`, widened down to a run in which NCCL lets go of its collectives' tensors at once."""
    widened = dict(intervals)
    if base.let_go_bytes is not None:
        allocated, reserved = base.let_go_bytes
        less = {
            "peak_allocated_bytes": base.replayed_allocated_bytes - allocated,
            **dict.fromkeys(("peak_reserved_bytes", "peak_device_bytes"), base.peak_reserved_bytes - reserved),
        }
        for quantity, num_bytes in less.items():
            bar = intervals[quantity]
            widened[quantity] = replace(bar, lower=min(bar.lower, bar.point - num_bytes))
    return widened


def _within_memory(intervals: Mapping[str, Interval], base: Baseline, there: int) -> dict[str, Interval]:
    """`intervals` that go beyond the `there` bytes of the GPU only by what does not wait: before it runs out of memory, the
    allocator returns the blocks that do."""
    limited = dict(intervals)
    for quantity in ("peak_reserved_bytes", "peak_device_bytes") if base.waiting_bytes else ():
        bar = intervals[quantity]
        rest = 1 - base.waiting_bytes / max(bar.point, 1)
        ends = {name: getattr(bar, name) for name in ("lower", "point", "upper", "upper_95")}
        limited[quantity] = replace(bar, **{name: max(min(end, there), round(end * rest)) for name, end in ends.items()})
    return limited


def nested(intervals: Mapping[str, Interval]) -> dict[str, Interval]:
    """`intervals`, made consistent: device memory contains reserved memory, which contains allocated memory. So a lower
    bound of one is a lower bound of the next, and an upper bound of one is an upper bound of those inside it."""
    result = dict(intervals)
    chain = [name for name in QUANTITIES if name != "peak_host_bytes"]
    for inner, outer in itertools.pairwise(chain):
        bar = result[outer]
        result[outer] = replace(bar, lower=min(max(bar.lower, result[inner].lower), bar.point))
    for outer, inner in itertools.pairwise(reversed(chain)):
        bar, limit = result[inner], result[outer]
        result[inner] = replace(
            bar,
            upper=max(min(bar.upper, limit.upper), bar.point),
            upper_95=max(min(bar.upper_95, limit.upper_95), bar.point),
        )
    return result
