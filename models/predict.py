"""`predict`: baseline + residual + bars, whether it fits, and what the answer rests on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from peakcast.conventions import assumed_versions, conventions
from peakcast.findings import Finding, ordered
from peakcast.lengths import NUM_STEPS, lengths_change
from peakcast.models.analytical.adapter_scope import targets_taken
from peakcast.models.analytical.kernel_scope import kernels_taken
from peakcast.models.baseline import Baseline, Ledger, baseline, usable_bytes
from peakcast.models.calibration import Calibration, QuantityCalibration, calibration_for
from peakcast.models.device_memory import communicator_bytes, context_bytes
from peakcast.models.domain import OUT_OF_SCOPE_SEVERITY, difficulty, severity
from peakcast.models.features import features, of_quantity, sizes
from peakcast.models.grouping import bar_groups, residual_group
from peakcast.models.verdict import judge, leaves_out
from peakcast.prediction import QUANTITIES, Interval, Prediction
from peakcast.ranks import worst_rank
from peakcast.spec import TrainingJob
from peakcast.units import format_gib
from peakcast.versions import remarks

if TYPE_CHECKING:
    from peakcast.catalog import Device

DEFAULT_HALF_WIDTHS = {
    "peak_allocated_bytes": 0.12,
    "peak_reserved_bytes": 0.20,
    "peak_device_bytes": 0.20,
    "peak_host_bytes": 0.50,
}
"""Bars in log space where nothing was measured: a judgement, wide on purpose. The best published predictor of unseen
configurations errs by 4 % in the median, which makes about 13 % of a 90 % bar; reserved adds the allocator's history."""
WIDEST = math.log(2.0)
"""Widening stops at a factor of two either way: beyond it a bar says nothing."""
RANKS_OF_A_NODE = 8
"""GPUs of the usual machine (DGX, HGX); the host memory of a node is said for so many ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The intervals of one job and whether they rest on measurements like it."""

    intervals: dict[str, Interval]
    inside: bool


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

    `calibration` None means the shipped one of the GPU type, else its nearest relative's, else none; `UNCALIBRATED` asks
    for the baseline with default bars. `findings` are those of reading the question. A job that the ledger does not cover
    is answered, with wider bars and a finding.
    """
    if calibration is None:
        calibration = calibration_for(device)
    base = baseline(job, device, rank, ledger=ledger)
    row = features(job, device, base)
    reasons = reasons_outside(job, device, row, calibration, (*findings, *_scope(job)))
    verdict = combine(job, base, row, calibration, reasons)
    usable = usable_bytes(job, device)
    fits, why = judge(verdict.intervals, usable, reasons)
    noticed = (_beyond_positions(job), *reasons, why, _retries(base))
    return Prediction(
        gpu=device.name,
        rank=base.rank,
        **verdict.intervals,
        capacity_bytes=usable,
        fits=fits,
        peak_phase=base.peak_phase,
        phase_peaks_bytes=base.phase_peaks_bytes,
        steady_state_bytes=base.steady_state_bytes,
        first_step_peak_bytes=base.first_step_peak_bytes,
        largest=base.largest,
        composition=base.composition,
        inside_calibrated_domain=verdict.inside,
        calibration=calibration.gpu,
        assumptions=tuple(_assumptions(job, base, rank)),
        findings=ordered(finding for finding in noticed if finding),
    )


def reasons_outside(
    job: TrainingJob,
    device: Device,
    row: Mapping[str, float],
    calibration: Calibration,
    known: Iterable[Finding] = (),
) -> list[Finding]:
    """Why `job` on `device` lies outside what is modelled (`known`: what the ledger does not cover, what reading the
    question found) and outside what the calibration has seen."""
    reasons = [*known, *calibration.domain.outside(job, row)]
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
    reasons: Sequence[Finding] = (),
) -> Verdict:
    """Baseline + residual and the bars around it, for each quantity.

    A point is never below what must exist: the held bytes, and each quantity contains the one before it (device contains
    reserved contains allocated). Bars widen with the severity of `reasons`.
    """
    intervals: dict[str, Interval] = {}
    groups = bar_groups(job, base.peak_allocated_bytes)
    inside = severity(reasons) == 0
    least = base.held_bytes
    for quantity in QUANTITIES:
        size: int = getattr(base, quantity)
        learned = calibration.quantities.get(quantity)
        correction = 0.0
        if learned:
            correction = float(learned.residual.predict([of_quantity(row, base, quantity)], [residual_group(job)])[0])
        half_width, upper, measured = bar(quantity, learned, groups, reasons)
        inside = inside and (measured or (quantity == "peak_host_bytes" and size == 0))
        exact = base.start(quantity) * math.exp(correction)
        if quantity != "peak_host_bytes":
            exact = max(exact, least)
            least = round(exact)
        intervals[quantity] = Interval(
            baseline=size,
            point=round(exact),
            lower=math.floor(exact * math.exp(-half_width)),
            upper=math.ceil(exact * math.exp(half_width)),
            upper_95=math.ceil(exact * math.exp(upper)),
        )
    return Verdict(intervals=nested(intervals), inside=inside)


def bar(
    quantity: str, learned: QuantityCalibration | None, groups: Sequence[str], reasons: Sequence[Finding]
) -> tuple[float, float, bool]:
    """Half-width and one-sided bound of a quantity for a job of `groups` that lies outside by `reasons`, and whether
    measurements say so."""
    total = severity(reasons)
    never_tried = any(reason.severity >= OUT_OF_SCOPE_SEVERITY for reason in reasons)
    found = learned.intervals.outside(groups, total) if learned else None
    half_width, upper = found or (difficulty(total) * DEFAULT_HALF_WIDTHS[quantity],) * 2
    num_tried = learned.intervals.num_tried(total) if learned and not never_tried else 0
    return *at_least(half_width, upper, total, quantity, num_tried=num_tried), found is not None


def could_surely_fit(job: TrainingJob, device: Device, allocated_bytes: int) -> bool:
    """Whether `predict` may say that `job` fits when its tensors need `allocated_bytes`, without a replay: so many are
    reserved at least, and the rest of an answer (context, communicators, bar) does not depend on what is reserved."""
    calibration = calibration_for(device)
    reasons = reasons_outside(job, device, sizes(job, allocated_bytes), calibration, _scope(job))
    learned = calibration.quantities.get("peak_device_bytes")
    _, upper, _ = bar("peak_device_bytes", learned, bar_groups(job, allocated_bytes), reasons)
    least = allocated_bytes + context_bytes(device, job.versions) + communicator_bytes(job, device)
    bound = least * math.exp((learned.residual.least if learned else 0.0) + upper)
    return bound < usable_bytes(job, device) and not leaves_out(reasons, "more")


def nested(intervals: Mapping[str, Interval]) -> dict[str, Interval]:
    """The same bars made to agree: device memory contains what is reserved, which contains what is allocated. So a lower
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


def at_least(half_width: float, upper: float, severity: int, quantity: str, *, num_tried: int = 0) -> tuple[float, float]:
    """A bar for a job of `severity` is at least that many sixths of the default one, which is taken for the evidence of one
    architecture beside the `num_tried` that were predicted from as far outside; and at most WIDEST. A judgement: measured
    bars say nothing about what was not measured."""
    if severity == 0:
        return half_width, upper
    least = severity / 6 * DEFAULT_HALF_WIDTHS[quantity] / (1 + num_tried)
    return min(max(half_width, least), WIDEST), min(max(upper, least), WIDEST)


def _beyond_positions(job: TrainingJob) -> Finding | None:
    longest = max(job.sequence_length, job.decoder_sequence_length or 0)
    rows = job.architecture.most_positions
    if rows is None or longest <= rows:
        return None
    sentence = (
        f"sequence_length={longest} is beyond the {rows} positions that {job.architecture.name!r} has a table of, and the "
        f"run would fail; use at most {rows}, or a network with max_position_embeddings={longest}."
    )
    return Finding("positions_exceeded", "sequence_length", "either", sentence)


def _retries(base: Baseline) -> Finding | None:
    if not base.num_retries:
        return None
    sentence = (
        f"the simulated allocator gives cached memory back and retries {base.num_retries} times: the run would be slow and "
        "close to out of memory; try expandable_segments."
    )
    return Finding("allocator_retries", "allocator.expandable_segments", "either", sentence)


def _scope(job: TrainingJob) -> tuple[Finding, ...]:
    from peakcast.models.analytical.scope import scope_findings

    return scope_findings(job)


def _assumptions(job: TrainingJob, base: Baseline, rank: int | None) -> list[str]:
    sentences = []
    if rank is None and job.parallelism.world_size > 1:
        sentences.append(worst_rank(job, base.rank))
    sentences += remarks(job.versions)
    sentences += filter(None, [assumed_versions(job)])
    if base.communicator_bytes:
        sentences.append(
            f"NCCL is taken to use {format_gib(base.communicator_bytes)}, an estimate; it depends on the machine's links."
        )
    if job.other_memory_fraction:
        sentences.append(
            f"others hold {job.other_memory_fraction:.0%} of the GPU's memory all along (other_memory_fraction): it is not "
            "in the peaks and not there for the run."
        )
    if job.framework == "megatron" and job.architecture.moe is not None:
        equal = conventions(job).get("moe_routing", "balanced") == "balanced"
        sentences.append(
            "the experts of every rank are taken to get an equal share of the tokens; framework_options.moe_routing="
            "worst_case gives them all."
            if equal
            else "every token is taken to be routed to this rank's experts (framework_options.moe_routing=worst_case)."
        )
    elif job.parallelism.expert_parallel_size > 1:
        sentences.append("the experts of every rank are taken to get an equal share of the tokens.")
    plain_experts = job.finetuning.quantization in ("nf4", "int8") and not conventions(job).get("quantized_experts")
    if plain_experts and job.architecture.moe is not None:
        sentences.append(
            f"the experts stay in {job.precision.parameters}: bitsandbytes quantizes nn.Linear, and transformers 5 has "
            "them as plain parameters; framework_options.quantized_experts=true counts them quantized."
        )
    sentences += [targets_taken(job), kernels_taken(job)]
    if lengths_change(job):
        sentences.append(
            f"tensors are those of steps whose sequences are all as long as sequence_length={job.sequence_length}; what is "
            f"reserved is that of {NUM_STEPS} steps with lengths drawn from batch.shortest_sequence="
            f"{job.batch.shortest_sequence} on (batch.seed={job.batch.seed}), one of them the longest."
        )
    if job.optimizer.name.startswith("paged_"):
        sentences.append("paged optimizer states count as host memory; the driver moves them to the GPU as they are used.")
    if base.peak_host_bytes:
        sentences.append("host memory counts one pinned copy of what is offloaded, not the processes or loaders.")
        if job.parallelism.world_size > 1:
            ranks = min(job.parallelism.world_size, RANKS_OF_A_NODE)
            total = format_gib(ranks * base.peak_host_bytes)
            sentences.append(f"a node of {ranks} such ranks needs {total} of host memory for it.")
    else:
        sentences.append("host memory counts offloaded tensors only: none here.")
    return [sentence for sentence in sentences if sentence]
