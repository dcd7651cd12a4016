"""Changes that might lower a job's peak and have no number yet, because the changed job's recipe was never recorded."""

from __future__ import annotations

from peakcast.core.errors import PeakcastError
from peakcast.explaining.advice import CANDIDATES, Candidate, Changes, changed
from peakcast.jobs.spec import TrainingJob
from peakcast.models.recipes.recordable import cannot_be_recorded
from peakcast.models.recipes.shelf import recipe_of, wants_recipe

NAMES = ("checkpointing", "fused-loss", "flash-attention", "lora")
"""Candidates that change what is recorded of a network, and that are worth a recording."""


def uncompared(job: TrainingJob) -> tuple[Candidate, ...]:
    """Candidates of `NAMES` that apply to `job`, and of which a recipe can be recorded and there is none."""
    found = []
    for candidate in CANDIDATES:
        changes = candidate.changes(job) if candidate.name in NAMES and job.task in candidate.tasks else {}
        if changes and _lacks_recipe(job, changes):
            found.append(candidate)
    return tuple(found)


def _lacks_recipe(job: TrainingJob, changes: Changes) -> bool:
    try:
        other = changed(job, changes)
        return wants_recipe(other) and recipe_of(other) is None and not cannot_be_recorded(other)
    except PeakcastError:
        return False
