"""`Measurement` to and from one row: a JSON mapping (shards) or text cells (CSV). One table has the rules of all columns.

A text cell that a spreadsheet could run (beginning with `=`, `+`, `-`, `@`) or that would break a line is written as `'`
and a JSON string, and is converted back when it is read; every other text is written unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from peakcast.core.errors import RecordError, SpecError, near_misses
from peakcast.core.fields import build
from peakcast.jobs.spec import TrainingJob, canonical_job, canonical_json, job_to_mapping
from peakcast.measurements.records import SCHEMA_VERSION, Collectives, Measurement, Outcome, Provenance

MAX_COUNT = 2**50
"""Largest number in a row: one pebibyte, in bytes. A larger one is in another unit by mistake."""
MAX_CELL_CHARACTERS = 131_072
"""Longest cell: Python's limit for csv, so that every written cell can be read."""

_ENUMS = {"provenance": get_args(Provenance), "outcome": get_args(Outcome), "collectives": get_args(Collectives)}
_TEXTS = ("gpu", "source", "source_version", "case", "out_of_scope", "observed")
_COUNTS = ("rank",)
_OPTIONAL_COUNTS = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_device_bytes",
    "peak_host_bytes",
    "peak_requested_bytes",
    "peak_active_bytes",
    "first_step_peak_allocated_bytes",
    "steady_allocated_bytes",
    "context_bytes",
    "num_alloc_retries",
)
_MAPPINGS = ("phase_peaks", "environment")
_LISTS = ("assumptions", "spoiled")

COLUMNS = (
    "config_hash",
    "key",
    "schema_version",
    "gpu",
    "provenance",
    "source",
    "source_version",
    "case",
    "observed",
    "rank",
    "collectives",
    "outcome",
    *_OPTIONAL_COUNTS,
    "phase_peaks",
    "out_of_scope",
    "spoiled",
    "assumptions",
    "environment",
    "job",
)
"""Every column of a table, in file order. `config_hash` and `key` are derived and checked."""

_DATE = re.compile(r"(\d{4}-\d{2}-\d{2}([T ][\d:.]+(Z|[+-]\d{2}:?\d{2})?)?)?")
_DANGEROUS = re.compile(r"[=+\-@']|.*[\x00-\x1f\x7f\ud800-\udfff]", re.DOTALL)


class CellError(ValueError):
    """One column of a row breaks its rule; the store adds file and line."""

    def __init__(self, column: str, value: object, rule: str) -> None:
        shown = repr(value)
        super().__init__(f"{column}={shown[:80] + '...' if len(shown) > 80 else shown} {rule}")
        self.column, self.value = column, value


def to_row(measurement: Measurement) -> dict[str, Any]:
    """The JSON-able mapping of `measurement`, one entry per column, checked. Raises: CellError."""
    job = build(TrainingJob, job_to_mapping(measurement.job))  # an int in a float field would hash differently when read
    try:
        if canonical_job(job) != canonical_job(measurement.job):
            measurement = Measurement(**{**_fields(measurement), "job": job})
        row = {**_fields(measurement), "config_hash": measurement.job.config_hash, "key": measurement.key}
        row["job"] = json.loads(canonical_job(job))
        row["assumptions"], row["spoiled"] = list(measurement.assumptions), list(measurement.spoiled)
        row = dict(json.loads(canonical_json(row)))
    except (ValueError, TypeError, RecursionError) as error:
        rule = f"cannot be written as JSON: {error}; keep only finite numbers, texts, lists and mappings"
        raise CellError("environment", measurement.environment, rule) from error
    _check(row)
    return row


def from_row(row: Mapping[str, Any], jobs: dict[str, TrainingJob] | None = None) -> Measurement:
    """The `Measurement` of a mapping made by `to_row`. `jobs` caches parsed jobs by their canonical text.

    Raises: CellError naming the column, the value and the rule.
    """
    missing = [column for column in COLUMNS if column not in row]
    if missing:
        raise CellError(missing[0], None, "is missing from the row")
    unknown = [key for key in row if key not in COLUMNS]
    if unknown:
        raise CellError(unknown[0], row[unknown[0]], f"is not a column{near_misses(unknown[0], COLUMNS)}")
    _check(row)
    text = canonical_json(row["job"])
    cache = jobs if jobs is not None else {}
    if text not in cache:
        try:
            cache[text] = build(TrainingJob, row["job"], "job.")
        except SpecError as error:
            raise CellError("job", error.value, f"is not a job: {error.message}") from error
    job = cache[text]
    values: dict[str, Any] = {name: row[name] for name in COLUMNS if name not in ("config_hash", "key", "job")}
    values |= {name: tuple(row[name]) for name in _LISTS}
    measurement = Measurement(job=job, **values)
    if text == canonical_job(job):  # else from an older version: added defaults change its hash
        for column in ("config_hash", "key"):
            expected = job.config_hash if column == "config_hash" else measurement.key
            if row[column] != expected:
                rule = f"does not match the row, whose {column} is {expected}: a cell was edited or rows were mixed"
                raise CellError(column, row[column], rule)
    return measurement


def to_cells(row: Mapping[str, Any]) -> list[str]:
    """The CSV cells of a row of `to_row`, in the order of `COLUMNS`. Raises: CellError when one is too long."""
    cells = []
    for column in COLUMNS:
        value = row[column]
        if column in ("job", *_MAPPINGS, *_LISTS):
            cell = canonical_json(value)
        elif value is None:
            cell = ""
        else:
            cell = _escape(value) if isinstance(value, str) else str(value)
        if len(cell) > MAX_CELL_CHARACTERS:
            raise CellError(column, cell, f"has {len(cell):,} characters; at most {MAX_CELL_CHARACTERS:,} fit a cell")
        cells.append(cell)
    return cells


def from_cells(cells: list[str]) -> dict[str, Any]:
    """The mapping of CSV cells in the order of `COLUMNS`, for `from_row`. Raises: CellError."""
    return {column: _parse(column, cell) for column, cell in zip(COLUMNS, cells, strict=True)}


def parse_json(text: str) -> Any:
    """`text` as JSON, without NaN, infinities or repeated keys. Raises: ValueError or RecursionError."""
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)


def _fields(measurement: Measurement) -> dict[str, Any]:
    return {name: getattr(measurement, name) for name in Measurement.__dataclass_fields__}


def _escape(text: str) -> str:
    return "'" + json.dumps(text) if _DANGEROUS.match(text) else text


def _parse(column: str, cell: str) -> Any:
    if column in ("job", *_MAPPINGS, *_LISTS):
        try:
            return parse_json(cell)
        except (ValueError, RecursionError) as error:
            raise CellError(column, cell, f"is not valid JSON ({error})") from error
    if column in (*_COUNTS, *_OPTIONAL_COUNTS, "schema_version"):
        if not cell:
            return None
        if not re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", cell, re.ASCII):
            raise CellError(column, cell, "must be a whole number written in digits, or empty")
        return int(cell)
    if cell[:1] == "'":
        try:
            text = parse_json(cell[1:])
        except (ValueError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise CellError(column, cell, "begins with ' and must then hold a JSON text")
        return text
    if _DANGEROUS.match(cell):
        raise CellError(column, cell, "could be run as a spreadsheet formula or breaks the line; write ' and a JSON text")
    return cell


def _check(row: Mapping[str, Any]) -> None:
    """Refuse a row whose values break the rule of their column. Raises: CellError."""
    version = row["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise CellError("schema_version", version, f"must be {SCHEMA_VERSION}; update peakcast or convert the file")
    for columns, rule, holds in _RULES:
        for column in columns:
            if not holds(row[column]):
                raise CellError(column, row[column], rule)
    for column, allowed in _ENUMS.items():
        if row[column] not in allowed:
            rule = f"must be one of {', '.join(allowed)}{near_misses(str(row[column]), allowed)}".rstrip("?")
            raise CellError(column, row[column], rule)
    if not _DATE.fullmatch(row["observed"]):
        raise CellError("observed", row["observed"], "must be an ISO date such as 2025-06-30, or empty")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


_RULES: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    ((*_TEXTS, "config_hash", "key", *_ENUMS), "must be a text", lambda value: isinstance(value, str)),
    (("gpu", "source"), "must not be empty", bool),
    (
        _COUNTS,
        f"must be a whole number from 0 to {MAX_COUNT}, or empty for the largest of all ranks",
        lambda value: value is None or _is_count(value),
    ),
    (
        _OPTIONAL_COUNTS,
        f"must be a whole number from 0 to {MAX_COUNT} (bytes are never negative), or empty",
        lambda value: value is None or _is_count(value),
    ),
    (("job", *_MAPPINGS), "must be a mapping", lambda value: isinstance(value, dict)),
    (("phase_peaks",), "must hold whole numbers of bytes", lambda value: all(map(_is_count, value.values()))),
    (
        _LISTS,
        "must be a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number that can be stored")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key appears twice")
    return mapping


__all__ = ["COLUMNS", "CellError", "RecordError", "from_cells", "from_row", "parse_json", "to_cells", "to_row"]
