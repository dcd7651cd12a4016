"""The analytical baseline of every quantity, from the ledger, the simulated allocator and known constants. Nothing here is
fitted to measurements; `residual.py` learns the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from peakcast.jobs.conventions import torch_release
from peakcast.jobs.lengths import CHANGING_STEPS, lengths_change
from peakcast.jobs.lengths import steps as steps_of_lengths
from peakcast.jobs.ranks import ranks_by_shard
from peakcast.jobs.spec import TrainingJob
from peakcast.models.allocator.caching_allocator import SimulatedOutOfMemoryError
from peakcast.models.allocator.nearby_orders import nearby_orders
from peakcast.models.allocator.replay import Replay, replay_run
from peakcast.models.baseline.device_memory import communicator_bytes, contexts_and_kernels_bytes
from peakcast.models.baseline.evenly_routed import evenly_routed
from peakcast.models.baseline.host import host_bytes
from peakcast.models.baseline.measured_constants import Outside, outside
from peakcast.models.ledger.scope.adapter_targets import require_adapters
from peakcast.models.recipes.baseline_choice import BaselineName, SeenRun, Trace, chosen, seen_run, tracer
from peakcast.timelines.timeline import Category, Timeline

if TYPE_CHECKING:
    from peakcast.catalog import Device

Ledger = Callable[..., Timeline]
"""`ledger(job, device=..., rank=..., step="first" | "steady") -> Timeline`."""

RUN = ("first", "steady")
"""The steps that represent a whole run."""
NUM_LARGEST = 8
NEARLY = 0.95
"""A rank that allocates at least this share of the worst rank's peak may reserve more than that rank."""

_HELD = np.zeros(len(Category), dtype=bool)
_HELD[
    [
        Category.PARAMETERS,
        Category.MAIN_PARAMETERS,
        Category.REFERENCE_PARAMETERS,
        Category.GRADIENTS,
        Category.OPTIMIZER_STATES,
    ]
] = True
"""By category, whether it counts as held."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The analytical answer for one rank, in bytes. Peaks are over the whole run: the first step and any later one."""

    rank: int
    peak_allocated_bytes: int
    """Largest sum of the timeline's tensors, each rounded to 512 bytes."""
    replayed_allocated_bytes: int
    """The peak as the allocator counts it, including the slack of its blocks. The residual starts from it."""
    peak_reserved_bytes: int
    """The bytes that the simulated allocator holds at the end; it releases cached segments if they would not fit on this
    GPU. If the job does not fit at all, the value on a GPU with enough memory."""
    num_retries: int
    """How often it has to give segments back. Each time is slow, and only 0 is comfortable."""
    context_bytes: int
    """Estimate of what CUDA contexts and their kernels take outside PyTorch."""
    communicator_bytes: int
    """Estimate of what NCCL takes outside PyTorch; 0 for one rank."""
    peak_device_bytes: int
    """reserved + context + communicators."""
    peak_host_bytes: int
    held_bytes: int
    """The largest sum of parameters, gradients and optimizer states at any instant: no run needs less."""
    peak_phase: str
    phase_peaks_bytes: dict[str, int] = field(default_factory=dict)
    """Allocated peak by phase name of a steady step."""
    generation_peaks_bytes: dict[str, int] = field(default_factory=dict)
    """Of inference, that of "prefill" and of "decode", both of which are forward."""
    steady_state_bytes: int = 0
    """Allocated between steps, after gradients are released."""
    first_step_peak_bytes: int = 0
    largest: tuple[tuple[str, str, int, int], ...] = ()
    """(name, category, bytes, number of tensors) of the largest groups at the peak."""
    composition: dict[str, int] = field(default_factory=dict)
    """Bytes by category name at the peak, largest first."""
    reserved_range_bytes: tuple[int, int] | None = None
    """The least and the most that the allocator reserves if requests come in nearly the same order; None if only one order
    was replayed."""
    let_go_bytes: tuple[int, int] | None = None
    """Peaks (allocated, reserved) of an observed run without what NCCL keeps for a time that is not known; None if it keeps
    nothing."""
    waiting_bytes: int = 0
    """By how much less is reserved if no freed block waits for another stream. Rather than run out of memory, the allocator
    waits for the GPU and returns such blocks (`synchronize_and_free_events`)."""
    outside: Outside | None = None
    """Readings of this machine that replace the estimates of context and communicators; None if there are none."""

    def start(self, quantity: str) -> int:
        """Bytes from which the residual of a quantity counts: its baseline; for allocated memory, that with the allocator's
        slack."""
        value: int = self.replayed_allocated_bytes if quantity == "peak_allocated_bytes" else getattr(self, quantity)
        return value


def baseline(job: TrainingJob, device: Device, rank: int | None = None, *, ledger: Ledger | None = None) -> Baseline:
    """The analytical peaks of `rank`. None: the worst rank, which is the one whose steady step allocates most among one
    rank of each pipeline stage, as ranks of a stage hold the same shapes; reserved memory is then the largest among the
    ranks that allocate nearly as much, because another one may reserve more.

    `ledger`: a source of timelines; default `peakcast.models.baseline.ledger.ledger`.
    """
    if job.finetuning.method != "full" and job.framework != "megatron":
        require_adapters(job)
    return _of_the_ledger(job, device, rank, chosen(), tracer()) if ledger is None else _baseline(job, device, rank, ledger)


@lru_cache(maxsize=8)
def _of_the_ledger(
    job: TrainingJob, device: Device, rank: int | None, source: BaselineName, trace: Trace | None
) -> Baseline:
    """The baseline from the ledger. It is cached by the source of timelines and the tracer too, because parts of an answer
    that are computed later, such as other GPU types, must use the same ones."""
    if source == "trace":  # a trace does not have the building of the network
        return _baseline(job, device, rank, _analytical_ledger())
    from peakcast.models.baseline.building import building

    return _baseline(job, device, rank, _analytical_ledger(), lambda chosen: building(job, chosen))


def _baseline(
    job: TrainingJob,
    device: Device,
    rank: int | None,
    ledger: Ledger,
    before: Callable[[int], Sequence[Timeline]] = lambda chosen: (),
) -> Baseline:
    """The baseline. `before`: the timelines of what a rank does before its first step."""
    ledger = lru_cache(maxsize=None)(ledger)  # what is reserved, allocated and pinned follows from the same few timelines
    steadies = _steady_steps(job, device, rank, ledger)
    chosen = max(steadies, key=lambda candidate: steadies[candidate].peak().num_bytes)
    steady, first = steadies[chosen], ledger(job, device=device, rank=chosen, step="first")
    context = contexts_and_kernels_bytes(job, device)
    communicators = communicator_bytes(job, device)
    read = outside(job, device)
    replays = _Replays(job, device, ledger, before, read.num_bytes if read is not None else context + communicators)
    seen = seen_run()
    replayed = replays.of_seen(seen, chosen) if seen is not None else replays.of_chosen(chosen)
    run = replayed.run
    if rank is None:
        others = (replays.of_rank(one).peak_reserved_bytes for one in _nearly_as_full(job, chosen, steadies))
        run = replace(run, peak_reserved_bytes=max((run.peak_reserved_bytes, *others)))
    if evenly_routed(job) != job and seen is None:
        run = _with_fullest_expert(run, _highest_peak_bytes((steady, first)) - _highest_peak_bytes(replayed.steps))
    return Baseline(
        rank=chosen,
        replayed_allocated_bytes=run.peak_allocated_bytes,
        peak_reserved_bytes=run.peak_reserved_bytes,
        num_retries=run.num_retries,
        context_bytes=context,
        communicator_bytes=communicators,
        peak_device_bytes=run.peak_reserved_bytes + context + communicators,
        peak_host_bytes=host_bytes(job, lambda j: ledger(j, device=device, rank=chosen, step="steady")),
        generation_peaks_bytes=_generation_peaks(steady) if job.task == "inference" else {},
        reserved_range_bytes=replayed.reserved_range,
        let_go_bytes=replayed.let_go,
        waiting_bytes=replayed.waiting_bytes,
        outside=read,
        **_of_the_steps(steady, first, *replayed.graphed),
    )


class _Replayed(NamedTuple):
    """What the replay of a rank's run gives."""

    run: Replay
    steps: Sequence[Timeline]
    """The steps that were replayed, or the whole run that was observed."""
    graphed: Sequence[Timeline] = ()
    """The steps that CUDA graphs add."""
    reserved_range: tuple[int, int] | None = None
    """As `Baseline.reserved_range_bytes`."""
    let_go: tuple[int, int] | None = None
    """As `Baseline.let_go_bytes`."""
    waiting_bytes: int = 0
    """As `Baseline.waiting_bytes`."""


@dataclass(frozen=True, slots=True)
class _Replays:
    """Replays what ranks of `job` do on `device`, of whose memory `outside_bytes` are held outside PyTorch. `before`: the
    timelines of what a rank does before its first step."""

    job: TrainingJob
    device: Device
    ledger: Ledger
    before: Callable[[int], Sequence[Timeline]]
    outside_bytes: int

    def of_chosen(self, rank: int) -> _Replayed:
        """The replay of the rank of the answer."""
        steps, graphed = _steps_of_run(self.job, self.device, rank, self.ledger), self._graphed(rank)
        run, waiting_bytes = self._replay([*self.before(rank), *steps]), 0
        if any(step.reusable is not None for step in steps):
            at_once = self._replay([*self.before(rank), *(replace(step, reusable=None) for step in steps)])
            waiting_bytes = max(run.peak_reserved_bytes - at_once.peak_reserved_bytes, 0)
        return _Replayed(self._with_graphs(run, graphed), steps, graphed, waiting_bytes=waiting_bytes)

    def of_rank(self, rank: int) -> Replay:
        """The replay of another rank of the answer's stage."""
        steps = [self.ledger(evenly_routed(self.job), device=self.device, rank=rank, step=step) for step in RUN]
        return self._with_graphs(self._replay([*self.before(rank), *steps]), self._graphed(rank))

    def of_seen(self, seen: SeenRun, rank: int) -> _Replayed:
        """The replay of a run that was observed. If generated code ran, what is reserved is the mean over nearby orders of
        its requests."""
        steps = [seen.timeline]
        run, reserved_range, let_go = self._replay([*self.before(rank), *steps]), None, None
        if seen.compiled:
            nearby = [self._replay(order).peak_reserved_bytes for order in nearby_orders(steps)]
            reserved = [run.peak_reserved_bytes, *nearby]
            reserved_range = min(reserved), max(reserved)
            run = replace(run, peak_reserved_bytes=sum(reserved) // len(reserved))
        if seen.let_go is not None:
            least = self._replay([seen.let_go])
            let_go = least.peak_allocated_bytes, least.peak_reserved_bytes
        return _Replayed(run, steps, reserved_range=reserved_range, let_go=let_go)

    def _replay(self, steps: Sequence[Timeline]) -> Replay:
        return _replay(steps, self.job, self.device, self.outside_bytes)

    def _graphed(self, rank: int) -> list[Timeline]:
        """The steps that CUDA graphs add; none without, nor with those of other frameworks than Megatron-LM."""
        if self.job.framework != "megatron":
            return []
        from peakcast.models.ledger.megatron.cuda_graphs import graphed_steps

        job = evenly_routed(self.job)
        return [self.ledger(job, device=self.device, rank=rank, step=step) for step in graphed_steps(self.job)]

    def _with_graphs(self, run: Replay, graphed: Sequence[Timeline]) -> Replay:
        """The replay of a run that goes on with the steps `graphed`, before which the cache is emptied."""
        if not graphed:
            return run
        further = self._replay(graphed)
        return replace(
            run,
            peak_allocated_bytes=max(run.peak_allocated_bytes, further.peak_allocated_bytes),
            peak_reserved_bytes=max(run.peak_reserved_bytes, further.peak_reserved_bytes),
            num_retries=run.num_retries + further.num_retries,
        )


def _steady_steps(job: TrainingJob, device: Device, rank: int | None, ledger: Ledger) -> dict[int, Timeline]:
    """The steady step of `rank`, or of one rank of each pipeline stage that may be the worst one, by rank."""
    from peakcast.models.baseline.fullest_ranks import fullest_ranks

    candidates = fullest_ranks(job) if rank is None else (rank,)
    return {candidate: ledger(job, device=device, rank=candidate, step="steady") for candidate in candidates}


def _highest_peak_bytes(steps: Sequence[Timeline]) -> int:
    return max(step.peak().num_bytes for step in steps)


def _nearly_as_full(job: TrainingJob, chosen: int, steadies: Mapping[int, Timeline]) -> list[int]:
    """The ranks besides `chosen` that allocate nearly as much, one of which may reserve more. `steadies`: the steady step
    of a rank of each stage."""
    most = steadies[chosen].peak().num_bytes
    near = [stage for stage, steady in steadies.items() if steady.peak().num_bytes > NEARLY * most]
    return [one for stage in near for one in ranks_by_shard(job, stage) if one != chosen]


def _of_the_steps(steady: Timeline, first: Timeline, *graphed: Timeline) -> dict[str, Any]:
    """The fields of `Baseline`, by name, that follow from the timelines of a rank's steady and first step, and of those
    with CUDA graphs, without a replay."""
    higher = max((steady, first, *graphed), key=lambda step: step.peak().num_bytes)
    peak = higher.peak()
    largest = higher.largest_at(peak.instant, NUM_LARGEST)
    return {
        "peak_allocated_bytes": peak.num_bytes,
        "held_bytes": _most_held(steady),
        "peak_phase": peak.phase.name.lower(),
        "phase_peaks_bytes": {phase.name.lower(): size for phase, size in steady.phase_peaks().items()},
        "steady_state_bytes": _between_steps(graphed[-1] if graphed else steady),
        "first_step_peak_bytes": first.peak().num_bytes,
        "largest": tuple((name, category.name.lower(), size, number) for name, category, size, number in largest),
        "composition": {category.name.lower(): size for category, size in higher.composition(peak.instant).items()},
    }


def _steps_of_run(job: TrainingJob, device: Device, rank: int, ledger: Ledger) -> list[Timeline]:
    """The steps that are replayed: with equal shares for every expert. Which one is the fullest changes from layer to layer
    and from step to step, and replaying always the same one leaves up to 9 GiB more in the cache than published runs had
    (Mixtral-8x7B, adapters on 4-bit weights, A100)."""
    even = evenly_routed(job)
    if lengths_change(job):
        return _drawn_steps(even, device, rank, ledger)
    return [ledger(even, device=device, rank=rank, step=step) for step in RUN]


def _with_fullest_expert(run: Replay, more_bytes: int) -> Replay:
    """The replay of experts with equal shares, with the `more_bytes` that the fullest one adds to the peak."""
    more_bytes = max(more_bytes, 0)
    return replace(
        run,
        peak_allocated_bytes=run.peak_allocated_bytes + more_bytes,
        peak_reserved_bytes=run.peak_reserved_bytes + more_bytes,
    )


def _drawn_steps(job: TrainingJob, device: Device, rank: int, ledger: Ledger) -> list[Timeline]:
    """The steps of a job whose lengths change, each represented by its largest micro-batch: cached blocks of shorter ones
    are too small for longer ones."""
    run = itertools.islice(steps_of_lengths(job, rank), CHANGING_STEPS)
    largest = [max(step, key=lambda part: (part.num_tokens, part.sequence_length)) for step in run]
    kinds = ["first", *["steady"] * (CHANGING_STEPS - 1)]
    return [ledger(part, device=device, rank=rank, step=kind) for part, kind in zip(largest, kinds, strict=True)]


def _replay(steps: Sequence[Timeline], job: TrainingJob, device: Device, outside_bytes: int) -> Replay:
    """The run on an allocator with the memory that `device` leaves or, if it runs out of memory, on one without a limit.
    The first step and one more represent the whole run: further steps reserved nothing new in any of the 123 published
    configurations."""
    room_bytes = usable_bytes(job, device) - outside_bytes
    fraction = job.allocator.per_process_memory_fraction
    allowed_bytes = None if fraction is None else int(fraction * device.cuda_memory_bytes)
    limits = [limit for limit in (room_bytes, allowed_bytes) if limit is not None]
    newest_first = torch_release(job.versions) < (2, 13)
    if _highest_peak_bytes(steps) <= min(limits):
        try:
            limited = {"capacity_bytes": room_bytes, "allowed_bytes": allowed_bytes}
            return replay_run(steps, job.allocator, newest_first=newest_first, **limited)
        except SimulatedOutOfMemoryError:
            pass
    return replay_run(steps, job.allocator, newest_first=newest_first)


def _analytical_ledger() -> Ledger:
    from peakcast.models.baseline.ledger import ledger

    return ledger


def usable_bytes(job: TrainingJob, device: Device) -> int:
    """Bytes of `device` that are available to `job`: those that other processes do not hold."""
    return device.cuda_memory_bytes - int(job.other_memory_fraction * device.cuda_memory_bytes)


def _generation_peaks(steady: Timeline) -> dict[str, int]:
    """Peaks of prefill and of decoding; none if the timeline does not tell them apart."""
    begun = steady.decoding_from
    if begun is None:
        return {}
    parts = {"prefill": steady.totals[:begun], "decode": steady.totals[begun:]}
    return {part: int(totals.max()) for part, totals in parts.items() if len(totals)}


def _between_steps(steady: Timeline) -> int:
    """Bytes of the tensors that exist after a steady step, without its inputs."""
    end = len(steady.phases)
    left = (steady.born < end) & (steady.dies >= end) & (steady.categories != Category.INPUTS)
    return int(steady.num_bytes[left].sum())


def _most_held(timeline: Timeline) -> int:
    """The largest sum of parameters, gradients and optimizer states at any instant."""
    held = _HELD[timeline.categories]
    change = np.zeros(len(timeline.phases) + 1, dtype=np.int64)
    end = len(timeline.phases)
    np.add.at(change, np.minimum(timeline.born[held], end), timeline.num_bytes[held])
    np.subtract.at(change, np.minimum(timeline.dies[held], end), timeline.num_bytes[held])
    return int(np.cumsum(change)[:-1].max(initial=0))
