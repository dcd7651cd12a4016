"""Runs the cells of a grid, each in a process of its own; each finished row is on disk before another cell starts in its
place.

A cell that hangs is killed with its whole process group. A cell that fails becomes a row that says why. Cells that the
shard already has are skipped, so a collection can be stopped at any time and continued later. An engine decides where cells
run.
"""

from __future__ import annotations

import base64
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peakcast import __version__
from peakcast.collectors.measure.grid import load_grid
from peakcast.collectors.measure.sharing import SharedShard, cell_identity
from peakcast.collectors.processes.engines import WORK, Answer, Question, find_engine
from peakcast.core.cores import available_cores
from peakcast.core.durable import replace_file
from peakcast.core.errors import NO_GPU, CollectorError
from peakcast.core.workers import check_processes
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.ranks import ranks_to_trace
from peakcast.jobs.spec import TrainingJob, job_in_words, job_to_mapping
from peakcast.measurements import store
from peakcast.measurements.records import Measurement
from peakcast.measurements.rows import from_row
from peakcast.timelines.files import MAX_PACKED_BYTES

UNKNOWN_GPU = "unknown"
MOST_TRACES_AT_ONCE = 4
"""A warm parent takes about 0.6 GB and a trace of a 7B model as much again: with more than four, memory runs short before
cores do."""

RANKS = ("auto", "real", "one")
"""Words that `ranks` may have; it may also list numbers."""

Progress = Callable[[str, int, int], None]


@dataclass
class Summary:
    """Results of a collection, as numbers of cells."""

    total: int = 0
    skipped: int = 0
    """Cells that the shard already had."""
    finished: int = 0
    out_of_memory: int = 0
    failed: int = 0
    left: int = 0
    """Cells not started when the time budget was used up."""
    elsewhere: int = 0
    """Cells that another collector of the same shard was still running at the end."""
    unreadable: int = 0
    """Lines of the shard that cannot be read; their cells run again."""
    seconds: float = 0.0
    cell_seconds: float = 0.0
    """Seconds of all cells' processes together."""
    step_seconds: float = 0.0
    """Seconds of the training steps inside them (for a trace, of everything that it runs)."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """For each quantity, how far predictions were from the collected peaks (`peakcast.doors.collected.Collected.table`)."""
    reasons: list[str] = field(default_factory=list)
    """Why cells failed."""

    def count(self, row: Measurement, cell_seconds: float, reason: str) -> None:
        """Add a cell's row, how long its processes took, and why it failed if it did."""
        readings = row.environment.get("readings", {})
        self.cell_seconds += cell_seconds
        self.step_seconds += float(readings.get("step_seconds", readings.get("wall_seconds", 0)))
        self.finished += row.outcome == "ok"
        self.out_of_memory += row.outcome == "out_of_memory"
        if row.outcome == "failed":
            self.failed += 1
            self.reasons.append(f"{job_in_words(row.job)}: {reason}")


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
    history: bool = False,
    ranks: str = "auto",
    repeats: int = 1,
    progress: Progress | None = None,
    on_row: Callable[[Measurement], None] | None = None,
    work: str = WORK,
) -> Summary:
    """Measure (or `trace`) the jobs of `grid` that `shard` does not have; rows are appended to `shard` as they come. A job
    that is in `grid` twice, or every job if `repeats` is above 1, is measured again as a repeat (`case: repeat 2`).

    `budget_minutes` stops between cells; `timeout_seconds` is for one cell; `gpu` names the GPU type (default: what CUDA
    reports; for a trace, the type that it represents, default A100-80GB). With the engine "local", `processes` cells run at
    a time (default: one for measuring; for traces one per core, at most four); "ray" and "slurm" use more than one machine,
    and `engine_options` are for them. `history` also stores each run's timelines, in the folder `timelines_folder(shard)`,
    one file named after each row's key. `ranks`: a job of several ranks runs with all of them if there are enough GPUs,
    else as one that represents the others ("auto"); always with all ("real", which traces with gloo on the CPU); or never
    ("one": one rank, or in a pipeline one of each kind of stage); numbers ("0,3") are the ranks to represent, one at a
    time. `progress(cell, done, total)` is called before each cell, `on_row(row)` after a row is on disk.
    Raises: CollectorError for bad options; a failing cell never raises.
    """
    _check_bounds(budget_minutes=budget_minutes, timeout_seconds=timeout_seconds, processes=processes, repeats=repeats)
    if processes is not None:
        check_processes(processes)
    _numbers(ranks)
    run = find_engine(engine)
    jobs = load_grid(grid) if isinstance(grid, (str, Path)) else list(grid)
    gpu = _gpu_type(gpu, trace)
    shared = SharedShard(shard, trace=trace, gpu=gpu)
    cells = _cells(jobs, repeats, ranks, trace)
    summary = Summary(total=len(cells), unreadable=shared.unreadable)
    started = time.monotonic()
    left = deque(cell for cell in cells if cell_identity(*cell) not in shared.done)
    summary.skipped = len(cells) - len(left)

    def questions() -> Iterator[Question]:
        again = len(left)  # from then on cells come up that another collector was at
        asked = 0
        while left:
            if budget_minutes is not None and time.monotonic() - started > budget_minutes * 60:
                summary.left = len(left)
                return
            job, rank, case = cell = left.popleft()
            again -= 1
            if not shared.take(cell_identity(*cell)):
                done = cell_identity(*cell) in shared.done
                summary.skipped += done
                if not done and again >= 0:
                    left.append(cell)
                else:
                    summary.elsewhere += not done
                continue
            if progress:
                progress(job_in_words(job), summary.skipped + asked, len(cells))
            asked += 1
            question = {"job": job_to_mapping(job), "gpu": gpu, "trace": trace, "rank": rank, "case": case}
            yield {**question, "history": history, "ranks": ranks if ranks in RANKS else "one"}

    options = _options(engine, engine_options or {}, processes, trace)
    if left:
        shared.begin()
    try:
        answers = run(questions(), timeout_seconds, work=work, **options)
    except TypeError as error:
        raise CollectorError(
            f"engine_options={options} are not those of engine={engine!r}: {error}.", parameter="engine_options"
        ) from error
    try:
        for question, answer in answers:
            row, reason = _take_in(question, answer, gpu, shard, on_row)
            shared.leave(cell_identity(job_from_mapping(question["job"]), question["rank"], question["case"]))
            summary.count(row, float(answer.get("seconds", 0)), reason)
    finally:
        shared.end()
    summary.seconds = time.monotonic() - started
    return summary


def _check_bounds(**bounds: float | None) -> None:
    """Raises: CollectorError naming the first of `bounds` that is given and not above 0 and finite."""
    for name, value in bounds.items():
        if value is not None and not 0 < value < math.inf:
            raise CollectorError(f"{name}={value} must be above 0 and finite.", parameter=name, value=value)


def _gpu_type(gpu: str | None, trace: bool) -> str | None:
    """The catalog's name of `gpu`; where none is given, what a trace stands for, or None: what CUDA reports."""
    if gpu is None:
        return "A100-80GB" if trace else None
    from peakcast import catalog

    return catalog.gpu(gpu).name


def _cells(jobs: Sequence[TrainingJob], repeats: int, ranks: str, trace: bool) -> list[tuple[TrainingJob, int, str]]:
    """Job, rank and case of every cell; a job that comes again is a repeat."""
    seen = Counter[TrainingJob]()
    cells = []
    for job in [*jobs] * repeats:
        seen[job] += 1
        case = f"repeat {seen[job]}" if seen[job] > 1 else ""
        cells += [(job, rank, case) for rank in ranks_to_run(job, ranks, trace)]
    return cells


def _options(engine: str, given: Mapping[str, Any], processes: int | None, trace: bool) -> dict[str, Any]:
    """An engine's options: those given, and how many cells run at a time."""
    options = dict(given)
    if isinstance(options.get("processes"), int):
        check_processes(options["processes"])
    if engine == "local" and "gpus" not in options:
        options.setdefault("processes", processes or (traces_at_once() if trace else 1))
    if engine == "ray" and trace:
        options.setdefault("num_gpus", 0)
    return options


def _take_in(
    question: Question, answer: Answer, gpu: str | None, shard: Path, on_row: Callable[[Measurement], None] | None
) -> tuple[Measurement, str]:
    """Put the rows of an answer on disk; its first rank's row, and why it failed ("" when it did not)."""
    job = job_from_mapping(question["job"])
    row, reason = _row(answer, job, gpu, question)
    if reason.startswith(NO_GPU):  # no cell of this machine can do better: nothing is recorded
        raise CollectorError(reason)
    for each in [*answer.get("others", ()), answer]:  # the first rank's row last: it says that the cell is done
        of_rank, _ = _row(each, job, gpu, question)
        if question["history"] and of_rank.outcome != "failed":
            of_rank = _with_timelines(of_rank, each, timelines_folder(shard))
        store.append(shard, of_rank)
        if on_row:
            on_row(of_rank)
    return row, reason


def timelines_folder(shard: Path) -> Path:
    """Where the timelines of a shard's rows are: `mine.shard.jsonl` has them in `mine.shard.timelines/`."""
    return shard.with_suffix(".timelines")


def _with_timelines(row: Measurement, answer: Answer, folder: Path) -> Measurement:
    """`row` after its timelines are written to disk; its readings name the file, or say why there is none."""
    said = f"larger than {MAX_PACKED_BYTES:,} bytes"
    if "history" in answer:
        said = f"{row.key}.json.gz"
        replace_file(folder / said, base64.b64decode(answer["history"]))
    readings = {**row.environment.get("readings", {}), "timelines": said}
    return replace(row, environment={**row.environment, "readings": readings})


def traces_at_once() -> int:
    """How many processes with torch fit the cores and the memory of this machine."""
    return min(available_cores(), MOST_TRACES_AT_ONCE)


def _row(answer: Answer, job: TrainingJob, gpu: str | None, question: Question) -> tuple[Measurement, str]:
    """The row of an answer, and why the cell failed ("" when it did not)."""
    reason = str(answer.get("reason", ""))
    if not reason:
        try:
            return replace(from_row(answer["row"]), case=str(question["case"])), ""
        except (ValueError, KeyError, TypeError) as error:
            reason = f"its answer cannot be read: {error}"
    failed = _failed(job, gpu, bool(question["trace"]), reason, int(question["rank"]))
    return replace(failed, case=str(question["case"])), reason


def ranks_to_run(job: TrainingJob, ranks: str, trace: bool) -> tuple[int, ...]:
    """The ranks of a job that are cells of their own; (0,) if one cell runs them all. Raises: CollectorError."""
    numbers, size = _numbers(ranks), job.parallelism.world_size
    if not numbers:
        alone = ranks == "one" or (trace and ranks != "real")
        return ranks_to_trace(job) if alone else (0,)
    if numbers[0] >= size:
        raise CollectorError(
            f"ranks={ranks!r} names no rank of {job_in_words(job)}, which has {size}; they count from 0.",
            parameter="ranks",
            value=ranks,
        )
    return tuple(number for number in numbers if number < size)


def _numbers(ranks: str) -> list[int]:
    """The numbers that `ranks` lists; none if it is a word. Raises: CollectorError for anything else."""
    if ranks in RANKS:
        return []
    try:
        numbers = sorted({int(number) for number in ranks.split(",")})
    except ValueError:
        numbers = [-1]
    if numbers[0] < 0:
        raise CollectorError(
            f"ranks={ranks!r} must be one of {', '.join(RANKS)}, or numbers of ranks such as 0,3.",
            parameter="ranks",
            value=ranks,
        )
    return numbers


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
