"""Prints answers: plain text with GiB for people, strict JSON for programs; `rich` is only used for wide tables."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.answers.remarks import assumptions_shown, warnings_shown
from peakcast.core.units import format_gib
from peakcast.printing.wrapping import wrapped

if TYPE_CHECKING:
    from peakcast.answers.installation import Installation
    from peakcast.collectors.measure.constants import MeasuredConstants
    from peakcast.collectors.measure.runner import CollectionSummary
    from peakcast.doors.calibrating import Checked, Fitted
    from peakcast.models.evaluation.evaluation import Evaluation



# -- programs ---------------------------------------------------------------------------------------------------------


def json_text(value: object) -> str:
    """`value` as indented strict JSON."""
    return json.dumps(value, indent=2, allow_nan=False, default=_as_json)


def json_line(value: object) -> str:
    """`value` as one line of strict JSON."""
    return json.dumps(value, allow_nan=False)


def _as_json(value: Any) -> Any:
    """`value` as JSON values: dataclasses become mappings, paths become texts."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)


# -- a job -----------------------------------------------------------------------------------------------------------


def job_text(job: object, *, as_json: bool) -> str:
    """The job in the form of a job file with every default; the architecture by its name if the catalog has it.

    In YAML, comments at the top say what was assumed and ignored when the job was read.
    """
    from peakcast import catalog
    from peakcast.core.errors import CatalogError
    from peakcast.doors.questions import translation_of
    from peakcast.jobs.spec import job_to_mapping

    translation = translation_of(job)
    read = translation.job
    mapping = job_to_mapping(read)
    try:
        if catalog.architecture(read.architecture.name) == read.architecture:
            mapping["architecture"] = read.architecture.name
    except CatalogError:
        pass
    if as_json:
        return json_text(mapping)
    import yaml

    notes = [*warnings_shown(translation.findings, whole=True), *assumptions_shown(translation.assumptions, whole=True)]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in notes)
    text: str = yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True)
    return comments + text.rstrip()


# -- calibration, accuracy, collection ----------------------------------------------------------------------------------


def fitted_mappings(fitted: Sequence[Fitted]) -> list[dict[str, Any]]:
    """The result of `fit` as JSON values."""
    return [
        {
            "gpu": item.gpu,
            "path": str(item.path),
            "changed": item.changed,
            "rows_by_gpu": {name: quantity.rows_by_gpu for name, quantity in item.calibration.quantities.items()},
            "version": item.version,
            "promoted": item.promoted,
            "comparison": item.comparison,
        }
        for item in fitted
    ]


def fitted_text(fitted: Sequence[Fitted]) -> str:
    """The result of `fit`, one line per GPU type."""
    lines = []
    for item in fitted:
        rows = ", ".join(
            f"{name.removeprefix('peak_').removesuffix('_bytes')} from {sum(quantity.rows_by_gpu.values())} rows"
            for name, quantity in item.calibration.quantities.items()
        )
        lines.append(f"{item.gpu}: {rows}; {'written to' if item.changed else 'unchanged:'} {item.path}")
        if item.version:
            alias = f"the alias {item.gpu} {'now points to it' if item.promoted else 'stays where it was'}"
            compared = item.comparison or "no calibration was registered before that this version reads"
            lines.append(f"  registered as version {item.version}; {alias}: {compared}")
    return "\n".join(lines)


def print_evaluation(evaluation: Evaluation, gpu: str | None = None) -> None:
    """Print the accuracy table; if the output is not a terminal, as wide as the table needs."""
    from rich.console import Console
    from rich.table import Table

    from peakcast.reports.decision_tables import extra_tables
    from peakcast.reports.tables import HEADLINE_COLUMNS, headline_cells, headline_note

    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    table = Table(title="Accuracy on architectures that were not fitted on")
    for index, name in enumerate(HEADLINE_COLUMNS):
        table.add_column(name, justify="right" if 2 <= index < len(HEADLINE_COLUMNS) - 1 else "left")
    for cells in headline_cells(evaluation, gpu):
        table.add_row(*cells)
    console.print(table)
    console.print(headline_note(evaluation))
    for title, columns, lines in extra_tables(evaluation, gpu):
        table = Table(title=title)
        for index, name in enumerate(columns):
            table.add_column(name, justify="right" if index else "left")
        for cells in lines:
            table.add_row(*cells)
        console.print(table)


def checked_mapping(checked: Checked) -> dict[str, Any]:
    """The result of `evaluate --against` as JSON values."""
    return {"checks": [found.to_mapping() for found in checked.checks], "left_out": checked.left_out}


def checked_text(checked: Checked) -> str:
    """The result of `evaluate --against` in sentences, the verdict of each quantity first."""
    blocks = ["\n  ".join(found.sentences) for found in checked.checks]
    left_out = [
        f"{count} {'row was' if count == 1 else 'rows were'} left out: {reason}."
        for reason, count in checked.left_out.items()
    ]
    return "\n".join([*blocks, *left_out])


def installation_text(found: Installation) -> str:
    """The result of `doctor` as text."""
    present = [f"{package} {version}" for package, version in found.versions.items() if version is not None]
    absent = [package for package, version in found.versions.items() if version is None]
    lines = [f"peakcast {found.peakcast} in {found.folder}", f"Python {found.python} on {found.system}"]
    lines.append(wrapped(f"Packages: {', '.join(present)}" + (f"; not installed: {', '.join(absent)}" if absent else "")))
    lines += [f"{name}={value}" for name, value in found.variables.items()]
    lines.append(f"NVIDIA driver: {found.nvml}")
    for gpu in found.gpus:
        size = f"{format_gib(gpu.used_bytes)} of {format_gib(gpu.memory_bytes)} in use"
        lines.append(f"GPU {gpu.index}: {gpu.name}, {size}; {gpu.catalog_name or 'not in the catalog'}")
    lines.append(f"Calibrations in {found.calibration_folder}:")
    for calibration in found.calibrations:
        rows = ", ".join(
            f"{name.removeprefix('peak_').removesuffix('_bytes')} {number} rows"
            for name, number in calibration.rows.items()
        )
        lines.append(f"  {calibration.gpu}: of {calibration.created}; {rows}")
    return "\n".join([*lines, "", *map(wrapped, found.findings)])


def summary_text(summary: CollectionSummary, shard: Path) -> str:
    """The result of `collect`: counts of cells, and why some failed."""
    s = summary
    counts = (
        f"{s.finished} finished, {s.out_of_memory} out of memory, {s.failed} failed, {s.skipped} there already, "
        f"{s.left} left of {s.total} cells in {s.seconds:.0f} s"
    )
    causes = Counter(reason.partition(": ")[2] or reason for reason in s.reasons)
    if s.elsewhere:
        counts += f"; {s.elsewhere} being run by another collector"
    lines = [f"{shard}: {counts}", *(f"{number} failed: {cause}" for cause, number in causes.items())]
    if s.unreadable:
        count = f"{s.unreadable} {'line' if s.unreadable == 1 else 'lines'}"
        lines.append(f"{count} of it cannot be read; their cells ran again.")
    if s.errors:
        lines += ["", "off by      cells   median      p95    worst"]
        for e in s.errors:
            errors = f"{e['median_error']:>8.2%} {e['p95_error']:>8.2%} {e['worst_error']:>+8.2%}"
            lines.append(f"{e['quantity']:<10} {e['cells']:>6} {errors}  {e['worst_cell']}")
    return "\n".join(lines)


def constants_mapping(read: MeasuredConstants) -> dict[str, Any]:
    """The result of `collect_constants` and the path of its file, as JSON values."""
    return {**read.constants.to_mapping(), "path": read.constants.path, "remarks": list(read.remarks)}


def constants_text(read: MeasuredConstants) -> str:
    """The result of `collect_constants`, part by part."""
    found = read.constants
    parts = {
        "CUDA context": found.context_bytes,
        **found.first_uses_bytes,
        **{f"NCCL communicator, {ranks} ranks": size for ranks, size in found.communicator_bytes.items()},
    }
    width = max(map(len, parts))
    return "\n".join(
        [
            f"{found.gpu}, outside PyTorch's allocator:",
            *(f"  {name:<{width}}  {format_gib(size, 3):>10}" for name, size in parts.items()),
            *map(wrapped, read.remarks),
            wrapped(f"Kept in {found.path}: predictions for {found.gpu} use it; delete the file to go back to estimates."),
        ]
    )


@contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """A context that gives a function for messages of progress, which go to standard error, and only if that is a
    terminal."""
    if not sys.stderr.isatty():
        yield lambda message: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda message: status.update(str(message))
