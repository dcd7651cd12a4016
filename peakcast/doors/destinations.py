"""Where files are written: calibrations, reports, the MLflow store. If a place cannot be written, the error is a
sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from peakcast.core.errors import RecordError
from peakcast.core.extras import need

if TYPE_CHECKING:
    from peakcast.tracking import Tracker


def calibration_folder() -> Path:
    """Where `predict` looks for calibrations: `models/calibration` of the checkout, or of the installed package."""
    from peakcast.models.calibration import calibration

    return Path(calibration.__file__).parent


def checkout_folder(name: str) -> Path:
    """The folder `name` of the checkout that runs, or of the working folder if there is no checkout."""
    root = Path(__file__).resolve().parents[2]
    return (root if (root / "pyproject.toml").is_file() else Path.cwd()) / name


def tracker(uri: str | None = None) -> Tracker:
    """The MLflow store at `uri`, by default `mlruns/` of the working folder (of the user's data when that is not writable).

    Raises: MissingPackageError, or RecordError when the store cannot be opened.
    """
    need("recording in MLflow (which --no-tracking leaves out)", "mlflow", "pandas")
    from peakcast.tracking import Tracker

    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    folder = Path("mlruns")
    if not os.access(".", os.W_OK):
        folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "peakcast" / "mlruns"
    try:
        return Tracker(uri=uri) if uri else Tracker(folder)
    except Exception as error:  # MLflow and its database driver raise errors of any class
        reason = " ".join(str(error).split())[:300]
        raise RecordError(
            f"tracking-uri={uri or folder} cannot be used: {reason}; give another, or --no-tracking.",
            parameter="tracking_uri",
            value=uri,
        ) from error


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """A context in which a file that cannot be written becomes a RecordError naming it."""
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"{error.filename or path} cannot be written: {error.strerror}; check the path and its permissions.",
            parameter="output",
            value=str(path),
        ) from error
