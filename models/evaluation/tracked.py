"""An evaluation and a calibration as flat metrics and parameters, as an experiment tracker keeps them."""

from __future__ import annotations

import json
import re

from peakcast.models.calibration.calibration import Calibration
from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.models.evaluation.metrics import AccuracySummary

TARGET = 0.01
"""The accuracy target: an absolute error of 1 %."""


def headline(evaluation: Evaluation) -> dict[str, float]:
    """The figures of an evaluation on architectures that were held out, over all GPU types, including decisions."""
    values: dict[str, float] = {"rows_left_out": float(sum(evaluation.left_out.values()))}
    for table in evaluation.tables:
        if table.held_out == "architecture":
            values.update({f"{table.quantity}.{name}": value for name, value in metrics(table.overall).items()})
            for layout, summary in table.by_layout.items():
                values[f"{table.quantity}.coverage.layout.{_safe(layout)}"] = summary.coverage
    for found in evaluation.decisions:
        shares = {"fits_precision": found.total.precision, "fits_recall": found.total.recall}
        values.update({f"{found.quantity}.{name}": share for name, share in shares.items() if share is not None})
        values[f"{found.quantity}.above_upper_95"] = found.above_upper_95
    for point in evaluation.new_hardware:
        place = f"new_hardware.{point.gpu}.{point.quantity}.rows_{point.num_rows}"
        values |= {f"{place}.median_error": point.median_error, f"{place}.half_width": point.median_half_width}
    return values


def metrics(summary: AccuracySummary) -> dict[str, float]:
    """A summary as flat metrics. Errors and shares are fractions; the target is an error of TARGET."""
    return {
        "median_error": summary.errors.median,
        "mean_error": summary.errors.mean,
        "p95_error": summary.errors.p95,
        "worst_error": summary.errors.worst,
        "under_predicted": summary.errors.under_predicted,
        "share_within_target": summary.errors.within_one_percent,
        "p95_error_over_target": summary.errors.p95 / TARGET,
        "coverage_90": summary.coverage,
        "upper_coverage_95": summary.upper_coverage,
        "median_half_width": summary.median_half_width,
        "silent_misses": float(summary.silent_misses),
        "baseline.median_error": summary.baseline_errors.median,
        "baseline.p95_error": summary.baseline_errors.p95,
        "num_configurations": summary.num_configurations,
        "num_architectures": float(summary.num_architectures),
    }


def by_gpu(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """GPU type → metrics of every split and quantity."""
    found: dict[str, dict[str, float]] = {}
    for table in evaluation.tables:
        for gpu, summary in table.by_gpu.items():
            values = {f"{table.held_out}.{table.quantity}.{name}": value for name, value in metrics(summary).items()}
            found.setdefault(gpu, {}).update(values)
    return found


def by_fold(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Held-out architecture → metrics of every quantity."""
    found: dict[str, dict[str, float]] = {}
    for table in evaluation.tables:
        for name, summary in table.by_architecture.items() if table.held_out == "architecture" else ():
            values = {f"{table.quantity}.{metric}": value for metric, value in metrics(summary).items()}
            found.setdefault(name, {}).update(values)
    return found


def facts_of(calibration: Calibration) -> tuple[dict[str, float], dict[str, object]]:
    """Metrics and parameters of a calibration."""
    values: dict[str, float] = {}
    told: dict[str, object] = {"gpu": calibration.gpu, "rows_digest": calibration.rows_digest}
    for name, learned in calibration.quantities.items():
        told[f"{name}.regressor"] = learned.residual.regressor_.name
        told[f"{name}.shrinkage"] = learned.residual.shrinkage_
        told[f"{name}.rows"] = json.dumps(learned.rows_by_gpu, sort_keys=True)
        values |= {f"{name}.candidate.{candidate}": score for candidate, score in learned.residual.scores_.items()}
        if learned.unseen_errors:
            values[f"{name}.unseen_error"] = sum(learned.unseen_errors.values()) / len(learned.unseen_errors)
    return values, told


def num_rows(calibration: Calibration) -> int:
    """Rows of the quantity that has most."""
    return max((sum(learned.rows_by_gpu.values()) for learned in calibration.quantities.values()), default=0)


def _safe(name: str) -> str:
    """A metric name part: MLflow takes letters, digits, `_-. :/` only."""
    return re.sub(r"[^\w\-. :/]", "_", name)
