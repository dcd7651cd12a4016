"""Recording: a network that the ledger does not know gets a recipe from the library that is installed here."""

from __future__ import annotations

from dataclasses import replace

from peakcast.errors import CollectorError
from peakcast.fields import FrozenMapping
from peakcast.models.recipes.covering import cannot_be_recorded
from peakcast.models.recipes.shelf import could_not_record, installed, recipe_of, shelve, wants_recipe, why_not
from peakcast.spec import TrainingJob


def ensure_recipe(job: TrainingJob) -> None:
    """Record the recipe that `job` wants, unless it is there or cannot be made. Why not is remembered: the answer says."""
    if not wants_recipe(job) or recipe_of(job) is not None or cannot_be_recorded(job) or why_not(job):
        return
    if "transformers" not in installed():
        could_not_record(job, "recording it needs transformers; install it with: pip install 'peakcast[collect]'")
        return
    try:
        record_recipe(job)
    except CollectorError as error:
        could_not_record(job, str(error).rstrip("."))


def record_recipe(job: TrainingJob) -> None:
    """Record the recipe of `job` and keep it. Raises: CollectorError when the library cannot run the job on fake tensors."""
    from peakcast.collectors.recording import walks_of
    from peakcast.models.recipes.recipe import recorded
    from peakcast.models.recipes.regime import regime
    from peakcast.models.recipes.walk import Walk

    with walks_of(regime(job)) as walk:
        recipe = recorded(lambda samples: [Walk.read(walk(*sample)) for sample in samples], (job.micro_batch_size, job.sequence_length))
    shelve(job, replace(recipe, versions=FrozenMapping(installed())))
