"""Files that survive a crash: complete reads, atomic replacements, advisory locks, and errors as sentences."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from peakcast.core.bounded import file_bytes
from peakcast.core.errors import RecordError
from peakcast.core.units import GIB

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no such locks; lines are still written as a whole
    fcntl = None

MAX_FILE_BYTES = GIB
"""A shard or table larger than this is refused before it is read (100,000 rows are about 300 MB)."""


def read_bytes(path: Path) -> bytes:
    """The bytes of the file at `path`. Raises: RecordError when it cannot be read or is absurdly large."""
    with file_errors(path, "read"):
        return file_bytes(path, MAX_FILE_BYTES)


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, then rename it: readers see the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with file_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


@contextmanager
def file_errors(path: Path, done: str) -> Iterator[None]:
    """A context that turns an operating-system error into a RecordError about `path`, which could not be `done`."""
    try:
        yield
    except ValueError as error:  # a null byte or half a character
        raise RecordError(f"{str(path)!r} cannot be the name of a file; name another.", parameter="path") from error
    except OSError as error:
        blocked = isinstance(error, (FileExistsError, NotADirectoryError))
        reason = "a file is where its folder should be" if blocked else error.strerror or str(error)
        raise RecordError(
            f"{path} cannot be {done}: {reason}; check the path and its permissions, or name another.",
            parameter="path",
            value=str(path),
        ) from error


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """A context that holds the advisory lock of an open file or folder."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
