"""Finds and reads files of allocator histories. A file's content decides which of the known formats it is."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import IO

from peakcast.core.bounded import file_stream
from peakcast.core.errors import RecordError
from peakcast.histories import plain_pickle
from peakcast.histories.history import History
from peakcast.histories.published import published_history
from peakcast.histories.snapshots import histories_of

GZIP, PICKLE = b"\x1f\x8b", b"\x80"
NAMES = ("*.pickle", "*.pkl", "*.jsonl")
"""Names of the files of a folder that are taken for recordings; each may be packed with gzip."""


def recordings_of(path: Path) -> list[Path]:
    """`path` itself if it is a file; of a folder, the recordings in it by name, without those of folders inside it.

    Raises: RecordError if a folder has none.
    """
    if not path.is_dir():
        return [path]
    patterns = [name + ending for name in NAMES for ending in ("", ".gz")]
    found = sorted(file for pattern in patterns for file in path.glob(pattern) if file.is_file())
    if not found:
        raise RecordError(
            f"{path} has no recording ({', '.join(NAMES)}, each also as .gz); name the file if it is called otherwise.",
            value=str(path),
        )
    return found


def read_histories(path: Path) -> list[History]:
    """The histories in the file at `path`, one for each GPU that was recorded: a snapshot that PyTorch pickled, or a file
    of `datasets/published/histories`, packed with gzip or not.

    Raises: RecordError in one sentence for a file that cannot be read, is damaged, or is something else.
    """
    path = Path(path)
    try:
        with file_stream(path) as raw:
            begins = raw.read(2) or b""  # None: a system file that has no data yet
            raw.seek(0)
            if begins != GZIP:
                return _histories(raw, begins, path)
            with gzip.open(raw) as file:
                begins = file.read(2)
                file.seek(0)
                return _histories(file, begins, path)  # type: ignore[arg-type]
    except plain_pickle.RefusedPickleError as error:
        raise RecordError(f"{path} is no snapshot that can be read: {error}.", value=str(path)) from error
    except OSError as error:
        if error.strerror:
            raise RecordError(f"{path} cannot be read: {error.strerror}; check the path.", value=str(path)) from error
        raise RecordError(f"{path} is damaged or cut off: {error}.", value=str(path)) from error
    except (EOFError, zlib.error) as error:
        raise RecordError(f"{path} is damaged or cut off: {error}.", value=str(path)) from error


def _histories(file: IO[bytes], begins: bytes, path: Path) -> list[History]:
    if begins[:1] == PICKLE:
        return histories_of(plain_pickle.load(file), path.name)
    return [published_history(file, path.name)]
