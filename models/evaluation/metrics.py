"""Accuracy figures of a set of cells. Every figure is a weighted statistic, so that repeats of a configuration count
once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from peakcast.core.findings import SILENT_ABOVE
from peakcast.models.calibration.grouping import SIZES_GIB, size_of

if TYPE_CHECKING:
    from peakcast.models.calibration.samples import Sample

"""A finding of the answer must announce an error above this."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One row, one quantity, predicted without its group. Bytes are ints."""

    key: str
    case: str
    source: str
    gpu: str
    architecture: str
    layout: str
    framework: str
    quantity: str
    measured: int
    baseline: int
    point: int
    lower: int
    upper: int
    upper_95: int
    weight: float
    """1 / repeats of the configuration."""
    kind: str = ""
    """`grouping.row_kind` the job."""
    known: str = ""
    """What is known about the row that may explain an error."""
    finding: str = ""
    """The sentence in which the answer itself says that the ledger does not count something, or counts it differently; ""
    if none."""
    baseline_allocated: int = 0
    baseline_reserved: int = 0
    context: int = 0
    """The parts of the baseline that the quantity contains: tensors, what the allocator holds, the CUDA context."""

    @property
    def project(self) -> str:
        """Who measured (`Measurement.project`)."""
        return self.source.split(" ")[0]

    @property
    def error(self) -> float:
        """point / measured − 1."""
        return self.point / self.measured - 1

    @property
    def baseline_error(self) -> float:
        """baseline / measured − 1."""
        return self.baseline / self.measured - 1

    @property
    def silent(self) -> bool:
        """Whether the error exceeds SILENT_ABOVE and the answer does not say why, which is the worst kind of error."""
        return abs(self.error) > SILENT_ABOVE and not self.finding

    @property
    def covered(self) -> bool:
        """Whether the measurement is inside the two-sided bar."""
        return self.lower <= self.measured <= self.upper

    @property
    def half_width(self) -> float:
        """Half of the two-sided bar, as a share of the point."""
        return (self.upper - self.lower) / 2 / max(self.point, 1)

    @property
    def size(self) -> str:
        """Framework and measured size, such as `megatron, below 5 GiB`; small peaks are mostly workspaces and buffers."""
        low, high = SIZES_GIB
        ranges = {"small": f"below {low} GiB", "medium": f"{low} to {high} GiB", "large": f"{high} GiB and more"}
        return f"{self.framework}, {ranges[size_of(self.measured)]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Absolute relative errors of a point, as fractions, and the share of points below the measurement."""

    median: float
    mean: float
    p95: float
    worst: float
    bias: float
    """Median of the signed error: below 0 means too low."""
    under_predicted: float
    within_one_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracySummary:
    """Accuracy and bars of a set of cells. Shares and errors are fractions."""

    num_rows: int
    num_configurations: float
    """Sum of weights: repeats count once."""
    num_architectures: int
    errors: Errors
    """Errors of baseline + residual."""
    baseline_errors: Errors
    """Errors of the baseline alone."""
    coverage: float
    """Share of measurements inside the two-sided 90 % interval."""
    upper_coverage: float
    """Share of measurements at or below the one-sided 95 % bound."""
    median_half_width: float
    """Half of the interval's width, as a share of its point."""
    silent_misses: int = 0
    """Rows off by more than SILENT_ABOVE without a finding that says why."""

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """How much repeats of one configuration differ: (largest / smallest − 1) over configurations with repeats."""

    num_configurations: int
    median: float
    p95: float
    worst: float


def summarise(cells: Sequence[Scored]) -> AccuracySummary:
    """The figures of `cells` (at least one)."""
    weights = np.array([cell.weight for cell in cells])
    measured = np.array([cell.measured for cell in cells], dtype=np.float64)
    bound = np.array([cell.upper_95 for cell in cells], dtype=np.float64)
    return AccuracySummary(
        num_rows=len(cells),
        num_configurations=float(weights.sum()),
        num_architectures=len({cell.architecture for cell in cells}),
        errors=_errors(np.array([cell.error for cell in cells]), weights),
        baseline_errors=_errors(np.array([cell.baseline_error for cell in cells]), weights),
        coverage=_share(np.array([cell.covered for cell in cells]), weights),
        upper_coverage=_share(measured <= bound, weights),
        median_half_width=weighted_quantile(np.array([cell.half_width for cell in cells]), weights, 0.5),
        silent_misses=sum(cell.silent for cell in cells),
    )


def floor(samples: Sequence[Sample], quantity: str) -> Floor:
    """The floor of a quantity."""
    repeats: dict[Any, list[int]] = {}
    for sample in samples:
        value = sample.measured(quantity)
        if value is not None:
            repeats.setdefault(sample.configuration, []).append(value)
    spreads = np.array([max(values) / min(values) - 1 for values in repeats.values() if len(values) > 1])
    if not len(spreads):
        return Floor(num_configurations=0, median=0.0, p95=0.0, worst=0.0)
    ones = np.ones(len(spreads))
    return Floor(
        num_configurations=len(spreads),
        median=weighted_quantile(spreads, ones, 0.5),
        p95=weighted_quantile(spreads, ones, 0.95),
        worst=float(spreads.max()),
    )


def weighted_quantile(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], level: float) -> float:
    """The smallest value such that values up to it have at least the share `level` of the weight."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    at = int(np.searchsorted(reached, level * reached[-1] * (1 - 1e-12)))
    return float(values[order][min(at, len(values) - 1)])


def _errors(errors: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> Errors:
    """The statistics of relative `errors`."""
    size = np.abs(errors)
    return Errors(
        median=weighted_quantile(size, weights, 0.5),
        mean=float((weights * size).sum() / weights.sum()),
        p95=weighted_quantile(size, weights, 0.95),
        worst=float(size.max()),
        bias=weighted_quantile(errors, weights, 0.5),
        under_predicted=_share(errors < 0, weights),
        within_one_percent=_share(size <= 0.01 + 1e-12, weights),
    )


def _share(holds: npt.NDArray[np.bool_], weights: npt.NDArray[np.float64]) -> float:
    """The share of the weight for which `holds` is true."""
    return float(weights[holds].sum() / weights.sum())
