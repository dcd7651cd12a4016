"""Paths from strangers that lead to no file, or to one that never ends: every reader says so soon, in a sentence."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peakcast import api
from peakcast.collectors.measure.grid import load_grid
from peakcast.collectors.measure.runner import collect
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.core import bounded
from peakcast.core.errors import MAX_CHARACTERS, PeakcastError
from peakcast.dialects.common.job_file import job_from_mapping, load_job
from peakcast.dialects.common.pasted import mapping_of_file
from peakcast.dialects.opening import opened
from peakcast.doors.batching import lines_and_processes
from peakcast.histories.files import read_histories
from peakcast.measurements import store
from peakcast.models.calibration.calibration import load_calibration
from peakcast.timelines.files import read_timelines

LONGEST_SECONDS = 5.0
JOBS = [job_from_mapping({"architecture": "gpt2", "sequence_length": 16})]
READERS: dict[str, Callable[[Path], Any]] = {
    "predict": lambda path: api.predict(str(path), "H100-80GB"),
    "the other files of a run": lambda path: api.read({"architecture": "gpt2"}, companions=[path]),
    "a job": load_job,
    "a configuration": opened,
    "a mapping": mapping_of_file,
    "a network": lambda path: job_from_mapping({"architecture": str(path)}),
    "a batch": lambda path: lines_and_processes(path, 1),
    "a grid": load_grid,
    "a shard to add to": lambda path: collect(JOBS, path, CollectSettings(trace=True)),
    "rows to check against": lambda path: api.check(path),
    "tables": store.load,
    "a table": store.read_csv,
    "a calibration": load_calibration,
    "a recording": read_histories,
    "timelines": read_timelines,
}


def link(target: str) -> Callable[[Path], Path]:
    """A link of the ending that a configuration has."""

    def made(path: Path) -> Path:
        path.symlink_to(target)
        return path

    return made


def sparse(path: Path) -> Path:
    """A file that says that it has a terabyte, and takes none."""
    with path.open("wb") as file:
        file.truncate(2**40)
    return path


def pipe(path: Path) -> Path:
    """A pipe that nobody writes to."""
    os.mkfifo(path)
    return path


def listening(path: Path) -> Path:
    """The name of a socket."""
    short = Path(os.path.relpath(path))  # a socket's name has at most 107 characters
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(short))
    return path


PLACES: dict[str, Callable[[Path], Path]] = {
    "a link to zeros without end": link("/dev/zero"),
    "a link to noise without end": link("/dev/urandom"),
    "a device": lambda path: Path("/dev/full"),
    "a pipe": pipe,
    "a socket": listening,
    "a file that says it is empty and has terabytes": link("/proc/self/pagemap"),
    "a file that cannot be read": link("/proc/self/mem"),
    "a file that waits": link("/proc/kmsg"),
    "a sparse file": sparse,
    "a link to itself": lambda path: link(path.name)(path),
    "a link to nowhere": lambda path: link("nowhere/at/all")(path),
    "a name of 400 characters": lambda path: path.with_name("x" * 400),
    "a path of 5,000 characters": lambda path: Path("x/" * 2500 + "x"),
    "a null byte": lambda path: path.with_name("a\0b.yaml"),
    "half a character": lambda path: path.with_name("\ud800.yaml"),
    "a file as a folder": lambda path: Path("/dev/null/x.yaml"),
}


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bounded, "PIPE_SECONDS", 0.03)  # thirty of them are waited for
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("place", PLACES)
def test_no_place_holds_a_reader_up(tmp_path, reader, place):
    path = PLACES[place](tmp_path / "job.yaml")
    begun = time.monotonic()
    with pytest.raises(PeakcastError) as caught:
        READERS[reader](path)
    assert time.monotonic() - begun < LONGEST_SECONDS
    assert len(str(caught.value)) <= MAX_CHARACTERS + 20


def test_a_pipe_that_gives_its_text_is_read_as_a_file_is(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"architecture: gpt2\n")
    os.close(writing)
    assert load_job(Path(f"/dev/fd/{reading}")).architecture.name == "gpt2"
    os.close(reading)
