"""Walks of a script's own steps with batches of other sizes, from a process that runs it (`walked.py`)."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from peakcast.collectors.dryrun.command import TrainingCommand
from peakcast.collectors.dryrun.process import LOG, DryRunQuestion, Process, started
from peakcast.core.errors import CollectorError

WalkScript = Callable[[int | None, int, int], dict[str, Any]]
"""Function of (number of the network's layers or None for all, number of sequences, their length); returns the walk of such
a step, in the form of `collectors/tracing/walks.py`."""
POLL_SECONDS = 0.01


@contextmanager
def script_walks(command: TrainingCommand, question: DryRunQuestion, batch: tuple[int, int]) -> Iterator[WalkScript]:
    """A context that gives a function for walks of the script of `command`, as a single rank and with the limits and the
    rows of `question`. `batch`: number and length of the sequences of its own micro-batch.

    The function raises: CollectorError with the reason if the script has no step with a batch of that size.
    """
    asked = replace(question, rank=0, skip_evaluation=True, torch=None, walks=batch)
    if command.world_size > 1:
        command = replace(command, world_size=1, ranks_per_node=1, launched=False, accelerate=())
    deadline = time.monotonic() + question.limits.seconds
    with tempfile.TemporaryDirectory(prefix="peakcast-dryrun-") as name:
        folder, number = Path(name), 0
        with started(command, asked, folder) as process:

            def walk(layers: int | None, size: int, length: int) -> dict[str, Any]:
                nonlocal number
                question, answer = folder / f"walk-{number}.json", folder / f"walked-{number}.json"
                number += 1
                written = question.with_suffix(".new")
                written.write_text(json.dumps([layers, size, length]), encoding="utf-8")
                written.replace(question)
                return _answer(process, answer, deadline, folder / LOG)

            yield walk


def _answer(process: Process, answer: Path, deadline: float, log: Path) -> dict[str, Any]:
    while not answer.is_file():
        if process.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
            raise CollectorError(
                f"its batches cannot be given another size: as one rank alone it puts none of that size on the GPU outside "
                f"of its network, or fails ({last[:200]})"
            )
        if time.monotonic() > deadline:
            raise CollectorError("walking its steps took too long (--timeout-seconds)")
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "refused" in found:
        raise CollectorError(str(found["refused"]))
    return found
