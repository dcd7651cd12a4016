"""peakcast predicts the peak GPU memory of LLM training, with error bars that hold.

Importing it loads neither torch nor mlflow; names are loaded when first used.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peakcast.api import dryrun as dryrun
    from peakcast.api import explain as explain
    from peakcast.api import predict as predict
    from peakcast.api import predict_batch as predict_batch
    from peakcast.api import search as search
    from peakcast.architecture import Architecture as Architecture
    from peakcast.catalog import Device as Device
    from peakcast.errors import DoesNotFitError as DoesNotFitError
    from peakcast.errors import PeakcastError as PeakcastError
    from peakcast.explanation import Explanation as Explanation
    from peakcast.prediction import Prediction as Prediction
    from peakcast.records import Measurement as Measurement
    from peakcast.refusing import preflight as preflight
    from peakcast.spec import TrainingJob as TrainingJob
    from peakcast.timeline import Timeline as Timeline
    from peakcast.watching import lightning_callback as lightning_callback
    from peakcast.watching import trainer_callback as trainer_callback
    from peakcast.watching import watch as watch

__version__ = "0.1.0"

_CHECKOUT = Path(__file__).resolve().parents[1]
if (_CHECKOUT / "pyproject.toml").is_file():  # a checkout: peakcast.collectors is beside peakcast/
    __path__.append(str(_CHECKOUT))

_HOMES = {
    "Architecture": "peakcast.architecture",
    "Device": "peakcast.catalog",
    "DoesNotFitError": "peakcast.errors",
    "Explanation": "peakcast.explanation",
    "Measurement": "peakcast.records",
    "PeakcastError": "peakcast.errors",
    "Prediction": "peakcast.prediction",
    "Timeline": "peakcast.timeline",
    "TrainingJob": "peakcast.spec",
    "dryrun": "peakcast.api",
    "explain": "peakcast.api",
    "lightning_callback": "peakcast.watching",
    "predict": "peakcast.api",
    "predict_batch": "peakcast.api",
    "preflight": "peakcast.refusing",
    "search": "peakcast.api",
    "trainer_callback": "peakcast.watching",
    "watch": "peakcast.watching",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'peakcast' has no attribute {name!r}")
