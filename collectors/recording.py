"""Walks of a network from a process of its own, in this environment or another's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import peakcast
from peakcast import collectors
from peakcast.errors import CollectorError
from peakcast.spec import TrainingJob, job_to_mapping

RecordWalk = Callable[..., dict[str, Any]]
"""What `Walker.walk` of `collectors/tracing/walks.py` takes -> the walk, as that writes it."""
TIMEOUT_SECONDS = 300
"""How long all walks of one network may take together."""


@contextmanager
def walks_of(
    job: TrainingJob, python: str = sys.executable, timeout_seconds: float = TIMEOUT_SECONDS
) -> Iterator[tuple[RecordWalk, Mapping[str, str]]]:
    """Records walks of `job` in the environment of the interpreter `python`; and the releases of the packages there.

    Raises: CollectorError with what it said.
    """
    with ExitStack() as around:
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
        if python != sys.executable:
            environment["PYTHONPATH"] = str(around.enter_context(_package()))
        worker = _Worker(python, environment, timeout_seconds)
        around.callback(worker.end)
        versions = worker.ask(job_to_mapping(job))["versions"]
        yield lambda *sample: worker.ask(sample), versions


@contextmanager
def _package() -> Iterator[Path]:
    """A folder from which an interpreter that does not have peakcast can import it."""
    with tempfile.TemporaryDirectory(prefix="peakcast-") as folder:
        package = Path(folder) / "peakcast"
        package.mkdir()
        for entry in Path(peakcast.__path__[0]).iterdir():
            (package / entry.name).symlink_to(entry)
        if not (package / "collectors").exists():  # in a checkout it stands beside
            (package / "collectors").symlink_to(Path(collectors.__path__[0]))
        yield Path(folder)


class _Worker:
    """A process that answers a line of JSON for a line."""

    def __init__(self, python: str, environment: Mapping[str, str], timeout_seconds: float) -> None:
        command = [python, "-P", "-m", "peakcast.collectors.tracing.walks"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            self._process = subprocess.Popen(command, text=True, env=environment, **pipes)  # type: ignore[call-overload]
        except OSError as error:
            reason = f"python={python!r} cannot be started: {error.strerror}; give the path of an interpreter."
            raise CollectorError(reason, parameter="python", value=python) from error
        self._timeout_seconds = timeout_seconds
        self._late = threading.Timer(timeout_seconds, self._process.kill)
        self._late.start()

    def ask(self, line: object) -> dict[str, Any]:
        """The answer to `line`. Raises: CollectorError with the reason when there is none."""
        try:
            print(json.dumps(line), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise CollectorError(self._last_words())
        found: dict[str, Any] = json.loads(answer)
        if "refused" in found:
            raise CollectorError(found["refused"])
        return found

    def _last_words(self) -> str:
        if not self._late.is_alive():
            limit = f"{self._timeout_seconds:g} s"
            return f"recording it took longer than {limit}; trace a smaller network (`peakcast explain --trace`)."
        lines = self._process.communicate()[1].strip().splitlines() or ["the recording process ended without a word."]
        return str(lines[-1]).removeprefix("peakcast: ")

    def end(self) -> None:
        """Stop it."""
        self._late.cancel()
        self._process.kill()
        self._process.communicate()
