"""Walks of a network from a process of its own, which stays for the next ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from peakcast.errors import CollectorError
from peakcast.spec import TrainingJob, job_to_mapping

RecordWalk = Callable[[int | None, int, int], dict[str, Any]]
"""Layers (None: all), micro-batch size and sequence length -> the walk, as `collectors/tracing/walks.py` writes it."""
TIMEOUT_SECONDS = 300
"""How long all walks of one network may take together."""


@contextmanager
def walks_of(job: TrainingJob, python: str = sys.executable, timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[RecordWalk]:
    """Records walks of `job` in the environment of the interpreter `python`. Raises: CollectorError with what it said."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    worker = subprocess.Popen(
        [python, "-P", "-m", "peakcast.collectors.tracing.walks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    late = threading.Timer(timeout_seconds, worker.kill)
    late.start()
    assert worker.stdin is not None
    assert worker.stdout is not None
    source, sink = worker.stdout, worker.stdin

    def ask(line: object) -> dict[str, Any]:
        try:
            print(json.dumps(line), file=sink, flush=True)
            answer = source.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise CollectorError(_said(worker, timeout_seconds if not late.is_alive() else None))
        found: dict[str, Any] = json.loads(answer)
        return found

    try:
        ask(job_to_mapping(job))
        yield lambda layers, batch, length: ask([layers, batch, length])
    finally:
        late.cancel()
        worker.kill()
        worker.communicate()


def _said(worker: subprocess.Popen[str], late_seconds: float | None) -> str:
    """Why a worker ended, in its own words where it had some."""
    if late_seconds is not None:
        return f"recording it took longer than {late_seconds:g} s; trace a smaller network (`peakcast explain --trace`)."
    lines = worker.communicate()[1].strip().splitlines() or ["the recording process ended without a word."]
    return lines[-1].removeprefix("peakcast: ")
