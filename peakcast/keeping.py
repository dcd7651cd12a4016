"""Recipes that dry runs keep: the network that a script turned out to train, recorded, and proven by its own steps.

A file holds the job that was seen and its recipes, for micro-batches of one sequence and of several.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.catalog import Device
from peakcast.dialects.job_file import job_from_mapping
from peakcast.durable import replace_file
from peakcast.errors import CollectorError, RecordError, SpecError
from peakcast.models.analytical.ledger import ledger
from peakcast.models.baseline_choice import baseline_from
from peakcast.models.recipes import files, shelf
from peakcast.models.recipes.covering import cannot_be_recorded
from peakcast.models.recipes.regime import regime
from peakcast.recording import record_recipe
from peakcast.spec import TrainingJob, job_to_mapping
from peakcast.timeline import Category, Phase, Timeline

if TYPE_CHECKING:
    from peakcast.models.recipes.recipe import Recipe

UNDESCRIBED = "script"
"""The `model_type` of a network that is none of transformers'."""
CLOSE = 0.001
"""How far the recipe's peak may be from the script's."""
BATCHES = (1, 2)
"""Micro-batches whose recipes differ: of one sequence and of several."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a file holds."""

    command: str
    job: TrainingJob
    recipes: tuple[Recipe, ...]
    phases: Mapping[str, float] | None = None
    """Of the proof: by phase, the recipe's peak over the script's, minus one."""

    def text(self) -> str:
        """Where it holds, and how well."""
        ranges = (
            f"micro-batches of {batches[0]:,} to {batches[1]:,} sequences of {lengths[0]:,} to {lengths[1]:,} tokens"
            for batches, lengths in ((one.batches, one.lengths) for one in self.recipes)
        )
        phases = (f"{name} {error:+.2%}" for name, error in (self.phases or {}).items())
        said = f" Beside the script's own step: {', '.join(phases)}." if self.phases else ""
        return f"It holds for {'; '.join(ranges)}.{said}"


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
            _write(path, kept)
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
    with baseline_from("recipe"), shelf.lent(job, [recipe]):
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


def _write(path: Path, kept: Kept) -> None:
    content = {
        "schema_version": files.SCHEMA,
        "command": kept.command,
        "job": job_to_mapping(kept.job),
        "recipes": [files.to_mapping(recipe) for recipe in kept.recipes],
    }
    replace_file(path, gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))


def read_kept(path: Path) -> Kept:
    """What is in the file at `path`. Raises: RecordError when a dry run has not kept it."""

    def parse(content: dict[str, Any]) -> Kept:
        recipes = tuple(files.from_mapping(one) for one in content["recipes"])
        return Kept(command=str(content["command"]), job=job_from_mapping(content["job"]), recipes=recipes)

    try:
        return files.reading(path, parse)
    except (RecordError, SpecError) as error:
        reason = error.message.removesuffix("; delete it, and it is recorded anew.")
        raise RecordError(
            f"recipe={str(path)!r} is no recipe of a dry run ({reason}); make one with: peakcast dryrun --save-recipe.",
            parameter="recipe",
            value=str(path),
        ) from error


@contextmanager
def recipe_from(kept: Kept, path: Path, job: TrainingJob) -> Iterator[str]:
    """In here answers about `job` come from the recipes of the file at `path`; gives what to say of it.

    Raises: SpecError where they do not hold for `job`.
    """
    batch, length = job.micro_batch_size, job.sequence_length
    if others := _other_fields(regime(kept.job), regime(job)):
        raise _refused(path, f"is of another {', '.join(others)}; dry-run the script with that", others[0])
    if reason := cannot_be_recorded(job):
        raise _refused(path, f"does not hold: {reason}", "job")
    if not any(recipe.covers(batch, length) for recipe in kept.recipes):
        rule = f"does not hold for micro_batch_size={batch} and sequence_length={length}. {kept.text()}"
        raise _refused(path, rule.rstrip("."), "sequence_length")
    with baseline_from("recipe"), shelf.lent(job, list(kept.recipes)):
        yield f"tensors are those of {path.name}, kept by a dry run of {kept.command}, whose peak it met to {CLOSE:.1%}."


def _refused(path: Path, rule: str, parameter: str) -> SpecError:
    return SpecError(f"recipe={str(path)!r} {rule}.", parameter=parameter, value=str(path))


def _other_fields(one: TrainingJob, other: TrainingJob) -> list[str]:
    """Where the two differ, by the names of their fields; what an architecture is called does not count."""
    found: list[str] = []

    def compare(ours: Any, theirs: Any, name: str) -> None:
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            for key in dict.fromkeys((*ours, *theirs)):
                compare(ours.get(key), theirs.get(key), f"{name}.{key}" if name else str(key))
        elif ours != theirs and name != "architecture.name":
            found.append(name)

    compare(job_to_mapping(one), job_to_mapping(other), "")
    return found
