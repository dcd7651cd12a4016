"""Peaks of very many jobs that differ in a few knobs, as arrays and without a Python object per job; `search` ranks them.

There is no second copy of any formula: the ledger computes everything. Jobs that differ only in micro-batch b and sequence
length s have the same tensors with the same lifetimes, and nearly every tensor has c0 + c1·b + c2·s + c3·b·s + c4·s² +
c5·b·s² bytes before it is rounded to 512. So a few timelines give the coefficients of every tensor, these give a polynomial
for every instant, and the largest value is the peak. Rounding is exact too: the padding of tensors whose bytes are not a
multiple of 512 is added class by class.

What is exact: the samples give the coefficients to the byte, and the ledger itself is run at the corners of every range. A
tensor that is not such a polynomial (the embedding's workspace) is bounded by its largest bytes per token at the corners,
and where it could affect a combination's peak, the ledger is run for that combination. Where lifetimes differ (a kernel
that is chosen by length), a range is halved, down to single combinations. Between corners that agree, nothing is checked.
Data parallelism adds or removes bytes at each instant, whatever the micro-batch: each of its sizes costs one timeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from peakcast.catalog import Device
from peakcast.core.errors import SpecError
from peakcast.core.workers import LostError
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.knobs import Ints, groups, num_combinations, with_knobs
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.tape.polynomials import Polynomials
from peakcast.timelines.timeline import Timeline

REFUSED = -1
"""The "peak" of a combination that is not a valid job."""
SAMPLE = 512
"""Samples are at multiples of this, so every term but the constant one is a multiple of 512 and is not rounded."""
ADDED = ("parallelism.data_parallel_size", "parallelism.zero_stage")
"""Knobs that change what is held during the whole step, but no activation: one timeline gives what each combination adds,
and the last one is checked at another micro-batch and length."""
_SPLIT_LENGTH = ("context_parallel_size", "tensor_parallel_size")


def sweep(
    job: TrainingJob,
    knobs: Mapping[str, Sequence[Any] | npt.NDArray[Any]],
    *,
    device: Device | None = None,
    stage: int | None = None,
    processes: int = 1,
) -> Ints:
    """Peak bytes of a steady step of `job` with each combination of `knobs`, [num_combinations]; -1 if the combination is
    not a valid job.

    `knobs`: a job's keys, dotted where nested ("parallelism.tensor_parallel_size"), each with an array of one value per
    combination. `stage`: the pipeline stage; None for the fullest. `processes`: how many share the work.

    Raises: SpecError for knobs that are not keys of a job or differ in length; LostError if a process was ended from
    outside.
    """
    columns = {name: np.asarray(values) for name, values in knobs.items()}
    length = num_combinations(job, columns)
    _place_fewest_micro_batches(job, columns)
    batch, sequence = (
        np.asarray(columns.pop(name, np.full(length, getattr(job, name))), dtype=np.int64)
        for name in ("micro_batch_size", "sequence_length")
    )
    shared = {name: values for name, values in columns.items() if name not in ADDED}
    added = {name: values for name, values in columns.items() if name in ADDED}
    variants = list(groups(added, np.arange(length)))
    variant_of = np.zeros(length, dtype=np.int64)
    for number, (_, members) in enumerate(variants):
        variant_of[members] = number
    alike = list(groups(shared, np.arange(length)))
    layouts = [variant for variant, _ in variants]
    tasks = [
        _Task(job, changes, layouts, variant_of[members], batch[members], sequence[members]) for changes, members in alike
    ]
    peaks = np.full(length, REFUSED, dtype=np.int64)
    for (_, members), found in zip(alike, _map(partial(_peaks, device, stage), tasks, processes), strict=True):
        peaks[members] = found
    return peaks


class _Task(NamedTuple):
    """Jobs that differ in micro-batch, sequence length and knobs of `ADDED`, in any order. Arrays are [num_jobs]."""

    base: TrainingJob
    changes: Mapping[str, Any]
    """The knobs in which all of them differ from `base`."""
    variants: list[dict[str, Any]]
    """The knobs of `ADDED`, for each combination that occurs."""
    variant_of: Ints
    """The index in `variants` of each job."""
    batch: Ints
    sequence: Ints


def _map(function: Callable[[_Task], Ints], tasks: Sequence[_Task], processes: int) -> Iterator[Ints]:
    """The results of `function` for each task, in order."""
    if processes < 2 or len(tasks) < 2:
        yield from map(function, tasks)
        return
    with ProcessPoolExecutor(min(processes, len(tasks))) as pool:
        try:
            yield from pool.map(function, tasks, chunksize=max(1, len(tasks) // (processes * 8)))
        except BrokenProcessPool:
            raise LostError(
                f"one of the {processes} processes of the sweep was killed, perhaps because the machine ran out of "
                "memory; ask again with fewer (processes=1)."
            ) from None


def _place_fewest_micro_batches(job: TrainingJob, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Reduce the numbers of micro-batches to the fewest with the same peak, so that they do not make jobs look
    different."""
    name = "gradient_accumulation_steps"
    if name not in columns:
        return
    if job.framework != "megatron":
        columns[name] = np.minimum(columns[name], 3)  # see layouts.base Layout.different_micro_batches
    elif job.parallelism.virtual_pipeline_stages == 1 and not job.framework_options:
        stages = columns.get("parallelism.pipeline_parallel_size", np.array([job.parallelism.pipeline_parallel_size]))
        if "parallelism.virtual_pipeline_stages" not in columns:  # see pipeline.representative_micro_batches
            columns[name] = np.minimum(columns[name], stages + 2)


def _peaks(device: Device | None, stage: int | None, task: _Task) -> Ints:
    """Peaks of the jobs of one task."""
    base, changes, variants, variant_of, batch, sequence = task
    peaks = np.full(len(batch), REFUSED, dtype=np.int64)
    sequence = np.where(np.isin(sequence, _valid_lengths(base, changes, np.unique(sequence))), sequence, 0)
    valid = np.flatnonzero((sequence > 0) & (batch > 0))
    if not len(valid):
        return peaks
    used = np.unique(variant_of[valid])
    layouts = [with_knobs(base, {**changes, **variants[v], "sequence_length": _sample_length(base, changes)}) for v in used]
    points, point_of = np.unique(np.stack([batch[valid], sequence[valid]]), axis=1, return_inverse=True)
    found = np.zeros((len(used), points.shape[1]), dtype=np.int64)
    for number in fullest_stages(layouts[0]) if stage is None else [stage]:
        found = np.maximum(found, _Asked(tuple(layouts), device, number).peaks(points))
    peaks[valid] = found[np.searchsorted(used, variant_of[valid]), point_of]
    return peaks


def _valid_lengths(base: TrainingJob, changes: Mapping[str, Any], lengths: Ints) -> list[int]:
    """Those of `lengths` with which the job is valid."""
    valid: list[int] = []
    try:
        job = with_knobs(base, {**changes, "sequence_length": _sample_length(base, changes)})
    except SpecError:
        return valid
    for length in lengths.tolist():
        try:
            job.replace(sequence_length=length)
        except SpecError:
            continue
        valid.append(length)
    return valid


def _sample_length(base: TrainingJob, changes: Mapping[str, Any]) -> int:
    """A sequence length for samples that the layout can divide."""
    sizes = {name: changes.get(f"parallelism.{name}", getattr(base.parallelism, name)) for name in _SPLIT_LENGTH}
    return SAMPLE * math.prod(int(size) for size in sizes.values())


def fullest_stages(job: TrainingJob) -> list[int]:
    """The pipeline stages that can be the fullest: the first, the second and the last. Stages between the ends hold equal
    layers if the split is even, and the first of them has the most micro-batches in flight."""
    stages = job.parallelism.pipeline_parallel_size
    return list(range(stages)) if job.parallelism.pipeline_layers else sorted({0, min(1, stages - 1), stages - 1})


@dataclass(frozen=True, slots=True)
class _Asked:
    """The ledger of one stage as a function of the layout's index, micro-batch and sequence length."""

    layouts: tuple[TrainingJob, ...]
    device: Device | None
    stage: int

    def timeline(self, layout: int, batch: int, sequence: int) -> Timeline:
        """The timeline of a steady step."""
        job = self.layouts[layout].replace(micro_batch_size=batch, sequence_length=sequence)
        rank = self.stage * (job.parallelism.world_size // job.parallelism.pipeline_parallel_size)
        return ledger(job, device=self.device, rank=rank, step="steady")

    def one_by_one(self, points: Ints) -> Ints:
        """Peaks [num_layouts, num_points] at `points` [2, num_points], each from its own ledger."""
        return np.array(
            [
                [self.timeline(layout, b, s).peak().num_bytes for b, s in points.T.tolist()]
                for layout in range(len(self.layouts))
            ],
            dtype=np.int64,
        ).reshape(len(self.layouts), -1)

    def peaks(self, points: Ints) -> Ints:
        """Peaks [num_layouts, num_points] at distinct `points`, by polynomials if that needs fewer ledgers."""
        lengths = np.unique(points[1]).tolist()
        if len(lengths) > 1:
            # the square of the length is in the attention scores, which only some kernels keep in memory
            lengths = [self.layouts[0].sequence_length * times for times in (1, 2, 3)]
        samples = [(b * SAMPLE, s) for s in lengths for b in (1, 2)]
        if points.shape[1] * len(self.layouts) <= len(samples) + len(self.layouts) + 2:
            return self.one_by_one(points)
        sampled = [self.timeline(0, b, s) for b, s in samples]
        fitted = Polynomials.through(sampled, samples)
        if fitted is None:
            return self.one_by_one(points)
        others = (self.timeline(layout, *samples[0]) for layout in range(1, len(self.layouts)))
        fitted = fitted.with_layouts([sampled[0], *others])
        if fitted is None or not fitted.adds(len(self.layouts) - 1, samples[-1], self.timeline(-1, *samples[-1])):
            each = [_Asked((layout,), self.device, self.stage).peaks(points) for layout in self.layouts]
            return np.concatenate(each)
        order = np.argsort(points[0] * points[1], kind="stable")
        found = np.empty((len(self.layouts), len(order)), dtype=np.int64)
        found[:, order] = self._by_ranges(points[:, order], fitted)
        return found

    def _by_ranges(self, points: Ints, fitted: Polynomials) -> Ints:
        """Peaks at points sorted by tokens; ranges are halved until lifetimes are the same at all corners."""
        if points.shape[1] <= 3:
            return self.one_by_one(points)
        checked = fitted.checked({corner: self.timeline(0, *corner) for corner in _corners(points)})
        if checked is None:
            half = points.shape[1] // 2
            halves = points[:, :half], points[:, half:]
            return np.concatenate([self._by_ranges(part, fitted) for part in halves], axis=1)
        found, certain = checked.peaks(points)
        for layout, point in np.argwhere(~certain).tolist():
            found[layout, point] = self.timeline(layout, *points[:, point].tolist()).peak().num_bytes
        return found


def _corners(points: Ints) -> list[tuple[int, int]]:
    """The first and the last of `points` and, if these are not the extremes of both coordinates, points that are."""
    chosen = [0, points.shape[1] - 1]
    for coordinate in points:
        for extreme in (coordinate.min(), coordinate.max()):
            if extreme not in coordinate[chosen]:
                chosen.append(int(np.argmax(coordinate == extreme)))
    return [(int(b), int(s)) for b, s in points[:, chosen].T]
