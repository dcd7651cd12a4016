"""Other jobs that a configuration may also mean: what they need, in addition to the answer for the assumed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from peakcast.answers.prediction import Prediction
from peakcast.core.errors import SpecError
from peakcast.core.findings import Direction, Finding
from peakcast.core.units import format_gib
from peakcast.dialects.common.translation import AlternativeReading
from peakcast.jobs.spec import TrainingJob

VERDICT = {"yes": "that fits", "no": "that does not fit", "uncertain": "whether that fits is uncertain"}


def with_others(
    prediction: Prediction, others: tuple[AlternativeReading, ...], predict: Callable[[TrainingJob], Prediction]
) -> Prediction:
    """`prediction` with a finding for each of `others` that needs another amount, or cannot be answered. The verdict is
    uncertain if one of them fits and another does not, or if one cannot be answered."""
    found, fits = list(prediction.found), prediction.fits
    point = prediction.peak_allocated_bytes.point
    for reading in others:
        may_be = f"this may also be {reading.name}, and nothing in it says which: then "
        try:
            other = predict(reading.job)
        except SpecError as error:
            why = str(error).rstrip(".")
            sentence = f"{may_be}what it needs is not known here ({why}). {reading.way_out}"
            found.insert(0, Finding("setting_reinterpreted", "", "either", sentence))
            fits = "uncertain"
            continue
        asked, else_ = format_gib(point), format_gib(other.peak_allocated_bytes.point)
        if asked == else_ and other.fits == prediction.fits:
            continue
        sentence = (
            f"{may_be}{else_} would be allocated and not {asked}, and {VERDICT[other.fits]}. {reading.way_out}"
        )
        direction: Direction = "more" if other.peak_allocated_bytes.point > point else "less"
        found.insert(0, Finding("setting_reinterpreted", "", direction, sentence))
        fits = fits if other.fits == fits else "uncertain"
    return replace(prediction, found=tuple(found), fits=fits)
