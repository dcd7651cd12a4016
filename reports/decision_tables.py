"""Further tables: how often the answers to "does it fit" are right, and how much a new GPU type gains from rows of its
own."""

from __future__ import annotations

from collections.abc import Iterator

from peakcast.models.evaluation.decisions import OUTCOMES
from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.reports.tables import QUANTITY_NAMES, percent

TitledTable = tuple[str, tuple[str, ...], list[list[str]]]
"""(title, columns, lines)."""

DECISION_COLUMNS = (
    "judged by",
    "rows",
    "capacities",
    "answers",
    "fits: precision",
    "recall",
    "does not: precision",
    "recall",
    "uncertain",
    "above the 95 % bound",
)
LEARNING_COLUMNS = ("GPU", "peak", "its rows", "judged", "median", "p95", "90 % bars cover", "half-width")


def decision_cells(evaluation: Evaluation) -> list[list[str]]:
    """A line per quantity (every measured peak against a grid of capacities), and one for the outcomes of the runs
    themselves."""
    lines = []
    for found in evaluation.decisions:
        total = found.total
        uncertain = (total.uncertain_fits + total.uncertain_too_big) / total.num_asked if total.num_asked else 0.0
        shares = (total.precision, total.recall, total.no_precision, total.no_recall)
        own = found.quantity == OUTCOMES
        lines.append(
            [
                "the runs' own outcome" if own else QUANTITY_NAMES[found.quantity] + " peak",
                str(found.num_rows),
                "own GPU" if own else str(len(found.by_capacity)),
                f"{total.num_asked:.0f}",
                *("–" if share is None else percent(share, 1) for share in shares),
                percent(uncertain, 1),
                "–" if own else percent(found.above_upper_95, 1),
            ]
        )
    return lines


def learning_cells(evaluation: Evaluation, gpu: str | None = None) -> list[list[str]]:
    """A line per GPU type and number of its own rows in the fit; only those of `gpu` if given."""
    return [
        [
            point.gpu,
            QUANTITY_NAMES[point.quantity],
            str(point.num_rows),
            str(point.num_judged),
            percent(point.median_error),
            percent(point.p95_error),
            percent(point.coverage, 0),
            "± " + percent(point.median_half_width),
        ]
        for point in evaluation.new_hardware
        if gpu in (None, point.gpu)
    ]


def extra_tables(evaluation: Evaluation, gpu: str | None = None) -> Iterator[TitledTable]:
    """Those of the two tables for which `evaluation` has data; the second only for `gpu` if given."""
    if evaluation.decisions:
        yield "Does it fit? On architectures that were not fitted on", DECISION_COLUMNS, decision_cells(evaluation)
    if evaluation.new_hardware:
        title = "A GPU type with few rows of its own, on cases that ran on every type"
        yield title, LEARNING_COLUMNS, learning_cells(evaluation, gpu)
