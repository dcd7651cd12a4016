"""What the figures are to be, on architectures that were not fitted on, and the rows that keep a figure from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from peakcast.models.evaluation import Evaluation
from peakcast.models.metrics import Scored, Summary, summarise

FIGURES: dict[str, Callable[[Summary], float]] = {
    "median": lambda summary: summary.errors.median,
    "p95": lambda summary: summary.errors.p95,
    "half-width": lambda summary: summary.median_half_width,
    "coverage": lambda summary: summary.coverage,
}


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure, by its name in FIGURES, is to be at most `most` and at least `least`. Fractions."""

    figure: str
    most: float
    least: float = 0.0

    def value(self, summary: Summary) -> float:
        """The figure of `summary`."""
        return FIGURES[self.figure](summary)

    def met(self, summary: Summary) -> bool:
        """Whether `summary` is as it should be."""
        return self.least <= self.value(summary) <= self.most

    def behind(self, cells: Iterable[Scored]) -> tuple[Scored, ...]:
        """The cells that keep the figure from being smaller (an error), or larger (coverage): those off by more than is
        asked, or outside their bars. What keeps bars wide or a coverage too high is no row, but rows that are not there."""
        if self.figure in ("median", "p95"):
            return tuple(cell for cell in cells if abs(cell.error) > self.most)
        if self.figure == "coverage":
            cells = tuple(cells)
            low = self.value(summarise(cells)) < self.least
            return tuple(cell for cell in cells if low and not cell.covered)
        return ()

    @property
    def asked(self) -> str:
        """The limits in words, such as `≤ 1 %` or `88–92 %`."""
        if not self.least:
            return f"≤ {self.most * 100:g} %"
        return f"≥ {self.least * 100:g} %" if self.most >= 1 else f"{self.least * 100:g}–{self.most * 100:g} %"

    def __str__(self) -> str:
        return f"{self.figure} {self.asked}"


COVERAGE = Aim("coverage", 0.92, 0.88)
TARGETS: dict[str, tuple[Aim, ...]] = {
    "peak_allocated_bytes": (Aim("median", 0.002), Aim("p95", 0.01), Aim("half-width", 0.01), COVERAGE),
    "peak_reserved_bytes": (Aim("p95", 0.025), COVERAGE),
    "peak_device_bytes": (Aim("p95", 0.025), COVERAGE),
    "peak_host_bytes": (COVERAGE,),
}
"""What each quantity is to reach on each GPU type."""
MANY_ROWS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a part of the published rows is to reach: the first station on the way to TARGETS."""

    name: str
    cells: tuple[Scored, ...]
    aims: tuple[Aim, ...]


def goals(evaluation: Evaluation) -> Iterator[Goal]:
    """The goals of which `evaluation` has rows."""
    table = evaluation.table("peak_allocated_bytes")
    cells = table.cells if table else ()
    yield from _goal(
        "Hugging Face on A100-80GB",
        [cell for cell in cells if (cell.framework, cell.gpu) == ("huggingface", "A100-80GB")],
        (Aim("median", 0.005), Aim("p95", 0.03)),
    )
    yield from _goal(
        "Megatron of 5 GiB and more",
        [cell for cell in cells if cell.framework == "megatron" and not cell.size.endswith("below 5 GiB")],
        (Aim("median", 0.01), Aim("p95", 0.04)),
    )
    yield from _goal("all rows", cells, (Aim("coverage", 0.93, 0.87),))
    for layout in sorted({cell.layout for cell in cells}):
        own = [cell for cell in cells if cell.layout == layout]
        if len(own) >= MANY_ROWS:
            yield from _goal(f"layout {layout}", own, (Aim("coverage", 1.0, 0.80),))


def _goal(name: str, cells: Sequence[Scored], aims: tuple[Aim, ...]) -> Iterator[Goal]:
    if cells:
        yield Goal(name=f"{name}: allocated", cells=tuple(cells), aims=aims)
