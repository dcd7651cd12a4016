"""Strict reading of plain JSON values: every key, type and range is checked before a value is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.core.errors import CalibrationError

WAY_OUT = "fit the calibration again with `peakcast fit`, or restore the file"


def read(value: object, keys: set[str], where: str) -> Mapping[str, Any]:
    """`value` as a mapping with exactly `keys`. Raises: CalibrationError."""
    if not isinstance(value, Mapping):
        raise CalibrationError(f"{where} must be a mapping, not {type(value).__name__}; {WAY_OUT}.", parameter=where)
    if set(value) != keys:
        missing, extra = sorted(keys - set(value)), sorted(str(k) for k in set(value) - keys)
        said = "; ".join(f"{word} {names}" for word, names in (("missing", missing), ("unknown", extra)) if names)
        raise CalibrationError(f"{where} has the wrong keys ({said}); {WAY_OUT}.", parameter=where)
    return value


def number(value: object, where: str, *, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a finite float within [low, high]. Raises: CalibrationError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300 or value != value:
        raise CalibrationError(f"{where}={value!r} must be a finite number; {WAY_OUT}.", parameter=where, value=value)
    if not low <= value <= high:
        raise CalibrationError(f"{where}={value!r} must lie in [{low}, {high}]; {WAY_OUT}.", parameter=where, value=value)
    return float(value)


def text(value: object, where: str) -> str:
    """`value` as a string. Raises: CalibrationError."""
    if not isinstance(value, str):
        raise CalibrationError(f"{where}={value!r} must be a text; {WAY_OUT}.", parameter=where, value=value)
    return value


def texts(value: object, where: str) -> list[str]:
    """`value` as a list of strings. Raises: CalibrationError."""
    if not isinstance(value, list):
        raise CalibrationError(f"{where} must be a list of texts; {WAY_OUT}.", parameter=where)
    return [text(item, where) for item in value]


def flag(value: object, where: str) -> bool:
    """`value` as a bool. Raises: CalibrationError."""
    if not isinstance(value, bool):
        raise CalibrationError(f"{where}={value!r} must be true or false; {WAY_OUT}.", parameter=where, value=value)
    return value


def numbers(value: object, where: str, length: int | None = None, *, limit: float = 1e300) -> npt.NDArray[np.float64]:
    """`value` as an array of floats within ±`limit`, of the given length. Raises: CalibrationError."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        wanted = "" if length is None else f" of length {length}"
        raise CalibrationError(f"{where} must be a list{wanted}; {WAY_OUT}.", parameter=where)
    return np.array([number(item, where, low=-limit, high=limit) for item in value], dtype=np.float64)
