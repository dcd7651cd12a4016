"""The parts of device memory as the baseline counts them, and how much of a measured peak they leave unexplained."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from peakcast.core.units import GIB
from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.models.evaluation.metrics import Scored
from peakcast.reports.decision_tables import TitledTable
from peakcast.reports.figures import cells_of

COLUMNS = (
    "source",
    "layout",
    "rows",
    "tensors",
    "kept by the allocator",
    "CUDA context",
    "NCCL",
    "measured",
    "left over",
    "p5 to p95 of it",
)


def device_tables(evaluation: Evaluation, gpu: str) -> Iterator[TitledTable]:
    """A line for each source and layout with device memory measured on `gpu`: medians over its rows, in GiB. Empty without
    such rows. What is unexplained is measured minus counted, before any fit."""
    groups: dict[tuple[str, str], list[Scored]] = {}
    for cell in cells_of(evaluation, gpu, "peak_device_bytes"):
        groups.setdefault((cell.project, cell.layout), []).append(cell)
    if groups:
        yield (
            "What device memory is made of, in GiB",
            COLUMNS,
            [[*names, *_medians(cells)] for names, cells in sorted(groups.items())],
        )


def _medians(cells: Sequence[Scored]) -> list[str]:
    left_over = sorted(cell.measured - cell.baseline for cell in cells)
    parts = (
        [cell.baseline_allocated for cell in cells],
        [cell.baseline_reserved - cell.baseline_allocated for cell in cells],
        [cell.context for cell in cells],
        [cell.baseline - cell.baseline_reserved - cell.context for cell in cells],
        [cell.measured for cell in cells],
        left_over,
    )
    low, high = (left_over[round(share * (len(left_over) - 1))] for share in (0.05, 0.95))
    medians = [_gib(statistics.median(values)) for values in parts]
    return [str(len(cells)), *medians, f"{_gib(low)} to {_gib(high)}"]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}".replace("-", "−")
