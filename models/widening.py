"""A prediction with wider bars, for what a configuration asks and a job cannot say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from peakcast.models.domain import MOST_SEVERE
from peakcast.models.predict import judge, nested, widen
from peakcast.prediction import QUANTITIES, Interval, Prediction


def widened(prediction: Prediction, severity: int) -> Prediction:
    """The same point with bars for what the configuration asks beyond the job; no longer inside the calibrated domain."""
    if not severity:
        return prediction
    intervals: dict[str, Interval] = {}
    for quantity in QUANTITIES:
        bar: Interval = getattr(prediction, quantity)
        intervals[quantity] = bar
        if bar.point > 0 and bar.lower > 0:
            half_width, upper = widen(
                math.log(bar.upper / bar.point), math.log(bar.upper_95 / bar.point), min(severity, MOST_SEVERE), quantity
            )
            intervals[quantity] = Interval(
                baseline=bar.baseline,
                point=bar.point,
                lower=math.floor(bar.point * math.exp(-half_width)),
                upper=math.ceil(bar.point * math.exp(half_width)),
                upper_95=math.ceil(bar.point * math.exp(upper)),
            )
    intervals = nested(intervals)
    fits, why = judge(intervals, prediction.capacity_bytes)
    warnings = (*prediction.warnings, why) if why and why not in prediction.warnings else prediction.warnings
    changed: dict[str, Any] = {**intervals, "fits": fits, "warnings": warnings, "inside_calibrated_domain": False}
    return replace(prediction, **changed)
