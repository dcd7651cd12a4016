"""Packages that a job may need and a machine may lack: one sentence says for what, and how to install them."""

from __future__ import annotations

import importlib
import shlex
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
