"""How accurate the predictor is on what it has not seen.

Error = point / measured − 1. Every row is predicted by a calibration fitted without its group: its architecture (the
headline), its model type, its layout, its GPU type, or its source (who measured). Repeats of a configuration share one
weight, so a case that was run five times counts once; the differences among repeats are a floor below which no predictor
can get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from peakcast.answers.prediction import QUANTITIES, Interval
from peakcast.core.findings import CAUSES, OF_THE_CACHE
from peakcast.measurements.records import Measurement
from peakcast.models.baseline.baseline import usable_bytes
from peakcast.models.calibration.grouping import row_kind
from peakcast.models.calibration.regressors import candidate_regressors
from peakcast.models.calibration.samples import (
    BaselineOf,
    DeviceOf,
    Sample,
    Samples,
    ScopeOf,
    prepare,
    repeat_weights,
    rows_digest,
)
from peakcast.models.evaluation.decisions import Decisions, decisions_of
from peakcast.models.evaluation.holdout import Answers, MakeCandidates, held_out
from peakcast.models.evaluation.metrics import AccuracySummary, Floor, Scored, floor, summarise
from peakcast.models.evaluation.new_hardware import LearningPoint, learning_curves
from peakcast.models.prediction.cache_findings import cache_findings
from peakcast.models.prediction.outside_findings import outside_estimated
from peakcast.models.prediction.predict import known_of

SPLITS: dict[str, Callable[[Sample], str]] = {
    "architecture": lambda sample: sample.architecture,
    "model_type": lambda sample: sample.row.job.architecture.model_type,
    "layout": lambda sample: sample.layout,
    "gpu": lambda sample: sample.row.gpu,
    "source": lambda sample: sample.row.project,
}
"""What is held out, one group at a time. `architecture` groups by shape (`grouping.architecture_shape`): nearly all rows of
one published source are the same 12-layer, 512-wide GPT, which must be on one side and is one unit of evidence. `source` is
the hardest split: a new user has a different machine and different versions from everyone who measured."""
NAMED_ABOVE = 0.02
"""Cells with a larger error are listed by name."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One quantity under one split: overall, by layout, by architecture, by GPU type, by source, and its cells (rows)."""

    quantity: str
    held_out: str
    overall: AccuracySummary
    cells: tuple[Scored, ...]
    """All rows, worst first."""

    @cached_property
    def by_layout(self) -> dict[str, AccuracySummary]:
        """Figures of each layout."""
        return self._by("layout")

    @cached_property
    def by_architecture(self) -> dict[str, AccuracySummary]:
        """Figures of each architecture."""
        return self._by("architecture")

    @cached_property
    def by_gpu(self) -> dict[str, AccuracySummary]:
        """Figures of each GPU type."""
        return self._by("gpu")

    @cached_property
    def by_source(self) -> dict[str, AccuracySummary]:
        """Figures of each source."""
        return self._by("project")

    def _by(self, attribute: str) -> dict[str, AccuracySummary]:
        groups: dict[str, list[Scored]] = {}
        for cell in self.cells:
            groups.setdefault(getattr(cell, attribute), []).append(cell)
        return {name: summarise(groups[name]) for name in sorted(groups)}

    @property
    def named(self) -> tuple[Scored, ...]:
        """The cells whose error exceeds NAMED_ABOVE."""
        return tuple(cell for cell in self.cells if abs(cell.error) > NAMED_ABOVE)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything an accuracy report needs."""

    num_rows: int
    num_configurations: int
    left_out: dict[str, int]
    """Numbers of rows that do not count, by reason."""
    versions: dict[str, tuple[str, ...]]
    rows_digest: str
    tables: tuple[Table, ...]
    floors: dict[str, Floor]
    """Quantity → how much repeats of one configuration differ."""
    decisions: tuple[Decisions, ...] = ()
    """How often the answers to "does it fit" are right, for architectures that were held out."""
    new_hardware: tuple[LearningPoint, ...] = ()
    """How the error on a GPU type falls as it gets rows of its own; empty unless requested."""

    def table(self, quantity: str, held_out: str = "architecture") -> Table | None:
        """The table of a quantity under a split; None if no row has the quantity or nothing could be held out."""
        return next((t for t in self.tables if (t.quantity, t.held_out) == (quantity, held_out)), None)

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "num_rows": self.num_rows,
            "num_configurations": self.num_configurations,
            "left_out": dict(self.left_out),
            "versions": {package: list(seen) for package, seen in self.versions.items()},
            "rows_digest": self.rows_digest,
            "floors": {quantity: asdict(value) for quantity, value in self.floors.items()},
            "decisions": [decisions.to_mapping() for decisions in self.decisions],
            "new_hardware": [asdict(point) for point in self.new_hardware],
            "tables": [
                {
                    "quantity": table.quantity,
                    "held_out": table.held_out,
                    "overall": table.overall.to_mapping(),
                    "by_layout": {name: part.to_mapping() for name, part in table.by_layout.items()},
                    "by_architecture": {name: part.to_mapping() for name, part in table.by_architecture.items()},
                    "by_gpu": {name: part.to_mapping() for name, part in table.by_gpu.items()},
                    "by_source": {name: part.to_mapping() for name, part in table.by_source.items()},
                    "named": [{**asdict(cell), "error": cell.error} for cell in table.named],
                }
                for table in self.tables
            ],
        }


def evaluate(
    rows: Iterable[Measurement],
    *,
    splits: Sequence[str] = tuple(SPLITS),
    quantities: Sequence[str] = QUANTITIES,
    make_candidates: MakeCandidates = candidate_regressors,
    device_of: DeviceOf | None = None,
    baseline_of: BaselineOf | None = None,
    scope_of: ScopeOf | None = None,
    new_hardware: bool = False,
) -> Evaluation:
    """Judge the predictor on `rows`: for each split and quantity, every row is predicted without its group, by the same
    procedure that users get (choice of candidate, bars, widening outside the domain). `new_hardware`: also the learning
    curves, which need another fit for each point."""
    prepared = prepare(rows, device_of=device_of, baseline_of=baseline_of, scope_of=scope_of)
    asked: dict[str, Any] = {"splits": splits, "quantities": quantities, "make_candidates": make_candidates}
    return evaluate_prepared(prepared, **asked, new_hardware=new_hardware)


def evaluate_prepared(
    prepared: Samples,
    *,
    splits: Sequence[str] = tuple(SPLITS),
    quantities: Sequence[str] = QUANTITIES,
    make_candidates: MakeCandidates = candidate_regressors,
    new_hardware: bool = False,
) -> Evaluation:
    """As `evaluate`, for rows that were prepared already."""
    samples = prepared.samples
    everyone = (*samples, *prepared.censored)
    tables = []
    decisions: tuple[Decisions, ...] = ()
    for split in splits:
        answers = held_out(everyone, SPLITS[split], make_candidates)
        if split == "architecture":
            decisions = decisions_of(everyone, answers, quantities)
        for quantity in quantities:
            table = _table(samples, answers, quantity, split)
            if table is not None:
                tables.append(table)
    versions: dict[str, set[str]] = {}
    for sample in samples:
        for package, version in sample.row.job.versions.items():
            versions.setdefault(package, set()).add(str(version))
    return Evaluation(
        num_rows=len(samples),
        num_configurations=len({sample.configuration for sample in samples}),
        left_out=prepared.left_out,
        versions={package: tuple(sorted(seen)) for package, seen in sorted(versions.items())},
        rows_digest=rows_digest(samples),
        tables=tuple(tables),
        floors={quantity: floor(samples, quantity) for quantity in quantities},
        decisions=decisions,
        new_hardware=learning_curves(everyone, quantities, make_candidates) if new_hardware else (),
    )


def _table(samples: Sequence[Sample], answers: Mapping[int, Answers], quantity: str, split: str) -> Table | None:
    """The table of one quantity under one split; None if no row was predicted."""
    positions = [p for p, sample in enumerate(samples) if p in answers and sample.measured(quantity) is not None]
    if not positions:
        return None
    chosen = [samples[p] for p in positions]
    weights = repeat_weights(chosen)
    repeats: dict[Any, list[int]] = {}
    for sample in chosen:
        repeats.setdefault(sample.configuration, []).append(sample.measured(quantity) or 1)
    cells = [
        _scored(samples[p], answers[p][quantity], quantity, weight, repeats[samples[p].configuration])
        for p, weight in zip(positions, weights, strict=True)
    ]
    return Table(
        quantity=quantity,
        held_out=split,
        overall=summarise(cells),
        cells=tuple(sorted(cells, key=lambda cell: (-abs(cell.error), cell.key))),
    )


def _finding_with_cause(sample: Sample, quantity: str, point: int) -> str:
    """The sentence of a finding that names a cause why the `point` of `quantity` may be off; "" if there is none."""
    caches = quantity in ("peak_reserved_bytes", "peak_device_bytes")
    beside = outside_estimated(sample.baseline, point) if quantity == "peak_device_bytes" else None
    there = usable_bytes(sample.row.job, sample.device)
    found = (*known_of(sample.row.job), *cache_findings(sample.baseline, there), beside)
    return next(
        (
            finding.sentence
            for finding in found
            if finding and finding.code in CAUSES and (caches or finding.code not in OF_THE_CACHE)
        ),
        "",
    )


def _scored(sample: Sample, interval: Interval, quantity: str, weight: float, repeats: Sequence[int]) -> Scored:
    """One row with its prediction."""
    row = sample.row
    facts = []
    if len(repeats) > 1:
        facts.append(f"{len(repeats)} runs of this configuration differ by {max(repeats) / min(repeats) - 1:.2%}")
    if row.assumptions:
        facts.append("assumed: " + "; ".join(row.assumptions))
    if row.environment.get("environment") or row.environment.get("platform"):
        facts.append(f"environment {row.environment.get('environment', '')} {row.environment.get('platform', '')}".strip())
    return Scored(
        key=row.key,
        case=row.case,
        source=row.source,
        gpu=row.gpu,
        architecture=sample.architecture,
        layout=sample.layout,
        framework=row.job.framework,
        kind=row_kind(row.job),
        quantity=quantity,
        measured=sample.measured(quantity) or 1,
        baseline=interval.baseline,
        point=interval.point,
        lower=interval.lower,
        upper=interval.upper,
        upper_95=interval.upper_95,
        weight=weight,
        known=". ".join(facts),
        finding=_finding_with_cause(sample, quantity, interval.point),
        baseline_allocated=sample.baseline.peak_allocated_bytes,
        baseline_reserved=sample.baseline.peak_reserved_bytes,
        context=sample.baseline.context_bytes,
    )
