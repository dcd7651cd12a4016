"""The shape of the tables that say what the ledger does not cover: sections of limits, and how findings come from them.

A `Limit` is a row: what happens, the parameter, when it holds, and the sentence that says so. A `Section` lists rows about
one feature, the most telling first; a job gets one finding at most from each section of a table, that of the first row that
holds. A section may stand in place of a row: it then shares its condition, and how its sentences start and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peakcast.core.findings import FAILS, LESS, MORE, NEARLY, NEARLY_LESS, NEARLY_MORE, UNKNOWN, Effect, Finding, found
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.scope.fact import Fact, always
from peakcast.models.ledger.scope.words import WORDS

STATUS: Mapping[Effect, str] = {
    FAILS: "fails", UNKNOWN: "unknown", MORE: "needs more", LESS: "needs less",
    NEARLY: "nearly", NEARLY_MORE: "nearly, needs more", NEARLY_LESS: "nearly, needs less",
}  # fmt: skip
"""What documentation calls the effect of a limit."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A row: for jobs of which `when` holds, something is not covered.

    `sentence` says what, and what to do instead. What is in braces is of the job: a setting by its path
    (`{finetuning.method!r}`) or a value in `words.py` by its name.
    """

    effect: Effect
    parameter: str
    when: Fact
    sentence: str


@dataclass(frozen=True, slots=True)
class Section:
    """The rows about `feature`, in the order in which they are asked; `when`: of which jobs any of them can hold."""

    feature: str
    rows: tuple[Limit | Section, ...]
    when: Fact = always
    start: str = ""
    end: str = ""

    def holding(self, job: TrainingJob) -> Iterator[Limit]:
        """The rows that hold of `job`, in order, each with its whole sentence."""
        if not self.when(job):
            return
        for row in self.rows:
            if isinstance(row, Section):
                yield from map(self._said, row.holding(job))
            elif row.when(job):
                yield self._said(row)

    def every(self) -> Iterator[Limit]:
        """All rows, each with its whole condition and sentence."""
        for row in self.rows:
            for limit in row.every() if isinstance(row, Section) else (row,):
                when = limit.when if self.when is always else self.when & limit.when
                yield self._said(Limit(limit.effect, limit.parameter, when, limit.sentence))

    def finding(self, job: TrainingJob) -> Finding | None:
        """A finding for the first row that holds of `job`; None if none does."""
        limit = next(self.holding(job), None)
        if limit is None:
            return None
        return found(limit.sentence.format_map(_Values(job)), limit.parameter, effect=limit.effect)

    def _said(self, row: Limit) -> Limit:
        return Limit(row.effect, row.parameter, row.when, self.start + row.sentence + self.end)


class _Values(dict[str, Any]):
    """What sentences name: the settings of a job, and `WORDS`."""

    def __init__(self, job: TrainingJob) -> None:
        super().__init__()
        self.job = job

    def __missing__(self, name: str) -> Any:
        return WORDS[name](self.job) if name in WORDS else getattr(self.job, name)


# -- rows by their status ------------------------------------------------------------------------------------------------


def fails(parameter: str, when: Fact, sentence: str) -> Limit:
    """A library refuses such a job."""
    return Limit(FAILS, parameter, when, sentence)


def unknown(parameter: str, when: Fact, sentence: str) -> Limit:
    """Not counted, or compared with nothing; whether it needs more or less is not known."""
    return Limit(UNKNOWN, parameter, when, sentence)


def more(parameter: str, when: Fact, sentence: str) -> Limit:
    """Something is not counted that needs more memory."""
    return Limit(MORE, parameter, when, sentence)


def less(parameter: str, when: Fact, sentence: str) -> Limit:
    """Something is not counted that saves memory."""
    return Limit(LESS, parameter, when, sentence)


def nearly(parameter: str, when: Fact, sentence: str) -> Limit:
    """Its trace differs by the share that the sentence says."""
    return Limit(NEARLY, parameter, when, sentence)


def nearly_more(parameter: str, when: Fact, sentence: str) -> Limit:
    """Its trace has more, by the share that the sentence says."""
    return Limit(NEARLY_MORE, parameter, when, sentence)


def nearly_less(parameter: str, when: Fact, sentence: str) -> Limit:
    """Its trace has less, by the share that the sentence says."""
    return Limit(NEARLY_LESS, parameter, when, sentence)
