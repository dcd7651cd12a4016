"""`predict`: baseline, residual and bars, whether the job fits, and what the answer is based on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from peakcast.answers.prediction import QUANTITIES, Interval, Prediction
from peakcast.core.findings import Finding, ordered
from peakcast.core.units import GIB, format_gib
from peakcast.core.versions import remarks
from peakcast.jobs.conventions import assumed_versions, conventions
from peakcast.jobs.lengths import NUM_STEPS, lengths_change
from peakcast.jobs.ranks import worst_rank
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import Baseline, Ledger, baseline, usable_bytes
from peakcast.models.baseline.device_memory import communicator_bytes, context_bytes
from peakcast.models.baseline.evenly_routed import fullest_expert
from peakcast.models.baseline.measured_constants import outside, rests_on_readings
from peakcast.models.calibration.bars import bar_of
from peakcast.models.calibration.calibration import Calibration, calibration_for
from peakcast.models.calibration.features import features, kinds, of_quantity, sizes
from peakcast.models.calibration.grouping import bar_groups, residual_group
from peakcast.models.ledger.recorded.covering import recorded_with
from peakcast.models.ledger.scope.adapter import targets_taken
from peakcast.models.ledger.scope.kernel import kernels_taken
from peakcast.models.prediction.device_scope import device_findings
from peakcast.models.prediction.outside_findings import outside_estimated
from peakcast.models.prediction.reserved_findings import reserved_findings
from peakcast.models.prediction.verdict import judge, leaves_out, limits, prevented, ranks_of_a_node
from peakcast.models.prediction.version_findings import versions_matter
from peakcast.models.recipes.baseline_choice import seen_run

if TYPE_CHECKING:
    from peakcast.catalog import Device

NOTABLE_SPREAD = 0.02
"""If nearly the same order of requests changes reserved memory by more than this share, the answer says so."""


def predict(
    job: TrainingJob,
    device: Device,
    rank: int | None = None,
    calibration: Calibration | None = None,
    *,
    ledger: Ledger | None = None,
    findings: Iterable[Finding] = (),
) -> Prediction:
    """The four quantities of `rank` (None: the worst rank) of `job` on `device`, with bars.

    `calibration` None: the shipped one of the GPU type, else its nearest relative's, else none; `UNCALIBRATED`: the
    baseline with default bars. `findings`: those of reading the question. A job that the ledger does not cover is answered
    too, with wider bars and a finding.
    """
    if calibration is None:
        calibration = calibration_for(device)
    base = baseline(job, device, rank, ledger=ledger)
    row = features(job, device, base)
    known = (*findings, *known_of(job), *device_findings(job, device))
    reasons = reasons_outside(job, device, row, calibration, known)
    intervals = combine(job, base, row, calibration, device.name, known)
    judged = judge(intervals, limits(job, device), reasons)
    noticed = [*reasons, judged.finding, retries(base), outside_estimated(base, intervals["peak_device_bytes"].point)]
    if ledger is None:
        noticed.append(versions_matter(job, device, base))
    return Prediction(
        gpu=device.name,
        rank=base.rank,
        **intervals,
        capacity_bytes=usable_bytes(job, device),
        fits=judged.fits,
        limit=judged.limit,
        peak_phase=base.peak_phase,
        phase_peaks_bytes=base.phase_peaks_bytes | base.generation_peaks_bytes,
        steady_state_bytes=base.steady_state_bytes,
        first_step_peak_bytes=base.first_step_peak_bytes,
        largest=base.largest,
        composition=base.composition,
        inside_calibrated_domain=intervals["peak_allocated_bytes"].rests_on == "measurements",
        calibration=calibration.gpu,
        assumptions=tuple(_assumptions(job, device, base, rank)),
        findings=ordered(finding for finding in noticed if finding),
    )


def reasons_outside(
    job: TrainingJob,
    device: Device,
    row: Mapping[str, float],
    calibration: Calibration,
    known: Iterable[Finding] = (),
) -> list[Finding]:
    """Why `job` on `device` is outside what is modelled, and outside the rows of allocated memory, which has the most rows.
    (`Interval.rests_on` says the same of each other quantity.) `known`: what the ledger does not cover, and what reading
    the question found."""
    learned = calibration.quantities.get("peak_allocated_bytes")
    reasons = [*known, *(learned.domain.outside(job, row) if learned else ())]
    if calibration.gpu == "none":
        sentence = "no measurements stand behind the bars; run `peakcast collect` and `peakcast fit` to have some."
        reasons.append(Finding("not_calibrated", "gpu", "either", sentence))
    elif calibration.gpu != device.name:
        sentence = f"the bars come from measurements on {calibration.gpu}, not on {device.name}."
        reasons.append(Finding("gpu_not_measured", "gpu", "either", sentence))
    return reasons


def combine(
    job: TrainingJob,
    base: Baseline,
    row: Mapping[str, float],
    calibration: Calibration,
    gpu: str,
    known: Sequence[Finding] = (),
) -> dict[str, Interval]:
    """Each quantity's baseline, corrected by the residual, with its bar, for a job on the GPU type `gpu`. `known`: what the
    ledger does not cover, and what reading the question found.

    A point is never below what must exist: the held bytes, and each quantity contains the one before it (device contains
    reserved, which contains allocated).
    """
    intervals: dict[str, Interval] = {}
    groups = bar_groups(job, base.peak_allocated_bytes)
    least = base.held_bytes
    for quantity in QUANTITIES:
        learned = calibration.quantities.get(quantity)
        own = of_quantity(row, base, quantity)
        correction = float(learned.residual.predict([own], [residual_group(job)])[0]) if learned else 0.0
        bar = bar_of(quantity, learned, job, own, groups, gpu, known)
        start, exact = getattr(base, quantity), base.start(quantity) * math.exp(correction)
        if quantity != "peak_host_bytes":
            start, exact = _with_readings(quantity, base, least, start, exact)
            exact = max(exact, least)
            least = round(exact)
        intervals[quantity] = Interval(
            baseline=start,
            point=round(exact),
            lower=math.floor(exact * math.exp(-bar.half_width)),
            upper=math.ceil(exact * math.exp(bar.half_width)),
            upper_95=math.ceil(exact * math.exp(bar.upper)),
            rests_on=bar.rests_on,
        )
    return nested(_with_nearby_orders(intervals, base))


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


def _with_readings(quantity: str, base: Baseline, reserved: int, start: int, exact: float) -> tuple[int, float]:
    """The baseline and the point of a quantity, given what was read on the machine. If all that the job holds outside
    PyTorch's allocator was read, device memory is `reserved` plus that, as the residual has only learned what other
    machines hold there. If something was not read, device memory is at least that sum."""
    read = base.outside
    if quantity != "peak_device_bytes" or read is None:
        return start, exact
    known = reserved + read.num_bytes
    return base.peak_reserved_bytes + read.num_bytes, max(exact, known) if read.missing else known


def could_surely_fit(job: TrainingJob, device: Device, allocated_bytes: int) -> bool:
    """Whether `predict` may say that `job` fits if its tensors need `allocated_bytes`, without a replay: reserved memory is
    at least that, and the rest of an answer (context, communicators) does not depend on it. The bound assumes a job that
    caches nothing, whose bar is the narrowest."""
    calibration = calibration_for(device)
    read = outside(job, device)
    estimate = context_bytes(device, job.versions) + communicator_bytes(job, device)
    least = allocated_bytes + (read.num_bytes if read is not None else estimate)
    row = {**sizes(job, allocated_bytes), **kinds(job), "gib_over_start": GIB / least, "log2_reserved_over_allocated": 0.0}
    learned = calibration.quantities.get("peak_device_bytes")
    known = (*known_of(job), *device_findings(job, device))
    bar = bar_of("peak_device_bytes", learned, job, row, bar_groups(job, allocated_bytes), device.name, known)
    bound = least * math.exp((learned.residual.least if learned else 0.0) + bar.upper)
    if read is not None:
        reserved = calibration.quantities.get("peak_reserved_bytes")
        least_reserved = allocated_bytes * math.exp(reserved.residual.least if reserved else 0.0)
        bound = (least_reserved + read.num_bytes) * math.exp(bar.upper)
    return bound < usable_bytes(job, device) and not (leaves_out(known, "more") or prevented(known))


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


def _spread(ends: tuple[int, int]) -> float:
    """By what share the larger end exceeds the smaller."""
    return ends[1] / ends[0] - 1


def _beyond_positions(job: TrainingJob) -> tuple[Finding, ...]:
    """A finding if the sequence is longer than the network's table of positions."""
    longest = max(job.sequence_length, job.decoder_sequence_length or 0)
    rows = job.architecture.most_positions
    if rows is None or longest <= rows:
        return ()
    sentence = (
        f"sequence_length={longest} is beyond the {rows} positions that {job.architecture.name!r} has a table of, and the "
        f"run would fail; use at most {rows}, or a network with max_position_embeddings={longest}."
    )
    return (Finding("positions_exceeded", "sequence_length", "either", sentence),)


def retries(base: Baseline) -> Finding | None:
    """A finding if the simulated allocator has to give cached memory back to the driver; nvidia-smi may or may not have
    shown the peak."""
    if not base.num_retries:
        return None
    sentence = (
        f"the simulated allocator gives cached memory back and retries {base.num_retries} times: the run would be slow and "
        "close to out of memory; try expandable_segments."
    )
    return Finding("allocator_retries", "allocator.expandable_segments", "either", sentence)


def known_of(job: TrainingJob) -> tuple[Finding, ...]:
    """What is known of `job` before anything is computed: what is not covered, what is ignored, what would fail."""
    from peakcast.models.ledger.scope.ignored import ignored_findings
    from peakcast.models.ledger.scope.scope import scope_findings

    return (*scope_findings(job), *ignored_findings(job), *_beyond_positions(job), *reserved_findings(job))


def _assumptions(job: TrainingJob, device: Device, base: Baseline, rank: int | None) -> list[str]:
    """The sentences of an answer that say what it assumes."""
    sentences = []
    if rank is None and job.parallelism.world_size > 1:
        sentences.append(worst_rank(job, base.rank))
    sentences += remarks(job.versions)
    sentences += filter(None, [assumed_versions(job), recorded_with(job), fullest_expert(job)])
    if base.communicator_bytes and (base.outside is None or base.outside.missing):
        sentences.append(
            f"NCCL uses {format_gib(base.communicator_bytes)}, an estimate that depends on the machine's links."
        )
    sentences.append(rests_on_readings(job, device))
    if job.other_memory_fraction:
        sentences.append(
            f"other processes hold {job.other_memory_fraction:.0%} of the GPU's memory (other_memory_fraction), which is "
            "neither part of the peaks nor available to the run."
        )
    if job.framework == "megatron" and job.architecture.moe is not None:
        equal = conventions(job).get("moe_routing", "balanced") == "balanced"
        sentences.append(
            "the router sends every rank's experts an equal share of the tokens; framework_options.moe_routing=worst_case "
            "sends this rank's all of them."
            if equal
            else "the router sends every token to this rank's experts (framework_options.moe_routing=worst_case)."
        )
    elif job.parallelism.expert_parallel_size > 1:
        sentences.append("the router sends every rank's experts an equal share of the tokens.")
    plain_experts = job.finetuning.quantization in ("nf4", "int8") and not conventions(job).get("quantized_experts")
    if plain_experts and job.architecture.moe is not None:
        sentences.append(
            f"the experts stay in {job.precision.parameters}: bitsandbytes quantizes nn.Linear, and transformers 5 has "
            "them as plain parameters; framework_options.quantized_experts=true counts them quantized."
        )
    sentences += [targets_taken(job), kernels_taken(job)]
    if lengths_change(job) and seen_run() is None:
        sentences.append(
            f"tensors are those of steps whose sequences are all as long as sequence_length={job.sequence_length}; what is "
            f"reserved is that of {NUM_STEPS} steps with lengths drawn from batch.shortest_sequence="
            f"{job.batch.shortest_sequence} on (batch.seed={job.batch.seed}), one of them the longest."
        )
    if base.reserved_range_bytes is not None and _spread(base.reserved_range_bytes) > NOTABLE_SPREAD:
        least, most = map(format_gib, base.reserved_range_bytes)
        sentences.append(
            f"what the allocator reserves depends on the exact order of requests: {least} to {most} where some tensors go "
            "a few operations later, as with another release; the bar covers it."
        )
    if job.optimizer.name.startswith("paged_"):
        sentences.append("paged optimizer states count as host memory; the driver moves them to the GPU as they are used.")
    if base.peak_host_bytes:
        sentences.append("host memory is one pinned copy of what is offloaded, without processes and data loaders.")
        if job.parallelism.world_size > 1:
            ranks = ranks_of_a_node(job, device)
            total = format_gib(ranks * base.peak_host_bytes)
            sentences.append(f"a node of {ranks} such ranks needs {total} of host memory for it.")
    return [sentence for sentence in sentences if sentence]
