"""Runs the cells of a grid: each in a process of its own, each finished row on disk before its place takes another.

A cell that hangs is killed with its whole process group; a cell that fails is a row that says why; what the shard already
has is skipped, so a collection can be cut off anywhere and taken up again. Where cells run is an engine's business.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peakcast import __version__, store
from peakcast.collectors.engines import WORK, Answer, Question, find_engine
from peakcast.collectors.grid import load_grid
from peakcast.dialects.job_file import job_from_mapping
from peakcast.errors import NO_GPU, CollectorError
from peakcast.records import Measurement
from peakcast.rows import from_row
from peakcast.spec import TrainingJob, job_in_words, job_to_mapping

UNKNOWN_GPU = "unknown"
MOST_TRACES_AT_ONCE = 4
"""A warm parent holds about 0.6 GB and a trace of a 7B model another: memory, not cores, is short beyond this."""

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
    processes: int | None = None,
    engine: str = "local",
    engine_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    work: str = WORK,
) -> Summary:
    """Measure (or `trace`) the jobs of `grid` that `shard` does not have; rows are appended to `shard` as they come.

    `budget_minutes` stops between cells; `timeout_seconds` is for one cell; `gpu` names the GPU type (default: what CUDA
    reports; a trace must be told which one it stands for, default A100-80GB). `processes` cells run at a time (default:
    one for measuring, as many as there are cores, though at most four, for traces) with the engine "local"; "ray" and
    "slurm" use more than one machine, and `engine_options` are theirs. `progress(cell, done, total)` is called before
    each cell.
    Raises: CollectorError for bad options; a failing cell never raises.
    """
    bounds = (("budget_minutes", budget_minutes), ("timeout_seconds", timeout_seconds), ("processes", processes))
    for name, value in bounds:
        if value is not None and not value > 0:
            raise CollectorError(f"{name}={value} must be above 0.", parameter=name, value=value)
    run = find_engine(engine)
    jobs = load_grid(grid) if isinstance(grid, (str, Path)) else list(grid)
    if gpu is not None:
        from peakcast import catalog

        gpu = catalog.gpu(gpu).name
    elif trace:
        gpu = "A100-80GB"
    done = _hashes_in(shard, trace, gpu)
    cells = [(job, rank) for job in jobs for rank in (ranks_to_trace(job) if trace else (0,))]
    summary = Summary(total=len(cells))
    started = time.monotonic()
    left = [cell for cell in cells if cell_identity(*cell) not in done]
    summary.skipped = len(cells) - len(left)

    def questions() -> Iterator[Question]:
        for index, (job, rank) in enumerate(left):
            if budget_minutes is not None and time.monotonic() - started > budget_minutes * 60:
                summary.left = len(left) - index
                return
            if progress:
                progress(job_in_words(job), summary.skipped + index, len(cells))
            yield {"job": job_to_mapping(job), "gpu": gpu, "trace": trace, "rank": rank}

    options = dict(engine_options or {})
    if engine == "local" and "gpus" not in options:
        options.setdefault("processes", processes or (_traces_at_once() if trace else 1))
    try:
        answers = run(questions(), timeout_seconds, work=work, **options)
    except TypeError as error:
        raise CollectorError(
            f"engine_options={options} are not those of engine={engine!r}: {error}.", parameter="engine_options"
        ) from error
    for question, answer in answers:
        job = job_from_mapping(question["job"])
        row, reason = _row(answer, job, gpu, trace, int(question["rank"]))
        if reason.startswith(NO_GPU):  # no cell of this machine can do better: nothing is recorded
            raise CollectorError(reason)
        store.append(shard, row)
        summary.finished += row.outcome == "ok"
        summary.out_of_memory += row.outcome == "out_of_memory"
        if row.outcome == "failed":
            summary.failed += 1
            summary.reasons.append(f"{job_in_words(job)}: {reason}")
    summary.seconds = time.monotonic() - started
    return summary


def _traces_at_once() -> int:
    return min(os.cpu_count() or 1, MOST_TRACES_AT_ONCE)


def _row(answer: Answer, job: TrainingJob, gpu: str | None, trace: bool, rank: int) -> tuple[Measurement, str]:
    """The row of an answer, and why the cell failed ("" when it did not)."""
    reason = str(answer.get("reason", ""))
    if not reason:
        try:
            return from_row(answer["row"]), ""
        except (ValueError, KeyError, TypeError) as error:
            reason = f"its answer cannot be read: {error}"
    return _failed(job, gpu, trace, reason, rank), reason


def ranks_to_trace(job: TrainingJob) -> tuple[int, ...]:
    """The ranks whose traces differ: of a pipeline the first of its first, middle and last stage, in Megatron's order of
    ranks, stages outermost."""
    stages = job.parallelism.pipeline_parallel_size
    if job.framework != "megatron" or stages == 1:
        return (0,)
    ranks = job.parallelism.world_size // stages
    return tuple(ranks * stage for stage in sorted({0, stages // 2, stages - 1}))


def cell_identity(job: TrainingJob, rank: int = 0) -> str:
    """A cell's identity before it ran: the versions that it will find are not part of the question."""
    from peakcast.fields import FrozenMapping

    return f"{job.replace(versions=FrozenMapping()).config_hash}.{rank}"


def _hashes_in(shard: Path, trace: bool, gpu: str | None) -> set[str]:
    """Cells that need not run again; rows of another GPU type than the one named are no answer for it."""
    if not shard.exists():
        return set()
    rows, _ = store.read_shard(shard)
    provenance = "traced" if trace else "measured"
    rows = [row for row in rows if row.provenance == provenance and row.outcome != "failed"]
    return {cell_identity(row.job, row.rank) for row in rows if gpu is None or row.gpu == gpu}


def _failed(job: TrainingJob, gpu: str | None, trace: bool, reason: str, rank: int) -> Measurement:
    return Measurement(
        job=job,
        gpu=gpu or UNKNOWN_GPU,
        provenance="traced" if trace else "measured",
        rank=rank,
        source="peakcast",
        source_version=__version__,
        outcome="failed",
        environment={"reason": reason[:500]},
    )
