"""Writes the reports: one folder per GPU type with HTML, Markdown and CSV, and a page that lists them.

Pages load nothing from the network and contain no date: the same rows give the same bytes.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast import __version__
from peakcast.answers.prediction import QUANTITIES
from peakcast.core.units import GIB
from peakcast.models.evaluation.evaluation import NAMED_ABOVE, Evaluation
from peakcast.models.evaluation.metrics import Scored
from peakcast.reports import figures, tables
from peakcast.reports.decision_tables import extra_tables
from peakcast.reports.device_tables import device_tables
from peakcast.reports.known_causes import cause_of
from peakcast.reports.misses import NO_CAUSE, goal_tables, gpu_misses, miss_tables
from peakcast.reports.plots import PLOTS, svg

if TYPE_CHECKING:
    from jinja2 import Environment

OURS = "peakcast"
"""`source` of rows that this project measured."""
KNOWN_CHARACTERS = 120
"""The page shows this many characters of a row's remarks; the CSV has all of them."""
GROUPS = {"source": "project", "framework and size": "size", "layout": "layout", "architecture": "architecture"}
"""Title → attribute of `Scored` by which the figures of a quantity are grouped."""
NAMED_COLUMNS = (
    "case",
    "layout",
    "architecture",
    "measured",
    "predicted",
    "error",
    "baseline's",
    "what is missing",
    "of the row",
)
CSV_COLUMNS = (
    "held_out",
    "quantity",
    "key",
    "case",
    "source",
    "framework",
    "architecture",
    "layout",
    "measured_bytes",
    "baseline_bytes",
    "point_bytes",
    "lower_bytes",
    "upper_bytes",
    "upper_95_bytes",
    "error",
    "baseline_error",
    "weight",
    "missing",
    "known",
)


def write_report(evaluation: Evaluation, gpu: str, folder: Path) -> list[Path]:
    """Write `folder`/<gpu>/report.html, report.md and rows.csv; returns their paths."""
    context = report_context(evaluation, gpu)
    place = folder / slug(gpu)
    return [
        _write(place / "report.html", _template("report.html.j2").render(context)),
        _write(place / "report.md", _template("report.md.j2").render(context)),
        _write(place / "rows.csv", rows_csv(evaluation, gpu)),
    ]


def write_index(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write `folder`/index.html, the page over the GPU types of `evaluation`; returns its path."""
    gpus = sorted({name for table in evaluation.tables for name in table.by_gpu})
    context = {
        "gpus": [{"name": gpu, "slug": slug(gpu), "sources": _sources(evaluation, gpu)} for gpu in gpus],
        "columns": tables.HEADLINE_COLUMNS,
        "headline": tables.headline_cells(evaluation),
        "note": tables.headline_note(evaluation),
        "extra": [*goal_tables(evaluation), *extra_tables(evaluation)],
        **_provenance(evaluation),
    }
    return [_write(folder / "index.html", _template("index.html.j2").render(context))]


def slug(gpu: str) -> str:
    """The folder name of a GPU type: lower case, no blanks."""
    return "-".join(gpu.lower().split())


def report_context(evaluation: Evaluation, gpu: str) -> dict[str, Any]:
    """Everything that the templates of one GPU type show, as texts and finished pictures."""
    named = [cell for q in QUANTITIES for cell in figures.cells_of(evaluation, gpu, q) if abs(cell.error) > NAMED_ABOVE]
    return {
        "gpu": gpu,
        "slug": slug(gpu),
        "sources": _sources(evaluation, gpu),
        "columns": tables.HEADLINE_COLUMNS,
        "headline": tables.headline_cells(evaluation, gpu),
        "note": tables.headline_note(evaluation),
        "targets": {
            tables.QUANTITY_NAMES[row.quantity]: ", ".join(map(str, row.aims)) for row in figures.headline(evaluation, gpu)
        },
        "split_columns": ("held out", "peak", *tables.FIGURE_COLUMNS),
        "splits": [
            [tables.HELD_OUT_NAMES.get(split, split), tables.QUANTITY_NAMES[quantity], *tables.figures(summary)]
            for split, quantity, summary in figures.by_split(evaluation, gpu)
        ],
        "quantities": [
            _quantity_context(evaluation, gpu, quantity)
            for quantity in QUANTITIES
            if figures.cells_of(evaluation, gpu, quantity)
        ],
        "steps_columns": ("step", "rows", "median", "median of the absolute", "worst"),
        "steps": [_step(step) for step in figures.error_steps(evaluation, gpu)],
        "extra": [
            *miss_tables(gpu_misses(evaluation, gpu), named),
            *device_tables(evaluation, gpu),
            *extra_tables(evaluation, gpu),
        ],
        "named_above": tables.percent(NAMED_ABOVE, 0),
        **_provenance(evaluation),
    }


def _quantity_context(evaluation: Evaluation, gpu: str, quantity: str) -> dict[str, Any]:
    cells = figures.cells_of(evaluation, gpu, quantity)
    floor = evaluation.floors[quantity]
    named = [cell for cell in cells if abs(cell.error) > NAMED_ABOVE]
    return {
        "name": tables.QUANTITY_NAMES[quantity],
        "num_rows": len(cells),
        "plots": [(svg(draw, cells, f"{gpu} {quantity} {name}"), note) for name, (draw, note) in PLOTS.items()],
        "groups": [
            (
                (title, *tables.FIGURE_COLUMNS),
                [[name, *tables.figures(part)] for name, part in figures.by_group(cells, attribute).items()],
            )
            for title, attribute in GROUPS.items()
        ],
        "floor": (
            f"{floor.num_configurations} configurations were run more than once, on any GPU type; their repeats differ by "
            f"{tables.percent(floor.median)} in the median, {tables.percent(floor.p95)} at p95, "
            f"{tables.percent(floor.worst)} at worst. That much of an error is the floor, which no predictor can pass."
            if floor.num_configurations
            else "No configuration was run more than once, so the floor of the error is not known here."
        ),
        "named_columns": NAMED_COLUMNS,
        "named": [_named(cell) for cell in named],
        "num_named": len(named),
    }


def _named(cell: Scored) -> list[str]:
    cause = cause_of(cell)
    return [
        cell.case or cell.key,
        cell.layout,
        cell.architecture,
        f"{cell.measured / GIB:.2f} GiB",
        f"{cell.point / GIB:.2f} GiB",
        tables.signed(cell.error),
        tables.signed(cell.baseline_error),
        cause.name if cause else NO_CAUSE,
        shortened(cell.known, KNOWN_CHARACTERS) or "–",
    ]


def _step(step: figures.ErrorStep) -> list[str]:
    median, worst = (f"{size / GIB:+.2f} GiB".replace("-", "−") for size in (step.median_bytes, step.worst_bytes))
    return [step.name, str(step.num_rows), median, f"{step.median_size_bytes / GIB:.2f} GiB", worst]


def shortened(text: str, most: int) -> str:
    """`text`; if it is longer than `most` characters, it is cut at a blank and ends with an ellipsis."""
    return text if len(text) <= most else text[:most].rpartition(" ")[0] + " …"


def _sources(evaluation: Evaluation, gpu: str) -> list[tuple[str, int, bool]]:
    """(who measured, number of rows, whether it was this project) on `gpu`, most rows first."""
    found = {
        cell.key: cell.source
        for table in evaluation.tables
        for cell in table.cells
        if cell.gpu == gpu and table.held_out == "architecture"
    }
    counts = Counter(found.values())
    return [(name, count, name == OURS) for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def _provenance(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "num_rows": evaluation.num_rows,
        "num_configurations": evaluation.num_configurations,
        "left_out": sorted(evaluation.left_out.items(), key=lambda item: (-item[1], item[0])),
        "num_left_out": sum(evaluation.left_out.values()),
        "versions": {package: ", ".join(seen) for package, seen in evaluation.versions.items()},
        "rows_digest": evaluation.rows_digest,
        "version": __version__,
    }


def rows_csv(evaluation: Evaluation, gpu: str) -> str:
    """Every scored row of `gpu` under every split, as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in evaluation.tables:
        for cell in sorted((c for c in table.cells if c.gpu == gpu), key=lambda c: (c.key, c.quantity)):
            texts = (cell.key, cell.case, cell.source, cell.framework, cell.architecture, cell.layout)
            numbers = (cell.measured, cell.baseline, cell.point, cell.lower, cell.upper, cell.upper_95)
            shares = (f"{value:.6f}" for value in (cell.error, cell.baseline_error, cell.weight))
            cause = cause_of(cell)
            said = (cause.name if cause else "", cell.known) if abs(cell.error) > NAMED_ABOVE else ("", "")
            writer.writerow((table.held_out, table.quantity, *map(_safe, texts), *numbers, *shares, *map(_safe, said)))
    return buffer.getvalue()


def _safe(text: str) -> str:
    """`text` as a cell that a spreadsheet reads as text, never as a formula."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


@cache
def _environment() -> Environment:
    from jinja2 import DictLoader, Environment, StrictUndefined

    folder = files("peakcast.reports").joinpath("templates")
    texts = {item.name: item.read_text(encoding="utf-8") for item in folder.iterdir() if item.name.endswith(".j2")}
    environment = Environment(
        loader=DictLoader(texts),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["markdown_table"] = lambda lines, columns: tables.markdown_table(columns, lines).rstrip("\n")
    return environment


def _template(name: str) -> Any:
    return _environment().get_template(name)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path
