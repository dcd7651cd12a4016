"""The environment variables with which an interpreter, of this or another environment, can run peakcast's own modules."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peakcast
from peakcast import collectors


@contextmanager
def environment_for(python: str) -> Iterator[dict[str, str]]:
    """Environment variables with which the interpreter `python` can import peakcast, beside what the caller's PYTHONPATH
    has, and sees no GPU."""
    variables = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    if python == sys.executable:
        yield variables
        return
    with _package_folder() as folder:
        own = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
        yield {**variables, "PYTHONPATH": os.pathsep.join(own)}


@contextmanager
def _package_folder() -> Iterator[Path]:
    """A folder from which an interpreter that does not have peakcast can import it."""
    with tempfile.TemporaryDirectory(prefix="peakcast-") as folder:
        package = Path(folder) / "peakcast"
        package.mkdir()
        for entry in Path(peakcast.__path__[0]).iterdir():
            (package / entry.name).symlink_to(entry)
        if not (package / "collectors").exists():  # in a checkout, collectors/ is beside peakcast/
            (package / "collectors").symlink_to(Path(collectors.__path__[0]))
        yield Path(folder)
