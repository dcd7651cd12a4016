"""Packages that a job may need and a machine may lack: one sentence says for what, and how to install them. And how those
that are large are imported."""

from __future__ import annotations

import contextlib
import gc
import importlib
import shlex
from collections.abc import Iterable
from typing import Any

from peakcast.errors import CollectorError


def imported(module: str, package: str, *, parameter: str, value: object) -> Any:
    """`module`, which is of `package` (as pip is told). Raises: CollectorError where it cannot be imported, naming the
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
    """Import `libraries`, where they are there, and take what is of them out of Python's search for cycles: each search
    would look at half a million objects and, in a forked process, copy the memory that they lie in by writing to it."""
    gc.disable()
    for library in libraries:
        with contextlib.suppress(Exception):  # who needs it imports it again, and says what is missing
            importlib.import_module(library)
    gc.collect()
    gc.freeze()
    gc.enable()
