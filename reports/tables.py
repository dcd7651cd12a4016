"""The form of figures: percentages, quantities, the accuracy table as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.models.evaluation.metrics import AccuracySummary
from peakcast.reports.aims import CHAIN, COVERAGE_AIM, SILENT, TARGETS
from peakcast.reports.figures import LARGE, HeadlineRow, headline

QUANTITY_NAMES = {
    "peak_allocated_bytes": "allocated",
    "peak_reserved_bytes": "reserved",
    "peak_device_bytes": "device",
    "peak_host_bytes": "host",
}
HELD_OUT_NAMES = {
    "architecture": "architecture (shape)",
    "model_type": "model family",
    "layout": "parallel layout",
    "gpu": "GPU type",
    "source": "source (who measured)",
}
HEADLINE_COLUMNS = (
    "GPU",
    "peak",
    "size",
    "rows",
    "architectures",
    "median",
    "mean",
    "p95",
    "worst",
    "under-predicted",
    "baseline alone: median",
    "p95",
    "90 % bars cover",
    "half-width",
    "silent misses",
    "target",
)
FIGURE_COLUMNS = HEADLINE_COLUMNS[HEADLINE_COLUMNS.index("rows") : HEADLINE_COLUMNS.index("target")]
"""The columns of `figures`."""
SHORT_COLUMNS = (
    *("GPU", "peak", "rows", "architectures", "median", "p95"),
    *("90 % bars cover", "half-width", "silent misses", "target"),
)
"""The columns of the README's table, which has the rows of at least 5 GiB."""
SMALL_NOTE = (
    "Peaks below 5 GiB, of which buffers of fixed size are a large part, and every other figure are in the reports.\n"
)


def percent(value: float, digits: int | None = None) -> str:
    """A fraction as a percentage: two digits below 1 %, one below 100 %, unless `digits` says."""
    if digits is None:
        digits = 2 if abs(value) < 0.01 else 1 if abs(value) < 1 else 0
    return f"{value * 100:.{digits}f} %"


def signed(error: float) -> str:
    """A fraction as a percentage with its sign."""
    return ("+" if error > 0 else "−" if error < 0 else "") + percent(abs(error))


def figures(summary: AccuracySummary) -> list[str]:
    """The cells of one summary, in the order of FIGURE_COLUMNS."""
    errors, baseline = summary.errors, summary.baseline_errors
    return [
        str(summary.num_rows),
        str(summary.num_architectures),
        *(percent(value) for value in (errors.median, errors.mean, errors.p95, errors.worst)),
        percent(errors.under_predicted, 0),
        percent(baseline.median),
        percent(baseline.p95),
        percent(summary.coverage, 0),
        "± " + percent(summary.median_half_width),
        str(summary.silent_misses),
    ]


def target_cell(row: HeadlineRow) -> str:
    """`met`, or the targets that are missed."""
    missed = [aim.figure for aim in row.aims if not aim.met(row.summary)]
    return "missed: " + ", ".join(missed) if missed else "met"


def headline_cells(evaluation: Evaluation, gpu: str | None = None) -> list[list[str]]:
    """The accuracy table as text cells, one list per line."""
    return [
        [row.gpu, QUANTITY_NAMES[row.quantity], row.size, *figures(row.summary), target_cell(row)]
        for row in headline(evaluation, gpu)
    ]


def headline_markdown(evaluation: Evaluation, gpu: str | None = None) -> str:
    """The accuracy table as Markdown, ended by a newline, with a sentence about it."""
    return markdown_table(HEADLINE_COLUMNS, headline_cells(evaluation, gpu)) + "\n" + headline_note(evaluation) + "\n"


def short_markdown(evaluation: Evaluation) -> str:
    """The README's accuracy table: for rows of at least 5 GiB, the figures that tell whether to trust an answer."""
    large = [cells for cells in headline_cells(evaluation) if cells[HEADLINE_COLUMNS.index("size")] == LARGE]
    table = markdown_table(SHORT_COLUMNS, map(short_cells, large))
    return f"{table}\n{headline_note(evaluation)}\n{targets_note()}\n{SMALL_NOTE}"


def short_cells(cells: Sequence[str]) -> list[str]:
    """The cells of SHORT_COLUMNS, taken from a line of the whole table."""
    return [cells[HEADLINE_COLUMNS.index(column)] for column in SHORT_COLUMNS]


def headline_note(evaluation: Evaluation) -> str:
    """A sentence on the rows behind the accuracy table."""
    left_out = sum(evaluation.left_out.values())
    return (
        f"Errors are |predicted / measured − 1| of {evaluation.num_rows} rows ({evaluation.num_configurations} "
        f"configurations, repeats count once), each predicted without any row of its architecture; {left_out} rows are "
        "left out and counted in the reports. A silent miss is a row off by more than 10 % whose answer has no finding "
        "that says why."
    )


def targets_note() -> str:
    """A sentence on the targets, and on why a coverage can be too high."""
    own = {name: [str(aim) for aim in TARGETS[name] if aim not in (COVERAGE_AIM, SILENT)] for name in CHAIN}
    asked = "; ".join(f"{', '.join(aims)} for {QUANTITY_NAMES[name]}" for name, aims in own.items())
    too_wide = "bars that cover more are wider than need be"
    return f"The targets are {asked}; and for each {COVERAGE_AIM} ({too_wide}) and {SILENT}."


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table with right-aligned numbers, ended by a newline."""
    rows = [list(line) for line in lines]
    numeric = [bool(rows) and all(line[i][:1] in "±-−0123456789" for line in rows) for i in range(len(columns))]
    marks = ["--:" if right else "---" for right in numeric]
    body = [list(columns), marks, *([_escaped(cell) for cell in line] for line in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in body)


def _escaped(cell: str) -> str:
    return " ".join(cell.replace("|", "\\|").split())
