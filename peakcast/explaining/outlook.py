"""Further answers after a prediction: which GPU types would fit, how the ranks differ, what no number includes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from peakcast import catalog
from peakcast.answers.prediction import GpuVerdict, Prediction, RankPeak
from peakcast.catalog import Device
from peakcast.catalog.constants import own_constants
from peakcast.core.findings import Finding
from peakcast.jobs.conventions import conventions
from peakcast.jobs.lengths import lengths_change
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import Baseline, baseline, usable_bytes
from peakcast.models.baseline.device_memory import communicator_bytes, contexts_and_kernels_bytes
from peakcast.models.baseline.measured_constants import outside
from peakcast.models.calibration.calibration import calibration_for
from peakcast.models.calibration.features import features
from peakcast.models.ledger.layouts.pipeline import pipeline_rank, stage_chunks
from peakcast.models.prediction.combining import combine
from peakcast.models.prediction.device_scope import device_findings
from peakcast.models.prediction.predict import known_of, reasons_outside
from peakcast.models.prediction.verdict import judge, limits


def gpu_verdicts(
    job: TrainingJob, device: Device, rank: int | None, findings: Iterable[Finding] = ()
) -> tuple[GpuVerdict, ...]:
    """Whether `rank` of `job` would fit on each GPU type of the catalog, the smallest first.

    Tensors are assumed to be as on `device`: GPU types differ in the context and in their calibration's bars, and otherwise
    only by some tens of MiB of library workspaces. `findings` are those from reading the question.
    """
    base, known = baseline(job, device, rank), (*findings, *known_of(job))
    verdicts = []
    for found in sorted(map(catalog.gpu, catalog.gpu_names()), key=lambda gpu: gpu.cuda_memory_bytes):
        other = replace(
            found,
            host_memory_bytes=device.host_memory_bytes,
            gpus_per_node=device.gpus_per_node,
            constants=device.constants if found.name == device.name else own_constants(found.name),
        )
        moved = _moved(base, job, other)
        calibration = calibration_for(other)
        row = features(job, other, moved)
        open_questions = (*known, *device_findings(job, other))
        reasons = reasons_outside(job, other, row, calibration, open_questions)
        intervals = combine(job, moved, row, calibration, other, open_questions)
        judged = judge(intervals, limits(job, other), reasons)
        verdicts.append(GpuVerdict(gpu=other.name, capacity_bytes=usable_bytes(job, other), fits=judged.fits))
    return tuple(verdicts)


def _moved(base: Baseline, job: TrainingJob, device: Device) -> Baseline:
    context = contexts_and_kernels_bytes(job, device)
    communicators = communicator_bytes(job, device)
    return replace(
        base,
        context_bytes=context,
        communicator_bytes=communicators,
        peak_device_bytes=base.peak_reserved_bytes + context + communicators,
        outside=outside(job, device),
    )


# -- ranks --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """The ranks of one pipeline stage."""

    number: int
    rank: int
    num_ranks: int
    layers: tuple[int, ...]


def stages(job: TrainingJob) -> tuple[Stage, ...]:
    """One entry for each distinct rank: all ranks of one pipeline stage hold the same shapes."""
    layout, innermost = job.parallelism, bool(conventions(job).get("use_tp_pp_dp_mapping"))
    of_stage: dict[int, list[int]] = {}
    for rank in range(layout.world_size):
        of_stage.setdefault(pipeline_rank(layout, rank, pipeline_innermost=innermost), []).append(rank)
    found = []
    for number, ranks in sorted(of_stage.items()):
        chunks = stage_chunks(job.architecture.num_hidden_layers, layout, number)
        layers = tuple(layer for chunk in chunks for layer in chunk.layers)
        found.append(Stage(number, ranks[0], len(ranks), layers))
    return tuple(found)


def rank_peak(stage: Stage, prediction: Prediction) -> RankPeak:
    """The peaks of `stage`, from the prediction for its first rank."""
    return RankPeak(
        rank=stage.rank,
        num_ranks=stage.num_ranks,
        stage=stage.number,
        layers=stage.layers,
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        peak_device_bytes=prediction.peak_device_bytes,
        fits=prediction.fits,
        peak_phase=prediction.peak_phase,
    )


# -- what is not modelled -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Gap:
    holds: Callable[[TrainingJob], bool]
    sentence: str


GAPS = (
    _Gap(lambda job: job.task == "train", "evaluation, generation and saving checkpoints during the run"),
    _Gap(
        lambda job: job.task == "inference", "the memory of a server such as vLLM or TGI: this is transformers' generate()"
    ),
    _Gap(lambda job: not job.other_memory_fraction, "other processes on the GPU (give their part, other_memory_fraction)"),
    _Gap(lambda job: job.task == "train" and not lengths_change(job), "batches of other lengths (give the longest)"),
    _Gap(lambda job: job.architecture.moe is not None, "uneven routing: tokens are spread evenly over the experts"),
    _Gap(lambda job: job.parallelism.world_size > 1, "NCCL's buffers beyond an estimate; blocks kept for other streams"),
)


def not_modelled(job: TrainingJob) -> tuple[str, ...]:
    """What runs of such jobs may allocate in general and no number includes, as sentences. Findings say what is not
    modelled of this job in particular."""
    return tuple(gap.sentence for gap in GAPS if gap.holds(job))
