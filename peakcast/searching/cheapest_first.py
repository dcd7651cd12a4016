"""Visits candidates in the order of their costs other than memory, and yields those that fit in the GPU's room, with their
peaks.

Candidates that differ only in the micro-batch are a *series*: they send the same bytes, and each needs at least as much
memory as the one before, so the first that does not fit ends the series. Three tests rule out a series at little cost: what
its ranks hold throughout the step is already too much (no timeline needed); the same shards with sequence parallelism,
which saves memory, and without interleaving, which adds to it, do not fit (one timeline, shared by many series); or the
timelines of two shallower networks show that the deep one does not fit.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from peakcast.catalog import Device
from peakcast.core.findings import Finding
from peakcast.core.workers import LostError
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.baseline.lower_bounds import bound_by_depth, persistent_bytes
from peakcast.models.baseline.sweep import fullest_stages
from peakcast.models.ledger.layouts.pipeline import representative_micro_batches
from peakcast.models.recipes.lent import Lent, lending
from peakcast.models.recipes.shelf import wants_recipe
from peakcast.searching.costs import Cost, cost, order, sending

UNLIMITED_BYTES = 2**62
"""More bytes than any job needs."""
AT_ONCE = 64
"""Series that each process handles together; few, so that little work is wasted when the walk ends."""


@dataclass(frozen=True, slots=True)
class FittingJob:
    """A job that fits: its index among all candidates, its costs, and the peak in bytes of the stage that needs most."""

    index: int
    cost: Cost
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class SearchInput:
    """The input of the walk: all candidates, the GPU type, and the bytes available on it."""

    every: Sequence[TrainingJob]
    device: Device
    room_bytes: int
    findings: tuple[Finding, ...] = ()
    """Findings from reading the question."""
    lent: Lent | None = None
    """Recipes that must be used, if the question brought any."""


class SearchWorkers:
    """Calls `function(question, item)` for many items, in order, on several processes; with one, in this process. The
    question is sent to each process once."""

    def __init__(self, question: SearchInput, processes: int) -> None:
        self.question, self.processes = question, processes
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> SearchWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[SearchInput, Any], Any], items: Sequence[Any]) -> list[Any]:
        """The result for each item. Raises: LostError if a process was ended from outside."""
        if self.processes < 2 or len(items) < 2:
            return [function(self.question, item) for item in items]
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.processes, initializer=_remember, initargs=(self.question,))
        chunk = max(1, len(items) // (self.processes * 8))
        try:
            return list(self._pool.map(_ask, [function] * len(items), items, chunksize=chunk))
        except BrokenProcessPool:
            raise LostError(
                f"one of the {self.processes} processes of the search was killed, perhaps because the machine ran out of "
                "memory; ask again with fewer (processes=1)."
            ) from None


_asked: list[SearchInput] = []


def _remember(question: SearchInput) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    _asked[:] = [question]
    lending(question.lent).__enter__()  # until the process ends


def _ask(function: Callable[[SearchInput, Any], Any], item: Any) -> Any:
    return function(_asked[0], item)


LEAST = 1.01
"""`least_of` may need up to this multiple of what the job itself needs: sequence parallelism gathers into additional
buffers, and a schedule without interleaving keeps an output longer. Both are below one percent of a peak."""
Series = tuple[int, ...]
"""Indices of the candidates that differ only in the micro-batch, from the smallest micro-batch to the largest."""


def series(every: Sequence[TrainingJob]) -> list[Series]:
    """All candidates, grouped into series."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, job in enumerate(every):
        layout = job.parallelism
        # weights that are gathered for each micro-batch are sent as often as there are micro-batches
        apart = job.micro_batch_size if layout.sharding != "none" or layout.zero_stage == 3 else 0
        found.setdefault((layout, job.activation_checkpointing, job.offload, apart), []).append(index)
    return [tuple(sorted(members, key=lambda index: every[index].micro_batch_size)) for members in found.values()]


def held_throughout(every: Sequence[TrainingJob], members: Series) -> int:
    """Bytes that the first or the last stage, whichever has more, holds throughout each step after the first."""
    job = every[members[0]]
    return max(persistent_bytes(job, stage) for stage in {0, job.parallelism.pipeline_parallel_size - 1})


def in_order(workers: SearchWorkers, left: Iterable[Series], say: Callable[[str], None]) -> Iterator[FittingJob]:
    """The candidates of `left` that fit, in the order of their costs, then of their peaks."""
    every, left = workers.question.every, list(left)
    say(f"what {len(left):,} layouts cost")
    found = [(index, one) for costs in workers.map(_costs, left) for index, one in costs]
    series_of = {index: number for number, members in enumerate(left) for index in members}
    ranked = sorted((order(every[index], one), index, one) for index, one in found)
    no_room: dict[int, int] = {}
    """Number of a series -> the smallest micro-batch that is known not to fit."""
    num_looked = 0
    for wave in _waves(ranked, AT_ONCE * workers.processes):
        say(f"{num_looked:,} of {len(ranked):,} looked at: the peaks of the next {len(wave):,}")
        num_looked += len(wave)
        asked: dict[int, list[int]] = {}
        for _, index, _ in wave:
            number = series_of[index]
            if every[index].micro_batch_size < no_room.get(number, UNLIMITED_BYTES):
                asked.setdefault(number, []).append(index)
        members = [tuple(sorted(some, key=lambda index: every[index].micro_batch_size)) for some in asked.values()]
        peaks: dict[int, int] = {}
        for number, some, sizes in zip(asked, members, workers.map(_peaks, members), strict=True):
            peaks.update(zip(some, sizes, strict=False))
            if len(sizes) < len(some):
                no_room[number] = every[some[len(sizes)]].micro_batch_size
        for _, ties in groupby(wave, key=lambda item: item[0]):
            with_room = [(peaks[index], index, one) for _, index, one in ties if index in peaks]
            yield from (FittingJob(index, one, peak) for peak, index, one in sorted(with_room, key=lambda item: item[:2]))


Ranked = tuple[tuple[float, int, int], int, Cost]
"""The key by which a candidate is ordered, its index among all candidates, and its cost."""


def _waves(ranked: Sequence[Ranked], size: int) -> Iterator[list[Ranked]]:
    """`ranked` in pieces of about `size` candidates; candidates with equal keys stay in one piece."""
    wave: list[Ranked] = []
    for _, ties in groupby(ranked, key=lambda item: item[0]):
        wave += ties
        if len(wave) >= size:
            yield wave
            wave = []
    if wave:
        yield wave


def _costs(question: SearchInput, members: Series) -> list[tuple[int, Cost]]:
    """(index, cost) of each candidate of a series; all of them send the same bytes."""
    first = question.every[members[0]]
    if len(members) > 1:  # activations are sent once per token of the step, in however many micro-batches
        together = first.micro_batch_size * first.gradient_accumulation_steps
        first = first.replace(micro_batch_size=together, gradient_accumulation_steps=1)
    sent = sending(first, question.device)
    return [(index, cost(question.every[index], question.device, sent)) for index in members]


def _peaks(question: SearchInput, members: Series) -> list[int]:
    """The peaks in bytes of `members`, in order, without the first that does not fit and all after it."""
    every, device, room = question.every, question.device, question.room_bytes
    least = least_of(every[members[0]])
    if no_less(least, device) > room * LEAST:
        return []
    if least != every[members[0]] and fullest(least, device, int(room * LEAST)) > room * LEAST:
        return []
    peaks: list[int] = []
    for index in members:
        peak = fullest(every[index], device, room)
        if peak > room:
            break
        peaks.append(peak)
    return peaks


def no_less(job: TrainingJob, device: Device) -> int:
    """A lower bound of `fullest` in bytes; 0 if no bound is cheaper to compute."""
    if job.framework == "megatron" or wants_recipe(job):  # there may be no recipe for a shallower network
        return 0
    return bound_by_depth(job, lambda shallow: fullest(shallow, device, UNLIMITED_BYTES))


def least_of(job: TrainingJob) -> TrainingJob:
    """The job with the same shards that needs least memory: without interleaving, which only adds memory, and with sequence
    parallelism, which only saves it."""
    layout = job.parallelism
    shares = layout.tensor_parallel_size > 1 and job.framework != "huggingface"  # huggingface plans have no SP
    least = replace(layout, sequence_parallel=shares, virtual_pipeline_stages=1, pipeline_schedule="1f1b")
    return job.replace(parallelism=least)


def fullest(job: TrainingJob, device: Device, room_bytes: int) -> int:
    """Peak bytes of the pipeline stage that needs most; if a stage needs more than `room_bytes`, the peak of the first such
    stage found."""
    layout, steps = job.parallelism, job.gradient_accumulation_steps
    # the fewest micro-batches that give the same peak
    stages, virtual = layout.pipeline_parallel_size, layout.virtual_pipeline_stages
    enough = max(min(steps, 2), representative_micro_batches(stages, virtual, 0, steps))
    return _fullest(job if enough == steps else job.replace(gradient_accumulation_steps=enough), device, room_bytes)


@lru_cache(maxsize=8192)
def _fullest(job: TrainingJob, device: Device, room_bytes: int) -> int:
    most, layout = 0, job.parallelism
    for stage in fullest_stages(job):
        rank = stage * (layout.world_size // layout.pipeline_parallel_size)
        most = max(most, ledger(job, device=device, rank=rank, step="steady").peak().num_bytes)
        if most > room_bytes:
            break
    return most
