"""peakcast predicts the peak GPU memory of LLM training, with error bars that hold.

Importing it loads neither torch nor mlflow; names are loaded when first used.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peakcast.answers.explanation import Explanation as Explanation
    from peakcast.answers.prediction import Prediction as Prediction
    from peakcast.api import dryrun as dryrun
    from peakcast.api import explain as explain
    from peakcast.api import predict as predict
    from peakcast.api import predict_batch as predict_batch
    from peakcast.api import search as search
    from peakcast.catalog import Device as Device
    from peakcast.core.errors import DoesNotFitError as DoesNotFitError
    from peakcast.core.errors import PeakcastError as PeakcastError
    from peakcast.doors.refusing import preflight as preflight
    from peakcast.doors.watching import lightning_callback as lightning_callback
    from peakcast.doors.watching import trainer_callback as trainer_callback
    from peakcast.doors.watching import watch as watch
    from peakcast.jobs.architecture import Architecture as Architecture
    from peakcast.jobs.spec import TrainingJob as TrainingJob
    from peakcast.measurements.records import Measurement as Measurement
    from peakcast.timelines.timeline import Timeline as Timeline

__version__ = "0.1.0"

_CHECKOUT = Path(__file__).resolve().parents[1]
if (_CHECKOUT / "pyproject.toml").is_file():  # a checkout: peakcast.collectors is beside peakcast/
    __path__.append(str(_CHECKOUT))

_HOMES = {
    "Architecture": "peakcast.jobs.architecture",
    "Device": "peakcast.catalog",
    "DoesNotFitError": "peakcast.core.errors",
    "Explanation": "peakcast.answers.explanation",
    "Measurement": "peakcast.measurements.records",
    "PeakcastError": "peakcast.core.errors",
    "Prediction": "peakcast.answers.prediction",
    "Timeline": "peakcast.timelines.timeline",
    "TrainingJob": "peakcast.jobs.spec",
    "dryrun": "peakcast.api",
    "explain": "peakcast.api",
    "lightning_callback": "peakcast.doors.watching",
    "predict": "peakcast.api",
    "predict_batch": "peakcast.api",
    "preflight": "peakcast.doors.refusing",
    "search": "peakcast.api",
    "trainer_callback": "peakcast.doors.watching",
    "watch": "peakcast.doors.watching",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'peakcast' has no attribute {name!r}")
