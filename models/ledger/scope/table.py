"""The shape of the tables that say what the ledger does not cover: sections of limits, and how findings come from them.

A `ScopeLimit` is a row: what happens, the parameter, when it holds, and the sentence that says so. A `Section` lists rows
about one feature, the most telling first. A job gets at most one finding from each section of a table: that of the first
row that holds. A section may take the place of a row: its rows then share a condition, and
the beginning and end of their sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from peakcast.core.findings import (
    FAILS,
    GUESSED,
    LESS,
    MORE,
    NEARLY,
    NEARLY_LESS,
    NEARLY_MORE,
    UNKNOWN,
    Effect,
    Finding,
    found,
)
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.scope.fact import Fact, always
from peakcast.models.ledger.scope.words import WORDS

STATUS: Mapping[Effect, str] = {
    FAILS: "fails", GUESSED: "guessed", UNKNOWN: "unknown", MORE: "needs more", LESS: "needs less",
    NEARLY: "nearly", NEARLY_MORE: "nearly, needs more", NEARLY_LESS: "nearly, needs less",
}  # fmt: skip
"""What documentation calls the effect of a limit."""


@dataclass(frozen=True, slots=True)
class ScopeLimit:
    """A row: for jobs of which `when` holds, something is not covered.

    `sentence` says what, and what to do instead. What is in braces is of the job: a setting by its path
    (`{finetuning.method!r}`) or a value in `words.py` by its name.
    """

    effect: Effect
    parameter: str
    when: Fact
    sentence: str
    feature: str = ""
    """The feature that its section is about."""
    share: float | None = None
    """The share that the sentence says such jobs were off by at most (`Finding.share`)."""


@dataclass(frozen=True, eq=False)
class Section:
    """The rows about `feature`, in the order in which they are asked; `when`: of which jobs any of them can hold."""

    feature: str
    rows: tuple[ScopeLimit | Section, ...]
    when: Fact = always
    start: str = ""
    end: str = ""

    @cached_property
    def parts(self) -> tuple[tuple[Fact, tuple[ScopeLimit, ...]], ...]:
        """The rows in order, those together that share a condition, after that condition. Their sentences are whole."""
        parts: list[tuple[Fact, tuple[ScopeLimit, ...]]] = []
        for row in self.rows:
            if isinstance(row, Section):
                parts += ((self.when & when, tuple(map(self._said, rows))) for when, rows in row.parts)
            elif parts and parts[-1][0] is self.when:
                parts[-1] = (self.when, (*parts[-1][1], self._said(row)))
            else:
                parts.append((self.when, (self._said(row),)))
        return tuple(parts)

    def holding(self, job: TrainingJob) -> Iterator[ScopeLimit]:
        """The rows that hold of `job`, in order."""
        for when, rows in self.parts:
            if when.holds(job):
                for row in rows:
                    if row.when.holds(job):
                        yield row

    def every(self) -> tuple[ScopeLimit, ...]:
        """All rows, in order."""
        return tuple(row for _, rows in self.parts for row in rows)

    def finding(self, job: TrainingJob) -> Finding | None:
        """A finding for the first row that holds of `job`; None if none does."""
        limit = next(self.holding(job), None)
        if limit is None:
            return None
        sentence = limit.sentence.format_map(_SentenceValues(job))
        return found(sentence, limit.parameter, effect=limit.effect, share=limit.share)

    def _said(self, row: ScopeLimit) -> ScopeLimit:
        return replace(row, sentence=self.start + row.sentence + self.end, feature=row.feature or self.feature)


class _SentenceValues(dict[str, Any]):
    """The values of the names in a sentence's braces: settings of a job, and `WORDS`."""

    def __init__(self, job: TrainingJob) -> None:
        super().__init__()
        self.job = job

    def __missing__(self, name: str) -> Any:
        return WORDS[name](self.job) if name in WORDS else getattr(self.job, name)


# -- rows by their status: parameter, condition, sentence ----------------------------------------------------------------

fails = partial(ScopeLimit, FAILS)
"""A library refuses such a job."""
guessed = partial(ScopeLimit, GUESSED)
"""The network is not known; the ledger has the numbers of another one."""
unknown = partial(ScopeLimit, UNKNOWN)
"""Not counted, or compared with nothing; whether it needs more or less is not known."""
more = partial(ScopeLimit, MORE)
"""Memory that the job needs is not counted; `less`: memory that it saves is not counted."""
less = partial(ScopeLimit, LESS)
nearly = partial(ScopeLimit, NEARLY)
"""Its trace differs by the share that the sentence says; `nearly_more`, `nearly_less`: is above, below."""
nearly_more = partial(ScopeLimit, NEARLY_MORE)
nearly_less = partial(ScopeLimit, NEARLY_LESS)
