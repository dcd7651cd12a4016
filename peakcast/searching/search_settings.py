"""How layouts are searched, whatever is asked about them: `SearchSettings`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peakcast.core.findings import Finding
from peakcast.jobs.spec import TrainingJob
from peakcast.models.recipes.lent import Lent
from peakcast.searching.space import GPUS_PER_NODE

Progress = Callable[[str], None]
RecordRecipes = Callable[[Iterable[TrainingJob]], None]
"""Records the recipes that jobs need."""


def _record_nothing(jobs: Iterable[TrainingJob]) -> None:
    """The recipes that are there are all that are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How a search is done, and what it is told beside its question."""

    top: int = 20
    """Number of plans."""
    gpus_per_node: int = GPUS_PER_NODE
    processes: int = 1
    progress: Progress | None = None
    """Called with what the search is doing."""
    findings: tuple[Finding, ...] = ()
    """Those from reading the question."""
    record: RecordRecipes = _record_nothing
    """Called with the jobs whose recipes are needed, if the ledger does not know the network."""
    lent: Lent | None = None
    """Recipes that are used to the exclusion of all others."""

    def say(self, message: str) -> None:
        """Tell whoever waits what the search is doing."""
        if self.progress is not None:
            self.progress(message)


USUAL = SearchSettings()
