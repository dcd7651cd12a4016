"""Recipes that a user brings along, used instead of the shipped ones; a job that the file does not cover gets no answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from peakcast.jobs.spec import TrainingJob, job_to_mapping
from peakcast.models.recipes.recipe import Recipe
from peakcast.models.recipes.regime import point_of, regime


@dataclass(frozen=True, eq=False)
class Lent:
    """Recipes of the network and regime of `job`."""

    job: TrainingJob
    recipes: tuple[Recipe, ...]

    def recipe_of(self, job: TrainingJob) -> Recipe | None:
        """The recipe that covers `job`; None if there is none."""
        if not self._covers(job):
            return None
        found = next((one for one in self.recipes if one.covers(*point_of(job))), None)
        return None if found is None else found.at(*point_of(job))

    def why_not(self, job: TrainingJob) -> str:
        """Why none of the recipes covers `job`; "" if one does."""
        if not self._covers(job):
            return f"the recipe is of another {', '.join(self.other_fields(job))}"
        return "" if self.recipe_of(job) is not None else "the recipe is of other batches or lengths"

    def covered(self, name: str, job: TrainingJob) -> tuple[int, int]:
        """The smallest and the largest value of "micro_batch_size" or "sequence_length" with which `job`, otherwise
        unchanged, is covered; (1, 0) if none is."""
        batch, length = job.micro_batch_size, job.sequence_length
        if name == "micro_batch_size":
            found = [one.batches for one in self.recipes if one.covers(one.batches[0], length)]
        else:
            found = [one.lengths for one in self.recipes if one.batches[0] <= batch <= one.batches[1]]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else (1, 0)

    def other_fields(self, job: TrainingJob) -> list[str]:
        """The fields of the regime in which `job` differs."""
        return _other_fields(_without_name(self.job), _without_name(job))

    def _covers(self, job: TrainingJob) -> bool:
        """Whether `job` has the network and regime of these recipes."""
        return _without_name(self.job) == _without_name(job)


_LENT: ContextVar[Lent | None] = ContextVar("lent recipes", default=None)


def lent() -> Lent | None:
    """The recipes that were brought along; None if there are none."""
    return _LENT.get()


@contextmanager
def lending(recipes: Lent | None) -> Iterator[None]:
    """Inside this context, answers come from these recipes alone (None: from the shelf and the ledger, as usual)."""
    token = _LENT.set(recipes)
    try:
        yield
    finally:
        _LENT.reset(token)


@lru_cache(maxsize=1024)
def _without_name(job: TrainingJob) -> TrainingJob:
    """The regime of `job`, without its network's name."""
    found = regime(job)
    return found.replace(architecture=replace(found.architecture, name=""))


def _other_fields(one: TrainingJob, other: TrainingJob) -> list[str]:
    """The names of the fields in which the two differ."""
    found: list[str] = []

    def compare(ours: Any, theirs: Any, name: str) -> None:
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            for key in dict.fromkeys((*ours, *theirs)):
                compare(ours.get(key), theirs.get(key), f"{name}.{key}" if name else str(key))
        elif ours != theirs:
            found.append(name)

    compare(job_to_mapping(one), job_to_mapping(other), "")
    return found
