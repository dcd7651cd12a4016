"""The search: visits candidates in the order of their costs, and predicts only those that may become plans.

The costs of a plan other than memory need no timeline, so candidates are visited in the order of these costs
(`cheapest_first.in_order`). A candidate is predicted if its peak is so low that the prediction may say "surely fits". The
search ends when enough plans surely fit. The answer is the same as if all candidates were predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from peakcast.catalog import Device
from peakcast.core.errors import PeakcastError, SpecError
from peakcast.core.findings import Finding
from peakcast.core.workers import check_processes
from peakcast.jobs.spec import MOST_RANKS, TrainingJob
from peakcast.models.baseline.baseline import usable_bytes
from peakcast.models.baseline.measured_constants import known_context_bytes
from peakcast.models.ledger.recorded.covering import no_recipe
from peakcast.models.prediction.predict import could_surely_fit, predict
from peakcast.models.prediction.verdict import ranks_of_a_node
from peakcast.models.recipes.lent import lending
from peakcast.models.recipes.lent import lent as brought
from peakcast.models.recipes.recordable import cannot_be_recorded
from peakcast.models.recipes.shelf import wants_recipe
from peakcast.searching.cheapest_first import (
    FittingJob,
    SearchInput,
    SearchWorkers,
    Series,
    held_throughout,
    in_order,
    series,
)
from peakcast.searching.costs import Cost, cost, order
from peakcast.searching.found import Found, Plan
from peakcast.searching.search_settings import USUAL, Progress, RecordRecipes, SearchSettings
from peakcast.searching.space import candidates, layouts_left_out

TRIED = 6
"""Limit of the number of predictions, as a multiple of the number of plans asked for."""


def search(
    job: TrainingJob,
    device: Device,
    num_gpus: int,
    global_batch_size: int | None = None,
    settings: SearchSettings = USUAL,
) -> Found:
    """The plans for `job` on `num_gpus` of `device`, `settings.top` of them: first those that surely fit, then those that
    may fit, each group by extra time (`costs.Cost`). `global_batch_size` None: that of `job`, but at least one micro-batch
    per GPU.

    Raises: SpecError when there is no candidate at all.
    """
    _check_counts(num_gpus=num_gpus, top=settings.top, gpus_per_node=settings.gpus_per_node)
    check_processes(settings.processes)
    own = job.micro_batch_size * job.gradient_accumulation_steps * job.parallelism.data_parallel_size
    batch = global_batch_size or max(own, job.micro_batch_size * num_gpus)
    settings.say("listing candidates")
    every = _listed(job, num_gpus, batch, settings.gpus_per_node)
    left_out: Mapping[str, int] = {}
    with lending(settings.lent):
        if wants_recipe(job):
            every, left_out = _recorded(every, settings.record)
        settings.say(f"{len(every):,} candidates: adding up what their ranks hold throughout a step")
        room = usable_bytes(job, device) - known_context_bytes(device, job.versions)
        left = [members for members in series(every) if held_throughout(every, members) <= room]
        plans, num_beyond_host = _best(SearchInput(every, device, room, settings.findings, settings.lent), left, settings)
    if not plans:
        left_out = {**left_out, **layouts_left_out(job, num_gpus, settings.gpus_per_node)}
    return Found(
        gpu=device.name,
        num_gpus=num_gpus,
        global_batch_size=batch,
        num_candidates=len(every),
        num_ruled_out=len(every) - _number(left),
        left_out=left_out,
        plans=tuple(plans),
        num_beyond_host=num_beyond_host,
    )


def _number(some: Iterable[Series]) -> int:
    """How many candidates are in these series."""
    return sum(map(len, some))


def _best(question: SearchInput, left: list[Series], settings: SearchSettings) -> tuple[list[Plan], int]:
    """The best plans among the candidates of `left`, in order, and how many were left out for their host memory."""
    counted = f"{len(question.every):,} candidates, {_number(left):,} of them not too heavy"

    def tell(message: str) -> None:
        settings.say(f"{counted}; {message}")

    with SearchWorkers(question, settings.processes) as workers:
        plans, num_beyond_host = _plans(workers, in_order(workers, left, tell), settings.top, tell)
    plans.sort(key=lambda p: (p.fits != "yes", *order(p.job, p.cost), p.peak_device_bytes.point))
    return plans, num_beyond_host


def _check_counts(**counts: int) -> None:
    """Raises: SpecError naming the first of `counts` that no cluster can have."""
    for name, value in counts.items():
        if not 1 <= value <= MOST_RANKS:
            raise SpecError(f"{name}={value} must be from 1 to {MOST_RANKS:,}.", parameter=name, value=value)


def _listed(job: TrainingJob, num_gpus: int, batch: int, gpus_per_node: int) -> list[TrainingJob]:
    """All candidates with a global batch of `batch`. Raises: SpecError if there is none."""
    if every := list(candidates(job, num_gpus, batch, gpus_per_node)):
        return every
    raise SpecError(
        f"no layout on num_gpus={num_gpus} makes global_batch_size={batch}: the data-parallel size must divide it; try "
        f"a multiple of {num_gpus}.",
        parameter="global_batch_size",
        value=batch,
    )


def _recorded(every: list[TrainingJob], record: RecordRecipes) -> tuple[list[TrainingJob], Mapping[str, int]]:
    """(the jobs of `every` that the network's recipes cover, after missing recipes were recorded; reason -> number of jobs
    that are not covered). If there is no recipe, all jobs are kept and predicted by the nearest guess, as in `predict`.
    Raises: SpecError when there is no guess either."""
    recordable = [job for job in every if not cannot_be_recorded(job)]
    record(recordable)
    network = every[0].architecture
    reasons = [no_recipe(job) for job in every]
    if found := [job for job, reason in zip(every, reasons, strict=True) if not reason]:
        return found, dict(Counter(filter(None, reasons)).most_common())
    if brought() is not None:
        most = Counter(map(no_recipe, recordable or every)).most_common(1)[0][0]
        raise SpecError(f"the recipe covers none of {len(every):,} candidates: {most}.", parameter="recipe")
    if network.kind != "undescribed":
        return every, {}
    raise SpecError(
        f"architecture={network.name!r} is no network of the ledger, and {no_recipe((recordable or every)[0])}; record it "
        "first: peakcast record.",
        parameter="architecture",
        value=network.name,
    )


def _plans(workers: SearchWorkers, walked: Iterator[FittingJob], top: int, say: Progress) -> tuple[list[Plan], int]:
    """The first `top` of `walked` that surely fit; if there are fewer, the first ones that may fit are added. And how many
    were left out then, because they need more host memory than the node has."""
    seen: list[FittingJob] = []
    plans: dict[FittingJob, Plan | None] = {}

    def promising() -> Iterator[FittingJob]:
        for candidate in walked:
            seen.append(candidate)
            if could_surely_fit(workers.question.every[candidate.index], workers.question.device, candidate.peak_bytes):
                yield candidate

    def predict_next(waiting: Iterator[FittingJob]) -> bool:
        """Predict some more candidates; False if there are none left."""
        some = list(islice(waiting, 2 * workers.processes if workers.processes > 1 else 1))
        plans.update(zip(some, workers.map(_planned, some), strict=True))
        return bool(some)

    waiting: Iterator[FittingJob] = islice(promising(), TRIED * top)
    sure: list[Plan] = []
    while len(sure) < top and predict_next(waiting):
        sure = [plan for plan in plans.values() if plan is not None and plan.fits == "yes"]
        say(f"{len(sure)} of {top} plans found")
    others: list[Plan] = []
    num_beyond_host = 0
    waiting = (candidate for candidate in seen if candidate not in plans)
    for candidate in seen if len(sure) < top else ():
        while candidate not in plans:
            predict_next(waiting)
        plan = plans[candidate]
        num_beyond_host += plan is not None and plan.beyond_host
        others += [plan] if plan is not None and plan.fits == "uncertain" and not plan.beyond_host else []
        if len(sure) + len(others) >= top:
            break
    return (sure + others)[:top], num_beyond_host


def _planned(question: SearchInput, candidate: FittingJob) -> Plan | None:
    return planned(question.every[candidate.index], question.device, candidate.cost, question.findings)


def planned(job: TrainingJob, device: Device, known: Cost | None = None, findings: tuple[Finding, ...] = ()) -> Plan | None:
    """The plan of one candidate; None if it cannot be predicted."""
    try:
        answer = predict(job, device, findings=findings)
    except (PeakcastError, NotImplementedError):
        return None
    return Plan(
        job=job,
        fits=answer.fits,
        peak_device_bytes=answer.peak_device_bytes,
        peak_host_bytes=answer.peak_host_bytes,
        node_host_bytes=(node_host_bytes := answer.peak_host_bytes.point * ranks_of_a_node(job, device)),
        beyond_host=device.host_memory_bytes is not None and node_host_bytes > device.host_memory_bytes,
        limit=answer.limit,
        headroom_bytes=usable_bytes(job, device) - answer.peak_device_bytes.upper_95,
        cost=known or cost(job, device),
    )
