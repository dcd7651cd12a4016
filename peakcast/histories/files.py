"""Reads a file that holds allocator histories, whichever of the known kinds its content is."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from peakcast.errors import RecordError
from peakcast.histories.history import History
from peakcast.histories.published import published_history

GZIP = b"\x1f\x8b"


def read_histories(path: Path) -> list[History]:
    """The histories in the file at `path`, one for each GPU that was recorded.

    Raises: RecordError in one sentence for a file that cannot be read, is damaged, or is something else.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP
            raw.seek(0)
            if not packed:
                return [published_history(raw, path.name)]
            with gzip.open(raw) as file:
                return [published_history(file, path.name)]  # type: ignore[arg-type]
    except OSError as error:
        if error.strerror:
            raise RecordError(f"{path} cannot be read: {error.strerror}; check the path.", value=str(path)) from error
        raise RecordError(f"{path} is damaged or cut off: {error}.", value=str(path)) from error
    except (EOFError, zlib.error) as error:
        raise RecordError(f"{path} is damaged or cut off: {error}.", value=str(path)) from error
