"""Figures of a report beyond those of `models.evaluation.metrics`: the headline per GPU type, splits, steps of error."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from peakcast.core.units import GIB
from peakcast.models.calibration.grouping import SIZES_GIB
from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.models.evaluation.metrics import AccuracySummary, Scored, summarise
from peakcast.reports.aims import CHAIN, TARGETS, Aim

SMALL_BYTES = SIZES_GIB[0] * GIB
LARGE = f"≥ {SIZES_GIB[0]} GiB"
SIZES: dict[str, Callable[[int], bool]] = {
    LARGE: lambda measured: measured >= SMALL_BYTES,
    f"< {SIZES_GIB[0]} GiB": lambda measured: measured < SMALL_BYTES,
}
"""Classes of measured peaks by size: workspaces and buffers are a large part of small peaks."""


@dataclass(frozen=True, kw_only=True)
class HeadlineRow:
    """One line of the accuracy table: a quantity on a GPU type, on architectures that were not fitted on."""

    gpu: str
    quantity: str
    size: str
    """One of SIZES. One figure for all sizes would let many small peaks hide the large ones."""
    cells: tuple[Scored, ...]
    aims: tuple[Aim, ...]

    @cached_property
    def summary(self) -> AccuracySummary:
        """The figures of the line."""
        return summarise(self.cells)


def headline(evaluation: Evaluation, gpu: str | None = None) -> list[HeadlineRow]:
    """The accuracy table by GPU type and quantity, with small peaks separate; only lines of `gpu` if given."""
    tables = [table for table in evaluation.tables if table.held_out == "architecture"]
    names = sorted({name for table in tables for name in table.by_gpu if gpu in (None, name)})
    return [
        HeadlineRow(gpu=name, quantity=table.quantity, size=size, cells=cells, aims=TARGETS[table.quantity])
        for name in names
        for table in tables
        for size, holds in SIZES.items()
        if (cells := tuple(cell for cell in table.cells if cell.gpu == name and holds(cell.measured)))
    ]


def cells_of(evaluation: Evaluation, gpu: str, quantity: str, held_out: str = "architecture") -> tuple[Scored, ...]:
    """The scored rows of one quantity on one GPU type, the largest error first; empty if there are none."""
    table = evaluation.table(quantity, held_out)
    return tuple(cell for cell in table.cells if cell.gpu == gpu) if table else ()


def by_split(evaluation: Evaluation, gpu: str) -> list[tuple[str, str, AccuracySummary]]:
    """(held out, quantity, figures) on `gpu` for every split that was evaluated."""
    return [(table.held_out, table.quantity, table.by_gpu[gpu]) for table in evaluation.tables if gpu in table.by_gpu]


def by_group(cells: Sequence[Scored], attribute: str) -> dict[str, AccuracySummary]:
    """Figures of `cells` grouped by one of their attributes (`layout`, `architecture`, `framework`), most rows first."""
    groups: dict[str, list[Scored]] = {}
    for cell in cells:
        groups.setdefault(getattr(cell, attribute), []).append(cell)
    return {name: summarise(groups[name]) for name in sorted(groups, key=lambda name: (-len(groups[name]), name))}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStep:
    """How much error is added from one quantity to the next one that includes it. Bytes, predicted − measured."""

    name: str
    num_rows: int
    median_bytes: float
    median_size_bytes: float
    """Median of the absolute values."""
    worst_bytes: float


def error_steps(evaluation: Evaluation, gpu: str) -> list[ErrorStep]:
    """The error of the allocated peak, then of reserved minus allocated, then of device minus reserved, for rows in which
    more than one of the three was measured. For each row, the steps add up to the error of the last quantity."""
    cells: dict[str, dict[str, Scored]] = {}
    for quantity in CHAIN:
        for cell in cells_of(evaluation, gpu, quantity):
            cells.setdefault(cell.key, {})[quantity] = cell
    errors: dict[str, list[float]] = {}
    for found in cells.values():
        chain = [quantity for quantity in CHAIN if quantity in found]
        if len(chain) < 2:
            continue
        before, name = 0, ""
        for quantity in chain:
            error = found[quantity].point - found[quantity].measured
            step = f"{name} → {_short(quantity)}" if name else _short(quantity)
            errors.setdefault(step, []).append(error - before)
            before, name = error, _short(quantity)
    return [
        ErrorStep(
            name=name,
            num_rows=len(values),
            median_bytes=statistics.median(values),
            median_size_bytes=statistics.median(map(abs, values)),
            worst_bytes=max(values, key=abs),
        )
        for name, values in errors.items()
    ]


def _short(quantity: str) -> str:
    return quantity.removeprefix("peak_").removesuffix("_bytes")
