"""Walks from a process of its own, which stays for the next ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from peakcast.errors import CollectorError
from peakcast.models.recipes.recipe import Record
from peakcast.models.recipes.walk import Walk
from peakcast.spec import TrainingJob, job_to_mapping


@contextmanager
def recorder(job: TrainingJob, python: str = sys.executable) -> Iterator[Record]:
    """Records walks of `job` in the environment of the interpreter `python`. Raises: CollectorError with what it said."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-P", "-m", "peakcast.collectors.tracing.walks"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    worker = subprocess.Popen(command, text=True, env=environment, **pipes)
    assert worker.stdin is not None
    assert worker.stdout is not None

    def ask(line: object) -> str:
        try:
            print(json.dumps(line), file=worker.stdin, flush=True)
            answer = worker.stdout.readline()  # type: ignore[union-attr]
        except BrokenPipeError:
            answer = ""
        if not answer:
            said = (worker.communicate()[1].strip().splitlines() or ["it ended without a word"])[-1]
            raise CollectorError(f"{job.architecture.name!r} cannot be recorded: {said.removeprefix('peakcast: ')}")
        return answer

    def record(samples: Sequence[tuple[int | None, int, int]]) -> list[Walk]:
        return [Walk.read(json.loads(ask(sample))) for sample in samples]

    try:
        ask(job_to_mapping(job))
        yield record
    finally:
        worker.kill()
        worker.communicate()
