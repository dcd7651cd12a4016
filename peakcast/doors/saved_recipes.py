"""Recipes that dry runs save: the network that a script trains, recorded and checked against the script's own steps.

A saved recipe is for the job that was seen, with micro-batches of one sequence and of several.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.catalog import Device
from peakcast.core.errors import CollectorError, SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.own_networks import library_of
from peakcast.doors.recipe_files import CLOSE, RecipeFile, write
from peakcast.doors.recording import record_with
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.recipes.lent import Lent, lending
from peakcast.models.recipes.recordable import cannot_be_recorded
from peakcast.models.recipes.shelf import RECIPE_PACKAGES
from peakcast.timelines.timeline import Category, Phase, Timeline

if TYPE_CHECKING:
    from peakcast.models.recipes.recipe import Recipe

Walks = Callable[[int | None, int, int], dict[str, Any]]
"""The function that `peakcast.collectors.dryrun.walks` provides."""
UNDESCRIBED = "script"
"""The `model_type` of a network that is not from transformers."""
FEW_LAYERS = 2
"""Layers of the network that only tests whether a sequence length is accepted at all."""
NEARER = ((32, 4096), (8, 2048), (4, 1024))
"""Micro-batch sizes and lengths up to which a recipe of a script's own steps may be valid: some losses process that many
tokens at a time."""
BATCHES = (1, 2)
"""Micro-batches whose recipes differ: of one sequence, and of several."""


@dataclass(frozen=True, kw_only=True)
class DryrunStep:
    """What a dry run of `command` has shown: the job, and the steady step of one rank on `device`."""

    command: str
    job: TrainingJob
    steady: Timeline
    device: Device
    rank: int


def save_recipes(
    path: Path,
    seen: DryrunStep,
    walks: Callable[[], AbstractContextManager[Walks]],
    progress: Callable[[str], None] | None = None,
) -> RecipeFile:
    """Record the network of a script and write its recipes to `path`, if they give the peak of the steady step that was
    seen.

    A network of transformers is recorded as transformers trains it. If the script does something else, or its network is
    not from transformers, its own steps are recorded: `walks` runs them with batches of other sizes.
    Raises: SpecError or CollectorError with the reason when nothing is saved.
    """
    job, command = seen.job, seen.command
    if reason := cannot_be_recorded(job):
        raise _not_saved(reason)
    if progress is not None:
        progress(f"recording {job.architecture.name}, to be varied in batch, length and world size")
    if job.architecture.model_type != UNDESCRIBED and (saved := _as_transformers_trains(seen)) is not None:
        return _written(path, saved)
    if progress is not None:
        progress("recording the script's own steps, with batches of other sizes")
    try:
        with walks() as walk:
            recipe = _own_steps(walk, job)
            phases, reason = _proof(seen, job, recipe)
            if reason:
                raise _not_saved(reason)
            recipes = [recipe]
            with suppress(CollectorError):  # the script may only accept one sequence, or only several
                recipes.append(_own_steps(walk, job.replace(micro_batch_size=_other_batch(job))))
    except CollectorError as error:
        raise _not_saved(str(error).rstrip(".")) from error
    return _written(path, RecipeFile(command=command, own_steps=True, job=job, recipes=tuple(recipes), phases=phases))


def _as_transformers_trains(seen: DryrunStep) -> RecipeFile | None:
    """The recipes of the network as transformers trains it; None if the step that was seen is another one, or transformers
    cannot run it."""
    from peakcast.collectors.measure.recording import WalkRecorder

    job = seen.job
    with WalkRecorder() as recorder:
        for form in dict.fromkeys((job.batch.form, "masked")):
            asked = job.replace(batch=replace(job.batch, form=form))
            with suppress(CollectorError):
                recipe = record_with(recorder, asked)
                phases, reason = _proof(seen, asked, recipe)
                if not reason:
                    other = record_with(recorder, asked.replace(micro_batch_size=_other_batch(asked)))
                    return RecipeFile(command=seen.command, job=asked, recipes=(recipe, other), phases=phases)
    return None


def _written(path: Path, saved: RecipeFile) -> RecipeFile:
    write(path, saved)
    return saved


def _other_batch(job: TrainingJob) -> int:
    """A micro-batch of several sequences if the job's has one, else of one."""
    return BATCHES[job.micro_batch_size == BATCHES[0]]


def _own_steps(walk: Walks, job: TrainingJob) -> Recipe:
    """The recipe of a script's own steps, for the sizes that its network accepts."""
    from peakcast.models.recipes.recipe import FAR, recorded
    from peakcast.models.recipes.walk import Walk

    def record(layers: int | None, batch: int, length: int, _steps: int = 0) -> Walk:
        return Walk.read(walk(layers, batch, length))

    most: int | None = job.sequence_length  # a table of positions or the script may end there
    for layers in (FEW_LAYERS, None):
        with suppress(CollectorError):
            record(layers, job.micro_batch_size, FAR[1])
            most = None
            break
    recipe = recorded(record, (job.micro_batch_size, job.sequence_length), most, nearer=NEARER)
    releases = {name: job.versions[name] for name in RECIPE_PACKAGES[library_of(job)] if name in job.versions}
    return replace(recipe, versions=FrozenMapping(releases))


def _not_saved(reason: str) -> SpecError:
    return SpecError(f"no recipe is kept: {reason}.", parameter="save_recipe")


def _proof(seen: DryrunStep, job: TrainingJob, recipe: Recipe) -> tuple[dict[str, float], str]:
    """(for each phase, the peak of `job` by `recipe` divided by that of the step that was seen, minus one; why the recipe
    is not valid, or "")."""
    with lending(Lent(job, (recipe,))):
        made = ledger(job, device=seen.device, rank=seen.rank, step="steady")
    ours, theirs = _tensors(made), _tensors(seen.steady)
    phases = {
        phase.name.lower().replace("_", " "): ours.phase_peaks()[phase] / size - 1
        for phase, size in theirs.phase_peaks().items()
        if phase in ours.phase_peaks() and phase not in (Phase.INIT, Phase.FORWARD)  # nothing marks where the loss begins
    }
    error = ours.peak().num_bytes / theirs.peak().num_bytes - 1
    if abs(error) <= CLOSE and ours.peak().phase == theirs.peak().phase:
        return phases, ""
    otherwise = " or lays it out in another way" if job.parallelism.world_size > 1 else ""
    where = [f"{one.peak().phase.name.lower().replace('_', ' ')}" for one in (ours, theirs)]
    return phases, (
        f"a step of {job.architecture.name} by the recipe peaks {error:+.1%} from the script's ({where[0]}; the "
        f"script: {where[1]}), so the script does more than forward, backward and the step of an optimizer that is "
        f"known{otherwise}"
    )


def _tensors(timeline: Timeline) -> Timeline:
    """`timeline` without memory that kernels allocate for themselves, which depends on the GPU."""
    held = timeline.categories != Category.WORKSPACES
    columns: dict[str, Any] = {name: getattr(timeline, name)[held] for name in ("categories", "num_bytes", "born", "dies")}
    texts: dict[str, Any] = {
        name: [text for text, kept in zip(getattr(timeline, name), held, strict=True) if kept]
        for name in ("names", "modules")
    }
    return replace(timeline, **columns, **texts, streams=None, reusable=None)
