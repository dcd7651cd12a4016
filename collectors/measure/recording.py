"""Records walks of a network in a process of its own, with the libraries of this environment or of another one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from peakcast.collectors.machine.environments import environment_for
from peakcast.core.errors import CollectorError
from peakcast.jobs.spec import TrainingJob, job_to_mapping

RecordWalk = Callable[..., dict[str, Any]]
"""Takes the arguments of `Walker.walk` in `collectors/tracing/walks.py` and returns the walk as a mapping."""
TIMEOUT_SECONDS = 300
"""Time limit for all walks of one network together."""
FIRST_STEP = 2
"""Which answer has the first step of the whole network; the one before has the libraries' releases."""


@dataclass(frozen=True)
class Library:
    """The libraries of an environment, as one job sees them."""

    walk: RecordWalk
    versions: Mapping[str, str]
    """Releases of the packages in that environment."""
    defaults: Mapping[str, Any]
    """Flat name of a configuration's value -> the default that applies if a configuration does not say it."""
    read: frozenset[str]
    """Names of values that the libraries' code may read from a configuration."""


class FirstStepError(CollectorError):
    """Not even the first step of the whole network ended within the time limit."""


class WalkRecorder:
    """Records walks in the environment of the interpreter `python`, one job at a time. Used as a context manager.

    Raises: CollectorError with the message of the process there.
    """

    def __init__(self, python: str = sys.executable, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._python, self._timeout_seconds = python, timeout_seconds
        self._around = ExitStack()
        self._worker: _Worker | None = None

    def __enter__(self) -> WalkRecorder:
        self._environment = self._around.enter_context(environment_for(self._python))
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()
        self._around.close()

    @contextmanager
    def of(self, job: TrainingJob) -> Iterator[Library]:
        """A context for walks of `job`, which together must stay within the time limit."""
        if self._worker is None:
            self._worker = _Worker(self._python, self._environment)
        worker = self._worker
        try:
            with worker.limited(self._timeout_seconds):
                said = worker.ask(job_to_mapping(job))
                yield Library(
                    lambda *sample: worker.ask(sample), said["versions"], said["defaults"], frozenset(said["read"])
                )
        except BaseException:
            self._end()  # the process may be busy: the next job gets a new one
            raise
        worker.ask(None)

    def families(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """The families of networks that the library there has, as `model_type` -> a configuration; and the releases."""
        command = [self._python, "-P", "-m", "peakcast.collectors.tracing.installed_families"]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CollectorError((done.stderr.strip().splitlines() or ["the families could not be listed."])[-1])
        found = json.loads(done.stdout)
        return found["families"], found["versions"]

    def versions(self) -> dict[str, str]:
        """The releases of the packages there."""
        asked = "import json; from peakcast.collectors.machine.probes import versions; print(json.dumps(versions()))"
        done = subprocess.run(
            [self._python, "-P", "-c", asked], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CollectorError((done.stderr.strip().splitlines() or ["the releases could not be listed."])[-1])
        found: dict[str, str] = json.loads(done.stdout)
        return found

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
        self._worker = None


class _Worker:
    """A process that answers each line of JSON with one line of JSON."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._python = python
        command = [python, "-P", "-m", "peakcast.collectors.tracing.walks"]
        # a file: a pipe that nobody reads would stop a library that warns at every walk
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed by `end`
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said}
        try:
            self._process = subprocess.Popen(  # type: ignore[call-overload]
                command, text=True, env=environment, start_new_session=True, **pipes
            )
        except OSError as error:
            self._said.close()
            reason = f"python={python!r} cannot be started: {error.strerror}; give the path of an interpreter."
            raise CollectorError(reason, parameter="python", value=python) from error
        self._limit = 0.0
        self._answers = 0

    @contextmanager
    def limited(self, timeout_seconds: float) -> Iterator[None]:
        """A context after whose time limit the process is ended."""
        self._answers = 0
        late = threading.Timer(timeout_seconds, self._late, [timeout_seconds])
        late.start()
        try:
            yield
        finally:
            late.cancel()

    def _late(self, timeout_seconds: float) -> None:
        self._limit = timeout_seconds
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def ask(self, line: object) -> dict[str, Any]:
        """The answer to `line`. Raises: CollectorError with the reason when there is none."""
        try:
            print(json.dumps(line), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise (FirstStepError if self._limit and self._answers < FIRST_STEP else CollectorError)(self._last_words())
        self._answers += 1
        found: dict[str, Any] = json.loads(answer) or {}
        if "refused" in found:
            raise CollectorError(found["refused"])
        return found

    def _last_words(self) -> str:
        if self._limit:
            return (
                f"recording it took longer than {self._limit:g} s. Code that loops over the sequence in Python takes long: "
                "transformers' own of linear attention, where flash-linear-attention is not installed (pip install "
                "flash-linear-attention); else ask for fewer layers or a shorter sequence_length."
            )
        self._process.communicate()
        self._said.seek(0)
        silent = f"python={self._python!r} ended without a word; give the path of an interpreter that has torch."
        lines = self._said.read().strip().splitlines() or [silent]
        return str(lines[-1]).removeprefix("peakcast: ")

    def end(self) -> None:
        """Stop it."""
        self._kill()
        self._process.communicate()
        self._said.close()
