"""Standard output and error that may be full, closed, or in another character set: none of these may end an answer with a
traceback."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

WRITE_FAILED = 74
"""Exit code if standard output cannot be written: EX_IOERR of sysexits.h."""
READER_GONE = 141
"""Exit code if the reader of standard output has ended, as in `| head`: 128 plus SIGPIPE, as in a shell."""


class OutputError(Exception):
    """Standard output cannot be written. It is not an OSError, because libraries would handle it as one of theirs."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the answer cannot be written: {error.strerror}.")
        self.code = READER_GONE if error.errno == errno.EPIPE else WRITE_FAILED


class _Out(io.RawIOBase):
    """A file descriptor whose errors become `OutputError`, or are ignored."""

    def __init__(self, descriptor: int, *, must: bool) -> None:
        self._descriptor, self._must = descriptor, must

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            with suppress(OSError):  # buffered output has nowhere to go
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._descriptor)
            if self._must:
                raise OutputError(error) from error
            return len(data)


def prepare() -> None:
    """Make the standard streams of this program such that printing fails with an `OutputError` or not at all. What is
    written to a closed stream is lost, and reading from it gives nothing; characters that a terminal lacks are written as
    \\x.. or \\u...."""
    for name, descriptor in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:  # it is closed; no other file may get its number
            with suppress(OSError):
                null = os.open(os.devnull, os.O_RDWR)
                if null != descriptor:
                    os.dup2(null, descriptor)
                    os.close(null)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # to the end
    sys.stdout.flush()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = io.BufferedWriter(_Out(stream.fileno(), must=name == "stdout"))
        lines = name == "stderr" or stream.isatty()
        text = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=lines)
        setattr(sys, name, text)
