"""Importing packages that a job needs. If one is missing, an error says what needs it and how to install it. Also: how
large packages are imported."""

from __future__ import annotations

import contextlib
import gc
import importlib
import shlex
from collections.abc import Iterable
from typing import Any

from peakcast.collectors.machine import quick_imports
from peakcast.core.errors import CollectorError


def imported(module: str, package: str, *, parameter: str, value: object) -> Any:
    """`module`, which belongs to `package` (its name for pip). Raises: CollectorError if it cannot be imported, naming the
    `parameter` of the job whose `value` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CollectorError(
            f"{parameter}={value!r} needs {package} ({error}); install it with: pip install {shlex.quote(package)}.",
            parameter=parameter,
            value=value,
        ) from error


def import_for_good(libraries: Iterable[str]) -> None:
    """Import those of `libraries` that are installed, and exclude their objects from Python's search for cycles. Each
    search would visit half a million objects and, in a forked process, copy their memory by writing to it. What they import
    without calling it is left out (`quick_imports.py`)."""
    quick_imports.install()
    gc.disable()
    for library in libraries:
        with contextlib.suppress(Exception):  # code that needs it imports it again and reports the error
            importlib.import_module(library)
    gc.collect()
    gc.freeze()
    gc.enable()
