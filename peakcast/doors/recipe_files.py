"""Files of recipes that belong to a job: `dryrun --save-recipe` and `record --output` write them, `--recipe` reads them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.core.durable import replace_file
from peakcast.core.errors import RecordError, SpecError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.spec import TrainingJob, job_to_mapping
from peakcast.models.recipes import files
from peakcast.models.recipes.lent import Lent, lending
from peakcast.models.recipes.recordable import cannot_be_recorded

if TYPE_CHECKING:
    from peakcast.models.recipes.recipe import Recipe

CLOSE = 0.001
"""How far the peak of a dry run's recipe may be from the script's, as a fraction."""


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """The content of a file of recipes: the job, its recipes, and the dry run that they come from."""

    job: TrainingJob
    recipes: tuple[Recipe, ...]
    command: str = ""
    """The command whose dry run saved it; "" if it was recorded from the job."""
    own_steps: bool = False
    """Whether the script's own steps were recorded, not those of its library."""
    phases: Mapping[str, float] | None = None
    """The check against the script: phase -> the recipe's peak divided by the script's, minus one."""

    def text(self) -> str:
        """For which jobs it is valid, and how accurate it is."""
        phases = (f"{name} {error:+.2%}" for name, error in (self.phases or {}).items())
        said = f" Beside the script's own step: {', '.join(phases)}." if self.phases else ""
        return f"It holds for {'; '.join(one.range_in_words() for one in self.recipes)}.{said}"

    def lent(self) -> Lent:
        """The recipes in the form that answers use."""
        return Lent(self.job, self.recipes)


def write(path: Path, file: RecipeFile) -> None:
    """Write `file` to `path`. Raises: RecordError."""
    content = {
        "schema_version": files.SCHEMA,
        "command": file.command,
        "own_steps": file.own_steps,
        "job": job_to_mapping(file.job),
        "recipes": [files.to_mapping(recipe) for recipe in file.recipes],
    }
    replace_file(path, gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))


def read_recipe_file(path: Path) -> RecipeFile:
    """The content of the file at `path`. Raises: RecordError when it is not a file of recipes."""

    def parse(content: dict[str, Any]) -> RecipeFile:
        recipes = tuple(files.from_mapping(one) for one in content["recipes"])
        job, own = job_from_mapping(content["job"]), bool(content.get("own_steps"))
        return RecipeFile(command=str(content["command"]), own_steps=own, job=job, recipes=recipes)

    try:
        return files.reading(path, parse)
    except (RecordError, SpecError) as error:
        reason = error.message.removesuffix("; delete it, and it is recorded anew.")
        raise RecordError(
            f"recipe={str(path)!r} is no recipe of a dry run ({reason}); make one with: peakcast dryrun --save-recipe, or "
            "peakcast record --output.",
            parameter="recipe",
            value=str(path),
        ) from error


@contextmanager
def recipe_from(file: RecipeFile, path: Path, job: TrainingJob) -> Iterator[str]:
    """A context in which answers about `job` use the recipes in the file at `path`; its value is a sentence about them.

    Raises: SpecError if they are not valid for `job`.
    """
    found = file.lent()
    if others := found.other_fields(job):
        way = "dry-run the script with that" if file.command else "record it with that"
        raise _refused(path, f"is of another {', '.join(others)}; {way}", others[0])
    if reason := cannot_be_recorded(job):
        raise _refused(path, f"does not hold: {reason}", "job")
    if found.why_not(job):
        asked = f"micro_batch_size={job.micro_batch_size} and sequence_length={job.sequence_length}"
        raise _refused(path, f"does not hold for {asked}. {file.text()}".rstrip("."), "sequence_length")
    with lending(found):
        yield _sentence(file, path)


def _sentence(file: RecipeFile, path: Path) -> str:
    if not file.command:
        return f"tensors come from the recipe {path.name}, written by peakcast record."
    stays = "; sizes that its script fixes, such as tables of positions, are as recorded" if file.own_steps else ""
    return (
        f"tensors come from the recipe {path.name}, saved by a dry run of {file.command}, whose peak it reproduces within "
        f"{CLOSE:.1%}{stays}."
    )


def _refused(path: Path, rule: str, parameter: str) -> SpecError:
    return SpecError(f"recipe={str(path)!r} {rule}.", parameter=parameter, value=str(path))
