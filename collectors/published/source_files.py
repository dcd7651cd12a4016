"""Reads a source file of JSON lines. Each line is a row; the error for a damaged one names file and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from peakcast.core.errors import RecordError

RowType = TypeVar("RowType")


def read_jsonl(path: Path, row: Callable[[Mapping[str, Any]], RowType]) -> list[RowType]:
    """`row` of every line of `path`, in file order. Raises: RecordError naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}; give the folder of the source files.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(row(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: {error!r}; restore the source file.") from error
    return rows
