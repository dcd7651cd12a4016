"""The inverse questions: the largest batch, sequence or model that surely fits, and the fewest GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from peakcast import catalog
from peakcast.catalog import Device
from peakcast.core.errors import SpecError
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.parameters.inventory import num_parameters
from peakcast.models.recipes.lent import lending
from peakcast.models.recipes.recordable import cannot_be_recorded
from peakcast.searching.found import Found, Largest, Plan
from peakcast.searching.search import planned, search
from peakcast.searching.search_settings import USUAL, SearchSettings

MOST = {"micro_batch_size": 65_536, "sequence_length": 2**24}
STEP = {"micro_batch_size": 1, "sequence_length": 128}
"""Step of the search, in sequences or in tokens. The layout requires sequence lengths that are multiples of some number;
lengths are tried in steps of 128 times that number or, if the network's table of positions is short, in steps of that
number."""
FEW = 64


def largest(job: TrainingJob, device: Device, name: str, settings: SearchSettings = USUAL) -> Largest:
    """The largest `name` ("micro_batch_size" or "sequence_length") with which `job` surely fits. Memory grows with both, so
    bisection finds it. Values that recipes do not cover are not tried."""
    lent = settings.lent
    if name == "sequence_length" and job.inference.prompt_length is not None:  # then the prompt becomes longer
        job = job.replace(inference=replace(job.inference, prompt_length=None))
    step, least, most = _range(job, name)
    if lent is not None:
        low, high = lent.covered(name, job)
        least, most = max(least, low), min(most, high)
        if reason := lent.why_not(job.replace(**{name: -(-least // step) * step})):
            raise SpecError(f"the recipe does not answer this: {cannot_be_recorded(job) or reason}.", parameter="recipe")

    def plan_of(times: int) -> Plan | None:
        asked = job.replace(**{name: times * step})
        settings.record([asked])
        with lending(lent):
            return planned(asked, device, None, settings.findings)

    last = most // step
    found = _bisected(plan_of, -(-least // step), last)
    ended = found.too_large > last
    return Largest(
        asked=name,
        value=found.fitting * step if found.plan is not None else None,
        plan=found.plan,
        beyond=None if ended else found.too_large * step,
        beyond_fits=found.beyond.fits if found.beyond is not None else None,
        limit=most if lent is not None and found.plan is not None and ended else None,
    )


class _Bisected(NamedTuple):
    """Two neighbouring values, of which the smaller fits and the larger does not."""

    fitting: int
    too_large: int
    plan: Plan | None
    """The plan of the value that fits; None if not even the smallest does."""
    beyond: Plan | None
    """The plan of the value that does not fit; None if it has none, or if every value fits."""


def _bisected(plan_of: Callable[[int], Plan | None], first: int, last: int) -> _Bisected:
    """The largest value from `first` to `last` whose plan surely fits: values are doubled until one does not fit, then the
    range is halved."""
    low, high, best, beyond = first - 1, first, None, None
    while low < last:
        plan = plan_of(high)
        if plan is None or plan.fits != "yes":
            beyond = plan
            break
        low, high, best = high, min(high * 2, last) if high < last else last + 1, plan
    while high - low > 1:
        middle = (low + high) // 2
        plan = plan_of(middle)
        if plan is not None and plan.fits == "yes":
            low, best = middle, plan
        else:
            high, beyond = middle, plan
    return _Bisected(low, high, best, beyond)


def _range(job: TrainingJob, name: str) -> tuple[int, int, int]:
    """(step in which `name` is searched, least value that the batch of `job` allows, largest value tried)."""
    layout, tokens = job.parallelism, job.batch.num_tokens or 1
    if name == "micro_batch_size":
        return STEP[name], -(-tokens // job.sequence_length), MOST[name]
    most = min(MOST[name], job.architecture.most_positions or MOST[name])
    divided = 2 * layout.context_parallel_size * layout.tensor_parallel_size
    step = divided * (STEP[name] if most >= FEW * divided * STEP[name] else 1)
    return step, max(job.batch.shortest_sequence or 1, -(-tokens // job.micro_batch_size)), most


def fewest_gpus(
    job: TrainingJob,
    device: Device,
    global_batch_size: int | None = None,
    settings: SearchSettings = USUAL,
    *,
    most: int = 4096,
) -> Largest:
    """The fewest GPUs (a power of two, up to `most`) on which some plan surely fits. Generation is only split by tensor
    parallelism, over the GPUs of one node."""
    if job.task == "inference":
        return _fewest_for_generation(job, device, settings)
    before: Found | None = None
    for num_gpus in (1 << k for k in range(most.bit_length())):
        try:
            found = search(job, device, num_gpus, global_batch_size, replace(settings, top=1))
        except SpecError:
            continue
        if found.plans and found.plans[0].fits == "yes":
            verdict = (before.plans[0].fits if before.plans else "no") if before is not None else None
            beyond = before.num_gpus if before is not None else None
            return Largest(asked="num_gpus", value=num_gpus, plan=found.plans[0], beyond=beyond, beyond_fits=verdict)
        before = found
    return Largest(asked="num_gpus", value=None, plan=None, beyond=most, beyond_fits="no")


def _fewest_for_generation(job: TrainingJob, device: Device, settings: SearchSettings) -> Largest:
    """The fewest GPUs of a node on which `job` surely fits if they share each layer (tensor parallelism)."""
    beyond, verdict = None, None
    for num_gpus in (1 << k for k in range(settings.gpus_per_node.bit_length())):
        try:
            spread = job.replace(parallelism=replace(job.parallelism, tensor_parallel_size=num_gpus))
        except SpecError:  # heads that this number does not divide
            continue
        plan = planned(spread, device, None, settings.findings)
        if plan is not None and plan.fits == "yes":
            return Largest(asked="num_gpus", value=num_gpus, plan=plan, beyond=beyond, beyond_fits=verdict)
        beyond, verdict = num_gpus, plan.fits if plan is not None else "no"
    return Largest(asked="num_gpus", value=None, plan=None, beyond=beyond, beyond_fits=verdict)


def biggest_model(job: TrainingJob, device: Device, settings: SearchSettings = USUAL) -> Largest:
    """The architecture of the catalog with the most parameters with which `job`, otherwise unchanged, surely fits."""
    beyond, verdict = None, None
    for number, (name, candidate) in enumerate(_by_size(job)):
        settings.say(f"{number} architectures do not fit; trying {name}")
        plan = planned(candidate, device, None, settings.findings)
        if plan is not None and plan.fits == "yes":
            return Largest(asked="model", value=name, plan=plan, beyond=beyond, beyond_fits=verdict)
        beyond, verdict = name, plan.fits if plan is not None else "no"
    return Largest(asked="model", value=None, plan=None, beyond=beyond, beyond_fits=verdict)


def _by_size(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    names: Sequence[str] = catalog.architecture_names()
    for name in sorted(names, key=lambda name: -num_parameters(catalog.architecture(name))):
        architecture = catalog.architecture(name)
        try:
            if architecture.kind == "decoder":
                yield name, job.replace(architecture=architecture)
        except SpecError:
            continue
