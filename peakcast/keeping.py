"""Recipes that dry runs keep: the network that a script turned out to train, recorded, and proven by its own steps.

What is kept is of the job that was seen, for micro-batches of one sequence and of several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.catalog import Device
from peakcast.errors import CollectorError, SpecError
from peakcast.kept import CLOSE, Kept, write
from peakcast.models.analytical.ledger import ledger
from peakcast.models.recipes.covering import cannot_be_recorded
from peakcast.models.recipes.lent import Lent, lending
from peakcast.recording import record_recipe
from peakcast.spec import TrainingJob
from peakcast.timeline import Category, Phase, Timeline

if TYPE_CHECKING:
    from peakcast.models.recipes.recipe import Recipe

UNDESCRIBED = "script"
"""The `model_type` of a network that is none of transformers'."""
BATCHES = (1, 2)
"""Micro-batches whose recipes differ: of one sequence and of several."""


def keep(
    path: Path,
    job: TrainingJob,
    timelines: Mapping[str, Timeline],
    device: Device,
    rank: int,
    command: str,
    progress: Callable[[str], None] | None = None,
) -> Kept:
    """Record the network of `job` and write its recipes to `path`, if they give the peak of the steady step that was seen.

    Raises: SpecError or CollectorError with the reason when nothing is kept.
    """
    if job.architecture.model_type == UNDESCRIBED:
        raise _not_kept(f"the script's network, {job.architecture.name}, is none of transformers', which recipes are of")
    if reason := cannot_be_recorded(job):
        raise _not_kept(reason)
    if progress is not None:
        progress(f"recording {job.architecture.name}, to be varied in batch, length and world size")
    reasons = []
    for form in dict.fromkeys((job.batch.form, "masked")):
        asked = job.replace(batch=replace(job.batch, form=form))
        try:
            recipes = [record_recipe(asked)]
            phases, reason = _proof(asked, recipes[0], timelines["steady"], device, rank)
        except CollectorError as error:
            phases, reason = {}, str(error)
        if not reason:
            other = BATCHES[asked.micro_batch_size == BATCHES[0]]
            recipes.append(record_recipe(asked.replace(micro_batch_size=other)))
            kept = Kept(command=command, job=asked, recipes=tuple(recipes), phases=phases)
            write(path, kept)
            return kept
        reasons.append(reason)
    raise _not_kept(reasons[0].rstrip("."))


def _not_kept(reason: str) -> SpecError:
    return SpecError(f"no recipe is kept: {reason}.", parameter="save_recipe")


def _proof(
    job: TrainingJob, recipe: Recipe, seen: Timeline, device: Device, rank: int
) -> tuple[dict[str, float], str]:
    """By phase, the recipe's peak over that of the step that was seen, minus one; and what is wrong with the whole ("":
    nothing)."""
    with lending(Lent(job, (recipe,))):
        made = ledger(job, device=device, rank=rank, step="steady")
    ours, theirs = _tensors(made), _tensors(seen)
    phases = {
        phase.name.lower().replace("_", " "): ours.phase_peaks()[phase] / size - 1
        for phase, size in theirs.phase_peaks().items()
        if phase in ours.phase_peaks() and phase not in (Phase.INIT, Phase.FORWARD)  # where the loss begins, nobody says
    }
    error = ours.peak().num_bytes / theirs.peak().num_bytes - 1
    if abs(error) <= CLOSE and ours.peak().phase == theirs.peak().phase:
        return phases, ""
    where = [f"{one.peak().phase.name.lower().replace('_', ' ')}" for one in (ours, theirs)]
    return phases, (
        f"a step of {job.architecture.name} as transformers has it peaks {error:+.1%} from the script's ({where[0]}; the "
        f"script: {where[1]}), so the script does more than train that network"
    )


def _tensors(timeline: Timeline) -> Timeline:
    """Without what kernels take for themselves, which is of a GPU."""
    held = timeline.categories != Category.WORKSPACES
    columns: dict[str, Any] = {name: getattr(timeline, name)[held] for name in ("categories", "num_bytes", "born", "dies")}
    texts: dict[str, Any] = {
        name: [text for text, kept in zip(getattr(timeline, name), held, strict=True) if kept]
        for name in ("names", "modules")
    }
    return replace(timeline, **columns, **texts, streams=None, reusable=None)
