"""The store of `Measurement` rows: JSON-lines shards while collecting, one sorted CSV per GPU type for keeping.

Any number of processes may append to a shard, and may be killed at any time; a CSV is only ever replaced as a whole.
Reading a CSV is strict: a damaged file is refused, never repaired by guessing.
"""

from __future__ import annotations

import csv
import errno
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from peakcast.core.bounded import exists, is_file, is_folder
from peakcast.core.durable import file_errors, locked, read_bytes, replace_file
from peakcast.core.errors import RecordError
from peakcast.jobs.spec import TrainingJob, canonical_json
from peakcast.measurements.records import Measurement
from peakcast.measurements.rows import COLUMNS, CellError, from_cells, from_row, parse_json, to_cells, to_row

T = TypeVar("T")

SOURCES_FOLDER = "sources"
"""Folders of this name contain raw files from which tables were imported; they are not tables of measurements."""
CONSTANTS_FOLDER = "constants"
"""Folders of this name contain readings without a job (what a process holds before it has a model)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line of a shard that could not be read (line numbers start at 1)."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What `merge` did: counts of rows, and the shard lines it could not read, by file."""

    kept: int
    added: int
    replaced: int
    bad_lines: tuple[tuple[Path, BadLine], ...] = ()


def append(path: Path, measurement: Measurement) -> None:
    """Add `measurement` to the shard at `path`, durably: after this returns, a crash cannot lose or damage the row.

    One `write` of a whole line under an advisory lock, then fsync. If a process was killed during its write, its unfinished
    line is closed first, so that this row begins on a new one.
    Raises: RecordError when the row cannot be stored or the file cannot be written.
    """
    path = Path(path)
    try:
        line = canonical_json(to_row(measurement)).encode() + b"\n"
    except (CellError, ValueError) as error:
        raise RecordError(f"a row for {path} cannot be stored: {error}.") from error
    with file_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            with locked(descriptor):
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                line = b"\n" + line if torn else line
                if os.write(descriptor, line) != len(line):
                    os.ftruncate(descriptor, size)
                    raise OSError(28, "No space left on device")
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_shard(path: Path) -> tuple[list[Measurement], list[BadLine]]:
    """The rows of the shard at `path` in file order, and its unreadable lines. A shard that is not there yet is empty.

    Raises: RecordError only when the file itself cannot be read.
    """
    path = Path(path)
    return _parsed(read_bytes(path)) if exists(path) else ([], [])


def read_rows(path: Path, start: int) -> tuple[list[Measurement], list[BadLine], int]:
    """The result of `read_shard` for whole lines from byte `start` on, and the byte after them, so that a growing file can
    be read in parts. Raises: RecordError only when the file itself cannot be read."""
    path = Path(path)
    if not exists(path) or path.stat().st_size <= start:
        return [], [], start
    new = read_bytes(path)[start:]
    whole = new[: new.rfind(b"\n") + 1]
    return *_parsed(whole), start + len(whole)


def require_writable(path: Path) -> None:
    """Check that a row could be appended to the shard at `path`, without creating it. Raises: RecordError."""
    path = Path(path)
    with file_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path = Path(os.path.realpath(path))  # a link may point to a path that cannot exist
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if exists(path):
            os.close(os.open(path, os.O_RDWR | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)))
            if not is_file(path):
                raise OSError(22, "it is no file")
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                pass


def _parsed(content: bytes) -> tuple[list[Measurement], list[BadLine]]:
    rows: list[Measurement] = []
    bad: list[BadLine] = []
    jobs: dict[str, TrainingJob] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.decode())
            if not isinstance(row, dict):
                raise ValueError("a line must hold a JSON mapping")
            rows.append(from_row(row, jobs))
        except (ValueError, RecursionError) as error:
            bad.append(BadLine(line=number, reason=f"{type(error).__name__}: {error}"))
    return rows, bad


def write_csv(path: Path, rows: Iterable[Measurement]) -> None:
    """Replace the table at `path` by `rows`, sorted by configuration and key: one row per key (newest `observed`, then
    last).

    The old file stays until the new one is safely on disk.
    Raises: RecordError when a row cannot be stored or the folder cannot be written; the old file is then untouched.
    """
    path = Path(path)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    try:
        encoded = _newest(map(to_row, rows), lambda row: (row["key"], row["observed"]))
        for row in sorted(encoded.values(), key=lambda row: (row["config_hash"], row["key"])):
            writer.writerow(to_cells(row))
        data = buffer.getvalue().encode()
    except (CellError, ValueError) as error:
        raise RecordError(f"a row for {path} cannot be stored: {error}.") from error
    replace_file(path, data)


def read_csv(path: Path) -> list[Measurement]:
    """The rows of the table at `path`, in file order. `write_csv(path, read_csv(path))` changes no byte.

    Raises: RecordError naming file, line, column, value, rule and way out, for anything that `write_csv` would not write.
    """
    path = Path(path)
    data = read_bytes(path)
    restore = "restore it from version control"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RecordError(f"{path}, line {line}: not UTF-8 text; {restore}.") from error
    first = text.partition("\n")[0]
    if first.rstrip("\r").split(",") != list(COLUMNS):
        raise RecordError(_header_message(path, first, restore), parameter="header", value=first)
    if first.endswith("\r"):
        raise RecordError(f"{path}, line 1: line ends are CRLF and must be LF; turn off core.autocrlf and {restore}.")
    if not text.endswith("\n"):
        raise RecordError(f"{path}, line {text.count(chr(10)) + 1}: the last line is cut off; {restore}.")
    return list(_rows(path, text, restore))


def read_measurements(path: Path) -> list[Measurement]:
    """The rows of one file: a table (`.csv`) or a shard (any other ending). Raises: RecordError that says what a table
    needs."""
    if path.suffix != ".csv":
        if not exists(path):
            raise RecordError(f"{path} cannot be read: there is no such file; check the path.")
        rows, bad = read_shard(path)
        if bad:
            raise RecordError(f"{path}, line {bad[0].line}: {bad[0].reason}; take the line out, or collect it again.")
        return rows
    try:
        return read_csv(path)
    except RecordError as error:
        if error.parameter != "header":
            raise
        raise RecordError(
            f"{error.message} A table of measurements has these columns, in this order: {', '.join(COLUMNS)}. Needed are "
            "gpu, provenance (measured), source, the job as JSON and one of the four peaks; "
            "peakcast.measurements.store.write_csv(path, [peakcast.measurements.records.Measurement("
            "job=..., gpu=..., ...)]) fills in the rest.",
            parameter="header",
            value=error.value,
        ) from error


def merge(shards: Iterable[Path], table: Path) -> Merged:
    """Add the rows of `shards` to the CSV `table`. No key of the table is ever lost. Of two rows with one key, the one with
    the newest `observed` is kept (with equal dates, the shard's).

    Raises: RecordError when the table cannot be read or written; then nothing is changed.
    """
    table = Path(table)
    with file_errors(table.parent, "written"):
        table.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(table.parent, os.O_RDONLY)
    try:
        with locked(descriptor):
            existing = read_csv(table) if exists(table) else []
            found: list[Measurement] = []
            bad_lines: list[tuple[Path, BadLine]] = []
            for shard in map(Path, shards):
                rows, bad = read_shard(shard)
                found += rows
                bad_lines += [(shard, line) for line in bad]
            before = {row.key: row for row in existing}
            after = _newest([*existing, *found], lambda row: (row.key, row.observed))
            replaced = sum(after[key] != row for key, row in before.items())
            if after != before or not exists(table):
                write_csv(table, after.values())
    finally:
        os.close(descriptor)
    return Merged(kept=len(before), added=len(after) - len(before), replaced=replaced, bad_lines=tuple(bad_lines))


def load(folder: Path | None = None, gpu: str | None = None) -> list[Measurement]:
    """Every row of the tables under `folder` (default `datasets_folder()`), of GPU type `gpu` when given.

    Raises: RecordError when the folder is missing or a table is damaged.
    """
    folder = Path(folder) if folder is not None else datasets_folder()
    if not is_folder(folder):
        raise RecordError(f"{folder} is not a folder of tables; give one, or set PEAKCAST_DATASETS.")
    others = {SOURCES_FOLDER, CONSTANTS_FOLDER}
    tables = [table for table in sorted(folder.rglob("*.csv")) if not others & {*table.relative_to(folder).parts}]
    rows = [row for table in tables for row in read_csv(table)]
    return [row for row in rows if gpu is None or row.gpu == gpu]


def datasets_folder() -> Path:
    """The folder of the tables: the environment's PEAKCAST_DATASETS, else `datasets/` of the checkout.

    Raises: RecordError when there is neither.
    """
    named = os.environ.get("PEAKCAST_DATASETS")
    if named:
        if not Path(named).is_dir():
            raise RecordError(
                f"PEAKCAST_DATASETS={named!r} is not a folder; create it or unset the variable.",
                parameter="PEAKCAST_DATASETS",
                value=named,
            )
        return Path(named)
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "datasets").is_dir():
        return checkout / "datasets"
    raise RecordError(
        "no datasets folder: peakcast is installed without its tables; set PEAKCAST_DATASETS to a folder of them.",
        parameter="PEAKCAST_DATASETS",
    )


def _newest(rows: Iterable[T], identify: Callable[[T], tuple[str, str]]) -> dict[str, T]:
    """The rows by key. For each key, the row with the newest `observed` is kept; with equal dates, the last. `identify`
    returns key and date."""
    newest: dict[str, tuple[str, T]] = {}
    for row in rows:
        key, observed = identify(row)
        if key not in newest or observed >= newest[key][0]:
            newest[key] = (observed, row)
    return {key: row for key, (_, row) in newest.items()}


def _rows(path: Path, text: str, restore: str) -> Iterator[Measurement]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    jobs: dict[str, TrainingJob] = {}
    seen: dict[str, int] = {}
    try:
        next(reader)
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if len(cells) != len(COLUMNS):
                found = f"{len(cells)} cells instead of {len(COLUMNS)}"
                raise RecordError(f"{where}: {found}; the line is cut off or edited; {restore}.")
            try:
                row = from_row(from_cells(cells), jobs)
            except CellError as error:
                raise RecordError(f"{where}: {error}; {restore}.", parameter=error.column, value=error.value) from error
            if row.key in seen:
                again = f"key={row.key!r} is on line {seen[row.key]} too"
                raise RecordError(f"{where}: {again}; keep one row, or {restore}.", parameter="key", value=row.key)
            seen[row.key] = reader.line_num
            yield row
    except csv.Error as error:
        raise RecordError(f"{path}, line {reader.line_num}: not valid CSV ({error}); {restore}.") from error


def _header_message(path: Path, first: str, restore: str) -> str:
    if not first:
        return f"{path}, line 1: the header is missing; {restore}, or delete the file if it is empty."
    if first.startswith("\ufeff"):
        return f"{path}, line 1: begins with a byte-order mark that a spreadsheet wrote; {restore}."
    found = first.split(",")
    pairs = enumerate(zip(found, COLUMNS, strict=False), start=1)
    wrong = next(
        (f"column {number} is {name!r} instead of {column!r}" for number, (name, column) in pairs if name != column),
        f"{len(found)} columns instead of {len(COLUMNS)}",
    )
    return f"{path}, line 1: {wrong[:200]}; this is not a table of this version; {restore}."
