"""Runs the cells of a grid: each in a process of its own, each finished row on disk before the next cell starts.

A cell that hangs is killed with its whole process group; a cell that fails is a row that says why; what the shard already
has is skipped, so a collection can be cut off anywhere and taken up again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from peakcast import __version__, store
from peakcast.collectors.grid import load_grid
from peakcast.errors import NO_GPU, CollectorError
from peakcast.records import Measurement
from peakcast.rows import from_row, parse_json
from peakcast.spec import TrainingJob, job_to_mapping

WORKER = [sys.executable, "-P", "-m", "peakcast.collectors.worker"]
"""`-P`: the checkout's `datasets/` folder must not shadow Hugging Face's `datasets` in the cell."""
UNKNOWN_GPU = "unknown"

Progress = Callable[[str, int, int], None]


@dataclass
class Summary:
    """What a collection did. Counts of cells."""

    total: int = 0
    skipped: int = 0
    """Already in the shard."""
    finished: int = 0
    out_of_memory: int = 0
    failed: int = 0
    left: int = 0
    """Not started when the budget was used up."""
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    """Why cells failed."""


def collect(
    grid: str | Path | Iterable[TrainingJob],
    shard: Path,
    *,
    budget_minutes: float | None = None,
    trace: bool = False,
    timeout_seconds: float = 600,
    gpu: str | None = None,
    progress: Progress | None = None,
    worker: list[str] | None = None,
) -> Summary:
    """Measure (or `trace`) the jobs of `grid` that `shard` does not have; rows are appended to `shard` as they come.

    `budget_minutes` stops between cells; `timeout_seconds` is for one cell; `gpu` names the GPU type (default: what CUDA
    reports; a trace must be told which one it stands for, default A100-80GB). `progress(cell, done, total)` is called
    before each cell.
    Raises: CollectorError for bad options; a failing cell never raises.
    """
    for name, value in (("budget_minutes", budget_minutes), ("timeout_seconds", timeout_seconds)):
        if value is not None and not value > 0:
            raise CollectorError(f"{name}={value} must be above 0.", parameter=name, value=value)
    jobs = load_grid(grid) if isinstance(grid, (str, Path)) else list(grid)
    if gpu is not None:
        from peakcast import catalog

        gpu = catalog.gpu(gpu).name
    elif trace:
        gpu = "A100-80GB"
    done = _hashes_in(shard, trace, gpu)
    summary = Summary(total=len(jobs))
    started = time.monotonic()
    for index, job in enumerate(jobs):
        if _identity(job) in done:
            summary.skipped += 1
            continue
        if budget_minutes is not None and time.monotonic() - started > budget_minutes * 60:
            summary.left = len(jobs) - index
            break
        if progress:
            progress(describe(job), index, len(jobs))
        row, reason = run_cell(job, trace=trace, gpu=gpu, timeout_seconds=timeout_seconds, worker=worker or WORKER)
        if reason.startswith(NO_GPU):  # no cell of this machine can do better: nothing is recorded
            raise CollectorError(reason)
        store.append(shard, row)
        summary.finished += row.outcome == "ok"
        summary.out_of_memory += row.outcome == "out_of_memory"
        if row.outcome == "failed":
            summary.failed += 1
            summary.reasons.append(f"{describe(job)}: {reason}")
    summary.seconds = time.monotonic() - started
    return summary


def describe(job: TrainingJob) -> str:
    """A cell in a few words."""
    words = [job.architecture.name, f"batch {job.micro_batch_size}", f"sequence {job.sequence_length}"]
    if job.finetuning.method != "full":
        words.append(job.finetuning.method)
    if job.activation_checkpointing.mode != "none":
        words.append("checkpointed")
    return ", ".join([*words, f"{job.optimizer.name} {job.optimizer.implementation}"])


def _identity(job: TrainingJob) -> str:
    """A cell's identity before it ran: the versions that it will find are not part of the question."""
    from peakcast.fields import FrozenMapping

    return job.replace(versions=FrozenMapping()).config_hash


def _hashes_in(shard: Path, trace: bool, gpu: str | None) -> set[str]:
    """Cells that need not run again; rows of another GPU type than the one named are no answer for it."""
    if not shard.exists():
        return set()
    rows, _ = store.read_shard(shard)
    provenance = "traced" if trace else "measured"
    rows = [row for row in rows if row.provenance == provenance and row.outcome != "failed"]
    return {_identity(row.job) for row in rows if gpu is None or row.gpu == gpu}


def run_cell(
    job: TrainingJob, *, trace: bool, gpu: str | None, timeout_seconds: float, worker: list[str]
) -> tuple[Measurement, str]:
    """One cell in a fresh process: its row, and why it failed ("" when it did not)."""
    question = json.dumps({"job": job_to_mapping(job), "gpu": gpu, "trace": trace})
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        worker,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # a group of its own, so that a hang is killed whole
    )
    try:
        output, errors = process.communicate(question, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        return _failed(job, gpu, trace, reason := f"no answer within {timeout_seconds:g} s; it was killed."), reason
    except BaseException:
        _kill(process)
        raise
    if process.returncode == 0:
        try:
            return from_row(parse_json(output.strip().splitlines()[-1])), ""
        except (ValueError, IndexError, KeyError) as error:
            reason = f"its answer cannot be read: {error}"
            return _failed(job, gpu, trace, reason), reason
    if process.returncode < 0:
        reason = f"killed by {signal.Signals(-process.returncode).name}."
    else:
        reason = (errors.strip().splitlines() or ["no message"])[-1].removeprefix("peakcast: ")
    return _failed(job, gpu, trace, reason), reason


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()  # reaps it and closes its pipes


def _failed(job: TrainingJob, gpu: str | None, trace: bool, reason: str) -> Measurement:
    return Measurement(
        job=job,
        gpu=gpu or UNKNOWN_GPU,
        provenance="traced" if trace else "measured",
        source="peakcast",
        source_version=__version__,
        outcome="failed",
        environment={"reason": reason[:500]},
    )
