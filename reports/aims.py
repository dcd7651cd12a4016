"""Targets for the figures on architectures that were not fitted on, and the rows that keep a figure from its target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.models.evaluation.metrics import AccuracySummary, Scored, summarise

FIGURES: dict[str, Callable[[AccuracySummary], float]] = {
    "median": lambda summary: summary.errors.median,
    "p95": lambda summary: summary.errors.p95,
    "half-width": lambda summary: summary.median_half_width,
    "coverage": lambda summary: summary.coverage,
    "mean": lambda summary: summary.errors.mean,
    "worst": lambda summary: summary.errors.worst,
    "silent misses": lambda summary: float(summary.silent_misses),
}


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure, by its name in FIGURES, should be at most `most` and at least `least`. Fractions."""

    figure: str
    most: float
    least: float = 0.0

    def value(self, summary: AccuracySummary) -> float:
        """The figure of `summary`."""
        return FIGURES[self.figure](summary)

    def met(self, summary: AccuracySummary) -> bool:
        """Whether the figure of `summary` is within the limits."""
        return self.least <= self.value(summary) <= self.most

    def behind(self, cells: Iterable[Scored]) -> tuple[Scored, ...]:
        """The cells that keep the figure from being smaller (an error) or larger (coverage): cells whose error is above the
        limit, or that are outside their bars. If bars are too wide or a coverage too high, no row is the cause, but the
        lack of rows."""
        if self.figure == "silent misses":
            return tuple(cell for cell in cells if cell.silent)
        if self.figure in ("median", "p95", "mean", "worst"):
            return tuple(cell for cell in cells if abs(cell.error) > self.most)
        if self.figure == "coverage":
            cells = tuple(cells)
            low = self.value(summarise(cells)) < self.least
            return tuple(cell for cell in cells if low and not cell.covered)
        return ()

    @property
    def asked(self) -> str:
        """The limits in words, such as `≤ 1 %` or `88–92 %`."""
        if self.figure == "silent misses":
            return f"{self.most:.0f}"
        if not self.least:
            return f"≤ {self.most * 100:g} %"
        return f"≥ {self.least * 100:g} %" if self.most >= 1 else f"{self.least * 100:g}–{self.most * 100:g} %"

    def __str__(self) -> str:
        return f"{self.figure} {self.asked}"


COVERAGE_AIM = Aim("coverage", 0.92, 0.88)
SILENT = Aim("silent misses", 0.0)
TARGETS: dict[str, tuple[Aim, ...]] = {
    "peak_allocated_bytes": (Aim("median", 0.0005), Aim("p95", 0.01), Aim("half-width", 0.01), COVERAGE_AIM, SILENT),
    "peak_reserved_bytes": (Aim("median", 0.01), Aim("p95", 0.04), Aim("half-width", 0.04), COVERAGE_AIM, SILENT),
    "peak_device_bytes": (Aim("median", 0.015), Aim("p95", 0.05), Aim("half-width", 0.05), COVERAGE_AIM, SILENT),
    "peak_host_bytes": (COVERAGE_AIM,),
}
"""Quantity -> its targets on each GPU type."""


def _aims(median: float, p95: float, half_width: float) -> tuple[Aim, ...]:
    return (Aim("median", median), Aim("p95", p95), Aim("half-width", half_width))


def _of(cell: Scored, project: str, kind: str = "") -> bool:
    return cell.project.endswith(project) and kind in ("", cell.kind)


MANY_ROWS = 20
"""From this many rows on, a source has a coverage of its own."""


CHAIN = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
"""Quantities, each of which includes the one before."""
PARTS: tuple[tuple[str, tuple[str, ...], Callable[[Scored], bool], tuple[Aim, ...]], ...] = (
    ("SimuMax on B200", CHAIN[1:2], lambda cell: _of(cell, "SIMUMAX"), _aims(0.006, 0.03, 0.04)),
    ("PEFT on L40S", CHAIN[1:2], lambda cell: _of(cell, "peft"), _aims(0.008, 0.035, 0.05)),
    ("torchtitan", CHAIN[1:2], lambda cell: _of(cell, "torchtitan"), _aims(0.025, 0.09, 0.12)),
    ("optimum, prefill", CHAIN, lambda cell: _of(cell, "optimum-benchmark", "inference"), _aims(0.005, 0.03, 0.03)),
    ("optimum, generate", CHAIN, lambda cell: _of(cell, "optimum-benchmark", "generation"), _aims(0.03, 0.12, 0.12)),
    ("FMS", CHAIN[2:], lambda cell: _of(cell, "fms-acceleration"), _aims(0.025, 0.10, 0.10)),
    ("FMS", CHAIN[:1], lambda cell: _of(cell, "fms-acceleration"), (Aim("median", 0.002),)),
    (
        "FMS, fused kernels, santacoder apart",
        CHAIN[:1],
        lambda cell: _of(cell, "fms-acceleration", "fused kernels") and not cell.architecture.startswith("gpt_bigcode"),
        (Aim("mean", 0.002), Aim("worst", 0.01)),
    ),
    (
        "Megatron of 5 GiB and more",
        CHAIN[:1],
        lambda cell: cell.framework == "megatron" and not cell.size.endswith("below 5 GiB"),
        (Aim("median", 0.002), Aim("p95", 0.03)),
    ),
)
"""(name, quantities, which rows, targets) for each kind of published rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The target for a part of the published rows, predicted by a fit without the rows of whoever measured them."""

    name: str
    cells: tuple[Scored, ...]
    aims: tuple[Aim, ...]
    alone: tuple[str, ...] = ()
    """Kinds of these rows, all of one source, that no other source has of this peak: without that source nothing measured
    says how wide their bars should be."""


def goals(evaluation: Evaluation) -> Iterator[Goal]:
    """The goals for which `evaluation` has rows; each source is predicted without its own rows."""
    for quantity in CHAIN:
        table = evaluation.table(quantity, "source")
        cells = table.cells if table else ()
        peak = quantity.removeprefix("peak_").removesuffix("_bytes")
        for name, quantities, holds, aims in PARTS:
            if quantity in quantities:
                yield from _goal(f"{name}: {peak}", [cell for cell in cells if holds(cell)], aims, cells)
        yield from _goal(f"all rows: {peak}", cells, (Aim("coverage", 0.93, 0.87), SILENT))
        for source in sorted({cell.project for cell in cells}):
            own = [cell for cell in cells if cell.project == source]
            if len(own) >= MANY_ROWS:
                yield from _goal(f"{source}: {peak}", own, (Aim("coverage", 1.0, 0.80),), cells)


def _goal(name: str, cells: Sequence[Scored], aims: tuple[Aim, ...], everyones: Sequence[Scored] = ()) -> Iterator[Goal]:
    if cells:
        yield Goal(name=name, cells=tuple(cells), aims=aims, alone=kinds_of_one_source(cells, everyones))


def kinds_of_one_source(cells: Sequence[Scored], everyones: Sequence[Scored]) -> tuple[str, ...]:
    """The kinds of `cells` that none of `everyones` from another source has; none if the cells are of several sources."""
    sources = {cell.project for cell in cells}
    others = {cell.kind for cell in everyones if cell.project not in sources}
    return tuple(sorted({cell.kind for cell in cells} - others)) if len(sources) == 1 and everyones else ()
