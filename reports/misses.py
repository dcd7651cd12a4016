"""Tables of figures that miss their targets, the rows that cause this, and what those rows are known to lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.models.evaluation.metrics import AccuracySummary, Scored, summarise
from peakcast.reports.aims import Aim, goals
from peakcast.reports.decision_tables import TitledTable
from peakcast.reports.figures import headline
from peakcast.reports.known_causes import KnownCause, cause_of
from peakcast.reports.tables import QUANTITY_NAMES, percent, signed

MISS_COLUMNS = ("of", "figure", "is", "asked", "rows behind it", "what is missing")
GOAL_COLUMNS = ("of", "rows", "figure", "is", "asked", "")
CAUSE_COLUMNS = ("cause", "rows", "errors", "what is missing", "how that is known")
NO_CAUSE = "not known"
MOST_NAMED = 6
"""Of the rows that nothing explains a table names this many, those that are off most; `rows.csv` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A figure that misses its target, and the rows that cause it."""

    of: str
    aim: Aim
    cells: tuple[Scored, ...]
    """All rows of the figure."""
    behind: tuple[Scored, ...]
    alone: tuple[str, ...] = ()
    """As in `Goal`."""

    @property
    def line(self) -> list[str]:
        """The line of the table, with the columns MISS_COLUMNS."""
        summary = summarise(self.cells)
        value, asked = shown(self.aim, summary), self.aim.asked
        if not self.behind:  # bars are wider than needed
            return [self.of, self.aim.figure, value, asked, "–", self._why_wide(summary)]
        found = [(cause.name if cause else NO_CAUSE, len(cells)) for cause, cells in causes(self.behind)]
        reasons = "; ".join(f"{name} ({count})" for name, count in found)
        return [self.of, self.aim.figure, value, asked, str(len(self.behind)), reasons]

    def _why_wide(self, summary: AccuracySummary) -> str:
        """Why bars are wider than these rows need. Most rows are of architectures that are predicted exactly, so that any
        bar covers them; what a new architecture may expect is the share of each architecture's rows, averaged."""
        count = summary.num_architectures
        rest = f"bars are wider than these rows need: {count} architecture{'s have' if count > 1 else ' has'} rows"
        if self.aim.figure != "coverage":
            alone = f", and no source but this one has this peak of {', '.join(self.alone)}" if self.alone else ""
            return rest + alone
        mean = percent(coverage_by_architecture(self.cells), 0)
        return f"{rest}, and averaged over architectures {mean} of an architecture's rows are inside"


def coverage_by_architecture(cells: Iterable[Scored]) -> float:
    """The share of an architecture's rows that lie in their bars, averaged over architectures. A fraction."""
    rows: dict[str, list[Scored]] = {}
    for cell in cells:
        rows.setdefault(cell.architecture, []).append(cell)
    return sum(summarise(own).coverage for own in rows.values()) / len(rows)


def shown(aim: Aim, summary: AccuracySummary) -> str:
    """The figure of `summary` as text, such as `1.2 %`, or a number of rows."""
    value = aim.value(summary)
    return f"{value:.0f}" if aim.figure == "silent misses" else percent(value)


def causes(cells: Iterable[Scored]) -> list[tuple[KnownCause | None, list[Scored]]]:
    """`cells` grouped by the cause that explains them, most cells first; those without an explanation last, under
    None."""
    found: dict[KnownCause | None, list[Scored]] = {}
    for cell in cells:
        found.setdefault(cause_of(cell), []).append(cell)
    return sorted(found.items(), key=lambda item: (item[0] is None, -len(item[1]), item[0].name if item[0] else ""))


def misses(of: str, aims: Sequence[Aim], cells: Sequence[Scored], alone: tuple[str, ...] = ()) -> list[Miss]:
    """The targets that the figures of `cells` miss. `alone`: as in `Goal`."""
    summary, missed = summarise(cells), partial(Miss, of=of, cells=tuple(cells), alone=alone)
    return [missed(aim=aim, behind=aim.behind(cells)) for aim in aims if not aim.met(summary)]


def gpu_misses(evaluation: Evaluation, gpu: str) -> list[Miss]:
    """The missed targets in the accuracy table of `gpu`."""
    return [
        miss
        for row in headline(evaluation, gpu)
        for miss in misses(f"{QUANTITY_NAMES[row.quantity]}, {row.size}", row.aims, row.cells)
    ]


def goal_misses(evaluation: Evaluation) -> list[Miss]:
    """The missed goals over all GPU types."""
    return [miss for goal in goals(evaluation) for miss in misses(goal.name, goal.aims, goal.cells, goal.alone)]


def goal_lines(evaluation: Evaluation) -> list[list[str]]:
    """A line with the columns GOAL_COLUMNS for each target of each goal."""
    lines = []
    for goal in goals(evaluation):
        summary = summarise(goal.cells)
        for aim in goal.aims:
            value, met = shown(aim, summary), "met" if aim.met(summary) else "missed"
            lines.append([goal.name, str(len(goal.cells)), aim.figure, value, aim.asked, met])
    return lines


def goal_tables(evaluation: Evaluation) -> Iterator[TitledTable]:
    """The goals over all GPU types, which of them are missed, and why."""
    lines = goal_lines(evaluation)
    if lines:
        yield "What was aimed at on published rows", GOAL_COLUMNS, lines
        yield from miss_tables(goal_misses(evaluation))


def cause_lines(cells: Iterable[Scored]) -> list[list[str]]:
    """A line with the columns CAUSE_COLUMNS for each cause of the errors of `cells`."""
    lines = []
    for cause, explained in causes(cells):
        errors = sorted(cell.error for cell in explained)
        ends = " to ".join(dict.fromkeys(signed(error) for error in (errors[0], errors[-1])))
        texts = (cause.missing, cause.evidence) if cause else (_worst_named(explained), "–")
        lines.append([cause.name if cause else NO_CAUSE, str(len(explained)), ends, *texts])
    return lines


def _worst_named(cells: Iterable[Scored]) -> str:
    """The cases of `cells`, the worst first."""
    names = list(dict.fromkeys(cell.case for cell in sorted(cells, key=lambda cell: -abs(cell.error))))
    more = [f"{len(names) - MOST_NAMED} more in rows.csv"] if len(names) > MOST_NAMED else []
    return ", ".join([*names[:MOST_NAMED], *more])


def miss_tables(found: Sequence[Miss], named: Iterable[Scored] = ()) -> Iterator[TitledTable]:
    """The misses, and the causes of the errors of their rows and of `named`; no table if nothing is missed."""
    if found:
        yield "Targets that are missed, and why", MISS_COLUMNS, [miss.line for miss in found]
    off = {(cell.key, cell.quantity): cell for cells in (*(miss.behind for miss in found), named) for cell in cells}
    if off:
        yield "Causes that are known", CAUSE_COLUMNS, cause_lines(off.values())
