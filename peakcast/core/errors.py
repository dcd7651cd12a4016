"""What peakcast raises. Every message names the parameter, the value, the rule and the way out.

PeakcastError
├── SpecError          a job, an architecture or a configuration that cannot be (also a ValueError)
├── CatalogError       a name the catalog does not know (also a LookupError)
├── RecordError        a dataset file that cannot be read or written as it is
├── CollectorError     a measurement that cannot be started
│   └── ScriptError    a training script that a dry run could not follow
├── CalibrationError   a calibration that is missing, damaged or of another schema version
├── MissingPackageError   a package of an extra that is not installed (also an ImportError)
└── DoesNotFitError    a run that pre-flight refuses
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

NO_GPU = "no CUDA GPU is available here"
"""First words of the message of a cell that needs a GPU and finds none."""


LONGEST_WORD = 200
"""A longer word resembles no known word, and comparing it would take time."""
MAX_CHARACTERS = 2_000
"""The middle of a longer message, which quotes a long value, is left out."""


class PeakcastError(Exception):
    """Base of every error that is raised on purpose; `parameter` and `value` say what was wrong, if known."""

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        self.message = shortened(message)
        super().__init__(self.message)
        self.parameter = parameter
        self.value = value


class SpecError(PeakcastError, ValueError):
    """A job, an architecture or a configuration that cannot be."""


class CatalogError(PeakcastError, LookupError):
    """A GPU, an architecture or a framework that the catalog does not know."""

    __str__ = Exception.__str__


class RecordError(PeakcastError):
    """A dataset file that cannot be read or written as it is."""


class CollectorError(PeakcastError):
    """A measurement that cannot be started."""


class ScriptError(CollectorError):
    """A training script that a dry run could not follow; `last_lines` are those that it printed last."""

    def __init__(self, message: str, script: str, last_lines: list[str]) -> None:
        super().__init__(message, parameter="command", value=script)
        self.last_lines = last_lines

    def __str__(self) -> str:
        """The sentence, then the last lines."""
        return "\n".join((self.message, *(f"  | {line}" for line in self.last_lines)))


class CalibrationError(PeakcastError):
    """A calibration that is missing, damaged or of another schema version."""


class MissingPackageError(PeakcastError, ImportError):
    """A package of an extra is not installed; `value` is the extra."""


class DoesNotFitError(PeakcastError):
    """A run that surely does not fit; `prediction`, a `peakcast.Prediction`, says by how much."""

    def __init__(self, message: str, *, prediction: Any) -> None:
        super().__init__(message, parameter="job")
        self.prediction = prediction


def shortened(message: str) -> str:
    """`message`, without its middle if it is longer than `MAX_CHARACTERS`."""
    if len(message) <= MAX_CHARACTERS:
        return message
    return f"{message[: MAX_CHARACTERS // 2]} ... {message[-MAX_CHARACTERS // 2 :]}"


def near_misses(word: str, known: Iterable[str], *, most: int = 3) -> str:
    """`"; did you mean 'a' or 'b'?"` for the known words nearest to `word`, or `""` when none is near."""
    if len(word) > LONGEST_WORD:
        return ""
    lowered = {k.lower(): k for k in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=most, cutoff=0.5)
    return "; did you mean " + " or ".join(repr(lowered[c]) for c in close) + "?" if close else ""
