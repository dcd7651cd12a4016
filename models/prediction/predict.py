"""`predict`: baseline, residual and bars, whether the job fits, and what the answer is based on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from peakcast.answers.prediction import Prediction
from peakcast.core.findings import Finding, ordered
from peakcast.core.units import GIB
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import Baseline, Ledger, baseline, usable_bytes
from peakcast.models.baseline.device_memory import communicator_bytes, contexts_and_kernels_bytes
from peakcast.models.baseline.measured_constants import outside
from peakcast.models.baseline.reserved_findings import reserved_findings
from peakcast.models.calibration.bars import bar_of
from peakcast.models.calibration.calibration import Calibration, calibration_for
from peakcast.models.calibration.domain import severity
from peakcast.models.calibration.features import features, kinds, sizes
from peakcast.models.calibration.grouping import bar_groups
from peakcast.models.prediction.assumptions import assumptions
from peakcast.models.prediction.cache_findings import cache_findings
from peakcast.models.prediction.combining import combine
from peakcast.models.prediction.device_scope import device_findings
from peakcast.models.prediction.loss_chunks import with_loss_chunks
from peakcast.models.prediction.outside_findings import outside_estimated
from peakcast.models.prediction.recipe_findings import left_out_by_recipes
from peakcast.models.prediction.verdict import judge, leaves_out, limits, prevented
from peakcast.models.prediction.version_findings import versions_matter
from peakcast.models.prediction.zero3_findings import weights_stay_gathered
from peakcast.models.recipes.baseline_choice import seen_run

if TYPE_CHECKING:
    from peakcast.catalog import Device


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
    job = with_loss_chunks(job, device, rank, ledger)
    base = baseline(job, device, rank, ledger=ledger)
    row = features(job, device, base)
    known = (*findings, *known_of(job), *device_findings(job, device))
    reasons = reasons_outside(job, device, row, calibration, known)
    intervals = combine(job, base, row, calibration, device, known)
    judged = judge(intervals, limits(job, device), reasons)
    noticed = [*reasons, judged.finding, *cache_findings(base, usable_bytes(job, device))]
    noticed.append(outside_estimated(base, intervals["peak_device_bytes"].point))
    noticed.append(weights_stay_gathered(job, base))
    told: dict[str, Any] = {**intervals, **_from_baseline(base)}
    here = copy_context()  # what is computed later uses the timelines chosen now
    return Prediction(
        gpu=device.name,
        rank=base.rank,
        capacity_bytes=usable_bytes(job, device),
        fits=judged.fits,
        limit=judged.limit,
        **told,
        inside_calibrated_domain=calibration.has_rows_of(device.name) and not severity(reasons),
        calibration=calibration.gpu,
        assumptions=assumptions(job, device, base, rank),
        found=ordered(finding for finding in noticed if finding),
        compare_releases=partial(here.run, versions_matter, job, device, base) if ledger is None else tuple,
    )


def reasons_outside(
    job: TrainingJob,
    device: Device,
    row: Mapping[str, float],
    calibration: Calibration,
    known: Iterable[Finding] = (),
) -> list[Finding]:
    """Why `job` on `device` is outside what is modelled, and outside the domain of `calibration`. (`Interval.rests_on` says
    the same of each quantity.) `known`: what the ledger does not cover, and what reading the question found."""
    reasons = [*known, *calibration.domain.outside(job, row)]
    if calibration.gpu == "none":
        sentence = "the bars rest on no measurement; run `peakcast collect` and `peakcast fit` to have some."
        reasons.append(Finding("not_calibrated", "gpu", "either", sentence))
    elif calibration.gpu != device.name:
        sentence = f"the bars come from measurements on {calibration.gpu}, not on {device.name}."
        reasons.append(Finding("gpu_not_measured", "gpu", "either", sentence))
    return reasons


def could_surely_fit(job: TrainingJob, device: Device, allocated_bytes: int) -> bool:
    """Whether `predict` may say that `job` fits if its tensors need `allocated_bytes`, without a replay: reserved memory is
    at least that, and the rest of an answer (context, communicators) does not depend on it. The bound assumes a job that
    caches nothing, whose bar is the narrowest."""
    calibration = calibration_for(device)
    read = outside(job, device)
    estimate = contexts_and_kernels_bytes(job, device) + communicator_bytes(job, device)
    least = allocated_bytes + (read.num_bytes if read is not None else estimate)
    row = {**sizes(job, allocated_bytes), **kinds(job), "gib_over_start": GIB / least, "log2_reserved_over_allocated": 0.0}
    learned = calibration.quantities.get("peak_device_bytes")
    known = (*known_of(job), *device_findings(job, device))
    bar = bar_of("peak_device_bytes", learned, job, row, bar_groups(job), device.name, known)
    bound = least * math.exp((learned.residual.least if learned else 0.0) + bar.upper)
    if read is not None:
        reserved = calibration.quantities.get("peak_reserved_bytes")
        least_reserved = allocated_bytes * math.exp(reserved.residual.least if reserved else 0.0)
        bound = (least_reserved + read.num_bytes) * math.exp(bar.upper)
    return bound < usable_bytes(job, device) and not (leaves_out(known, "more") or prevented(known))


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


def _from_baseline(base: Baseline) -> dict[str, Any]:
    """What a prediction says of the baseline as it is."""
    return {
        "peak_phase": base.peak_phase,
        "phase_peaks_bytes": base.phase_peaks_bytes | base.generation_peaks_bytes,
        "steady_state_bytes": base.steady_state_bytes,
        "first_step_peak_bytes": base.first_step_peak_bytes,
        "largest": base.largest,
        "composition": base.composition,
    }


def known_of(job: TrainingJob) -> tuple[Finding, ...]:
    """What is known of `job` before anything is computed: what is not covered, what is ignored, what would fail. A setting
    that the ledger ignores changes nothing where the user's own run was seen."""
    from peakcast.models.ledger.scope.ignored import ignored_findings
    from peakcast.models.ledger.scope.scope import scope_findings

    ignored = () if seen_run() is not None else ignored_findings(job)
    return (*scope_findings(job), *ignored, *_beyond_positions(job), *reserved_findings(job), *left_out_by_recipes(job))
