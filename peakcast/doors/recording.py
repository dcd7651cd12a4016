"""Records a recipe for a network that the ledger does not know, from the library that is installed here."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.core.errors import CollectorError, SpecError
from peakcast.core.extras import need
from peakcast.core.fields import FrozenMapping
from peakcast.core.versions import NEWEST, release
from peakcast.dialects.common.own_networks import TRANSFORMERS, library_of, own_network
from peakcast.doors.recipe_files import RecipeFile, write
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.recorded.covering import no_recipe
from peakcast.models.recipes import shelf
from peakcast.models.recipes.baseline_choice import StackTraces, baseline_from, chosen
from peakcast.models.recipes.lent import lent
from peakcast.models.recipes.recordable import FRAMEWORKS, cannot_be_recorded
from peakcast.models.recipes.shelf import RECIPE_PACKAGES, installed_libraries, recipe_of, wants_recipe
from peakcast.models.recipes.shipped import is_of_release
from peakcast.timelines.traced import Traced

if TYPE_CHECKING:
    from peakcast.collectors.measure.recording import WalkRecorder
    from peakcast.models.recipes.recipe import Recipe

VARIABLE, NEVER = "PEAKCAST_RECORD", "never"
"""The environment variable that switches recording off in predictions, and its value."""


def ensure_recipe(job: TrainingJob, progress: Callable[[str], None] | None = None) -> None:
    """Record the recipe that `job` needs, unless it exists, cannot be made, or `PEAKCAST_RECORD=never` is set. The reason
    for a missing recipe is stored and appears in the answer. `progress` is told before the recording begins."""
    if os.environ.get(VARIABLE) == NEVER:
        return
    if lent() is not None or not _may_want(job) or _is_answered(job) or cannot_be_recorded(job) or shelf.why_not(job):
        return
    library = library_of(job)
    if library not in installed_libraries() or not is_of_release(job, installed_libraries()):
        way = "'peakcast[collect]'" if library == TRANSFORMERS else library
        shelf.could_not_record(job, f"recording it needs {library}; install it with: pip install {way}")
        return
    if unknown := _unknown_to_its_library(job):
        shelf.could_not_record(job, unknown)
        return
    if progress:
        progress(f"recording {job.architecture.name} without a GPU; this is done once and takes seconds to minutes")
    from peakcast.collectors.measure.recording import FirstStepError

    try:
        record_recipe(job)
    except CollectorError as error:
        shelf.could_not_record(job, str(error).rstrip("."), endless=isinstance(error, FirstStepError))


def _unknown_to_its_library(job: TrainingJob) -> str:
    """Why the installed transformers cannot build the network of `job`, whose code is on the hub; "" if it may. Read from
    the list of its configurations, since importing them takes seconds."""
    kind = job.architecture.model_type
    if library_of(job) != TRANSFORMERS or not job.architecture.configuration:
        return ""
    if f'"{kind}"' in _configurations_of_transformers():
        return ""
    return (
        f"transformers {installed_libraries()[TRANSFORMERS]} has no model_type={kind!r}, and code from the hub is not run "
        "here; a newer transformers may have it, or run your own training script with `peakcast dryrun`"
    )


@cache
def _configurations_of_transformers() -> str:
    """The text of the modules that list transformers' configurations; a part of `auto` since transformers 5."""
    found = find_spec(TRANSFORMERS)
    folder = Path(str(found.origin)).parent / "models" / "auto" if found is not None else Path()
    return "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))


def _may_want(job: TrainingJob) -> bool:
    """Whether a recipe would answer `job` if there were one."""
    return wants_recipe(job) or (chosen() == "auto" and own_network(job) is not None)


def _is_answered(job: TrainingJob) -> bool:
    """Whether there is a recipe of the release that `job` names, or none could be recorded here anyway."""
    library = library_of(job)
    found, asked = recipe_of(job), str(job.versions.get(library, ""))
    if found is None or not asked or release(asked) == NEWEST:
        return found is not None
    here, there = installed_libraries().get(library, ""), str(found.versions.get(library, ""))
    return release(there)[:2] == release(asked)[:2] or not here or release(here)[:2] != release(asked)[:2]


def ensure_recipes(
    jobs: Iterable[TrainingJob], processes: int, progress: Callable[[str, int, int], None] | None = None
) -> None:
    """`ensure_recipe` for several jobs, `processes` networks at a time. Jobs that may share a recipe are handled in their
    order."""
    by_shelf: dict[str, list[TrainingJob]] = {}
    for job in jobs:
        if _may_want(job):
            by_shelf.setdefault(shelf.shelf_name(job), []).append(job)
    total = sum(map(len, by_shelf.values()))
    done = itertools.count()

    def record(sharing: list[TrainingJob]) -> None:
        for job in sharing:
            if progress:
                progress(f"recipe of {job.architecture.name}", next(done), total)
            ensure_recipe(job)

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(processes) as pool:  # each thread waits for its own process
        list(pool.map(record, by_shelf.values()))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The result of `peakcast record`."""

    architecture: str
    layers: int
    """Number of layers of the network."""
    recorded_layers: int
    """Number of layers of the shorter network that was recorded in its place; the same number if its layers do not
    repeat."""
    num_tensors: int
    micro_batch_sizes: tuple[int, int]
    """The smallest and the largest for which the recipe is valid."""
    sequence_lengths: tuple[int, int]
    """The shortest and the longest for which the recipe is valid."""
    holds_for: str
    """These ranges in words, with the lengths between these for which it is not valid."""
    versions: Mapping[str, str]
    seconds: float
    written: str = ""

    def to_mapping(self) -> dict[str, Any]:
        """The mapping that `--json` prints."""
        return {**vars(self), "versions": dict(self.versions)}

    def text(self) -> str:
        """The recorded recipe in words: its network, its releases, and for which jobs it is valid."""
        releases = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        layers = f"{self.recorded_layers} of {self.layers} layers"
        lines = [
            f"{self.architecture}: {self.num_tensors:,} tensors, recorded in {layers}.",
            f"Valid for {self.holds_for}.",
            f"Recorded from {releases} in {self.seconds:.1f} s.",
        ]
        return "\n".join([*lines, f"Written to {self.written}."] if self.written else lines)


def recorded(job: TrainingJob, python: str, output: Path | None) -> Recorded:
    """Record `job`, and also write the recipe to `output` if given. Raises: SpecError, CollectorError, RecordError."""
    if reason := cannot_be_recorded(job):
        raise SpecError(f"{job.architecture.name!r} cannot be recorded: {reason}; leave that out.", parameter="job")
    if python == sys.executable:
        need("recording a recipe", "torch", *(("transformers",) if library_of(job) == TRANSFORMERS else ()))
    started = time.monotonic()
    recipe = record_recipe(job, python)
    if output is not None:
        write(output, RecipeFile(job=job, recipes=(recipe,)))
    return Recorded(
        architecture=job.architecture.name,
        layers=recipe.layers,
        recorded_layers=recipe.walk.num_layers,
        num_tensors=len(recipe.walk.names),
        micro_batch_sizes=recipe.batches,
        sequence_lengths=recipe.lengths,
        holds_for=recipe.range_in_words(),
        versions=recipe.versions,
        seconds=round(time.monotonic() - started, 1),
        written=str(output or ""),
    )


@contextmanager
def timelines_from(baseline: str, timeout_seconds: float = 600) -> Iterator[None]:
    """A context in which answers use the timelines of `baseline`. A trace takes seconds for each rank, and at most
    `timeout_seconds`. Raises: SpecError for another name."""
    from peakcast.collectors.tracing.trace import trace_job

    def traced(job: TrainingJob, rank: int, gpu: str | None) -> Traced:
        return trace_job(job, rank=rank, gpu=gpu, timeout_seconds=timeout_seconds)

    with baseline_from(baseline, StackTraces(traced) if baseline == "trace" else None):
        yield


def only_a_trace_has(job: TrainingJob) -> bool:
    """Whether the network of `job`, or what of it trains, is left to a trace: no recipe answers it, and its library is
    installed and runs it in a time that one waits for."""
    if shelf.is_endless(job) or os.environ.get(VARIABLE) == NEVER or lent() is not None or job.framework not in FRAMEWORKS:
        return False
    if library_of(job) not in installed_libraries() or _unknown_to_its_library(job):
        return False
    return wants_recipe(job) and bool(no_recipe(job))


def record_recipe(job: TrainingJob, python: str = sys.executable) -> Recipe:
    """Record the recipe of `job` in the environment of the interpreter `python`, and store it.

    Raises: CollectorError when the library there cannot run the job on fake tensors.
    """
    from peakcast.collectors.measure.recording import WalkRecorder

    with WalkRecorder(python) as recorder:
        return record_with(recorder, job)


def record_with(recorder: WalkRecorder, job: TrainingJob) -> Recipe:
    """As `record_recipe`, in the process of `recorder`, which serves several jobs: starting one takes seconds."""
    from peakcast.models.recipes.recipe import recorded, recorded_in_chunks
    from peakcast.models.recipes.regime import chunks_of_loss, point_of, regime
    from peakcast.models.recipes.walk import Walk

    with recorder.of(regime(job)) as library:
        asked = point_of(job)
        most, images = job.architecture.most_positions, job.images.per_sequence

        def record(*sample: Any) -> Walk:
            return Walk.read(library.walk(*sample))

        rule = chunks_of_loss(job)
        recipe = recorded_in_chunks(record, asked, most, rule) if rule else recorded(record, asked, most, images)
    packages = RECIPE_PACKAGES[library_of(job)]
    releases = {name: shelf.public(library.versions[name]) for name in packages if name in library.versions}
    recipe = replace(recipe, versions=FrozenMapping(releases))
    shelf.shelve(job, recipe)
    return recipe
