"""Runs the cells of a grid, each in a process of its own; each finished row is on disk before another cell starts in its
place.

A cell that hangs is killed with its whole process group. A cell that fails becomes a row that says why. Cells that the
shard already has are skipped, so a collection can be stopped at any time and continued later. An engine decides where cells
run.
"""

from __future__ import annotations

import base64
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peakcast import __version__
from peakcast.collectors.measure.grid import load_grid
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.collectors.measure.sharing import SharedShard, cell_identity
from peakcast.collectors.processes.engines import WORK, CellAnswer, CellQuestion, find_engine
from peakcast.core.durable import replace_file
from peakcast.core.errors import NO_GPU, CollectorError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.ranks import ranks_to_trace
from peakcast.jobs.spec import TrainingJob, job_in_words, job_to_mapping
from peakcast.measurements import store
from peakcast.measurements.records import Measurement
from peakcast.measurements.rows import from_row
from peakcast.timelines.files import MAX_PACKED_BYTES

UNKNOWN_GPU = "unknown"
CellProgress = Callable[[str, int, int], None]
Cell = tuple[TrainingJob, int, str]
"""Job, rank and case of one run."""


@dataclass
class CollectionSummary:
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
    settings: CollectSettings,
    *,
    progress: CellProgress | None = None,
    on_row: Callable[[Measurement], None] | None = None,
    work: str = WORK,
) -> CollectionSummary:
    """Measure or trace the jobs of `grid` that `shard` does not have; rows are appended to `shard` as they come. A job that
    is in `grid` twice, or every job if `settings.repeats` is above 1, is measured again as a repeat (`case: repeat 2`).
    Timelines, if `settings.history` asks for them, are files in `timelines_folder(shard)`, named after rows' keys.

    `progress(cell, done, total)` is called before each cell, `on_row(row)` after a row is on disk.
    Raises: CollectorError for options that the engine does not know; a failing cell never raises.
    """
    jobs = load_grid(grid) if isinstance(grid, (str, Path)) else list(grid)
    started = time.monotonic()
    cells = _Cells(_cells(jobs, settings), shard, settings, progress)
    try:
        cells.begin()
        for question, answer in _answers(cells, settings, work):
            row, reason = _take_in(question, answer, settings.gpu_type, shard, on_row)
            cells.leave(question)
            cells.summary.count(row, float(answer.get("seconds", 0)), reason)
    finally:
        cells.end()
    cells.summary.seconds = time.monotonic() - started
    return cells.summary


class _Cells:
    """The cells of a collection: gives out those that are left, one at a time, and counts their results."""

    def __init__(
        self, cells: Sequence[Cell], shard: Path, settings: CollectSettings, progress: CellProgress | None
    ) -> None:
        self._settings, self._progress = settings, progress
        self._gpu = settings.gpu_type
        self._shared = SharedShard(shard, trace=settings.trace, gpu=self._gpu)
        self._left = deque(cell for cell in cells if cell_identity(*cell) not in self._shared.done)
        self._started = time.monotonic()
        skipped = len(cells) - len(self._left)
        self.summary = CollectionSummary(total=len(cells), unreadable=self._shared.unreadable, skipped=skipped)

    def begin(self) -> None:
        """Make sure that rows can be written. Raises: RecordError."""
        if self._left:
            self._shared.begin()

    def questions(self) -> Iterator[CellQuestion]:
        """The questions of the cells that no other collector of the shard runs or has finished, until time is up. A cell
        that another was running is tried a second time after all others."""
        first_tries, asked = len(self._left), 0
        while self._left:
            if self._out_of_time():
                self.summary.left = len(self._left)
                return
            cell = self._left.popleft()
            first_tries -= 1
            if self._shared.take(cell_identity(*cell)):
                if self._progress:
                    self._progress(job_in_words(cell[0]), self.summary.skipped + asked, self.summary.total)
                asked += 1
                yield self._question(cell)
            elif cell_identity(*cell) in self._shared.done:
                self.summary.skipped += 1
            elif first_tries >= 0:
                self._left.append(cell)
            else:
                self.summary.elsewhere += 1

    def _out_of_time(self) -> bool:
        budget = self._settings.budget_minutes
        return budget is not None and time.monotonic() - self._started > budget * 60

    def _question(self, cell: Cell) -> CellQuestion:
        (job, rank, case), asked = cell, self._settings
        ranks = "one" if asked.numbers_of_ranks() else asked.ranks
        question = {"job": job_to_mapping(job), "gpu": self._gpu, "trace": asked.trace, "rank": rank, "case": case}
        return {**question, "history": asked.history, "ranks": ranks}

    def leave(self, question: CellQuestion) -> None:
        """Mark the cell of `question` as done, now that its rows are on disk."""
        self._shared.leave(cell_identity(job_from_mapping(question["job"]), question["rank"], question["case"]))

    def end(self) -> None:
        """End the use of the shard: no further cell will run."""
        self._shared.end()


def _answers(cells: _Cells, settings: CollectSettings, work: str) -> Iterator[tuple[CellQuestion, CellAnswer]]:
    """The engine's answers to the questions of `cells`. Raises: CollectorError for options that it does not know."""
    options = settings.options_of_engine()
    try:
        return find_engine(settings.engine)(cells.questions(), settings.timeout_seconds, work=work, **options)
    except TypeError as error:
        raise CollectorError(
            f"engine_options={options} are not those of engine={settings.engine!r}: {error}.", parameter="engine_options"
        ) from error


def _cells(jobs: Sequence[TrainingJob], settings: CollectSettings) -> list[Cell]:
    """Every cell; a job that comes again is a repeat."""
    seen = Counter[TrainingJob]()
    cells = []
    for job in [*jobs] * settings.repeats:
        seen[job] += 1
        case = f"repeat {seen[job]}" if seen[job] > 1 else ""
        cells += [(job, rank, case) for rank in ranks_to_run(job, settings)]
    return cells


def _take_in(
    question: CellQuestion, answer: CellAnswer, gpu: str | None, shard: Path, on_row: Callable[[Measurement], None] | None
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


def _with_timelines(row: Measurement, answer: CellAnswer, folder: Path) -> Measurement:
    """`row` after its timelines are written to disk; its readings name the file, or say why there is none."""
    said = f"larger than {MAX_PACKED_BYTES:,} bytes"
    if "history" in answer:
        said = f"{row.key}.json.gz"
        replace_file(folder / said, base64.b64decode(answer["history"]))
    readings = {**row.environment.get("readings", {}), "timelines": said}
    return replace(row, environment={**row.environment, "readings": readings})


def _row(answer: CellAnswer, job: TrainingJob, gpu: str | None, question: CellQuestion) -> tuple[Measurement, str]:
    """The row of an answer, and why the cell failed ("" when it did not)."""
    reason = str(answer.get("reason", ""))
    if not reason:
        try:
            return replace(from_row(answer["row"]), case=str(question["case"])), ""
        except (ValueError, KeyError, TypeError) as error:
            reason = f"its answer cannot be read: {error}"
    failed = _failed(job, gpu, bool(question["trace"]), reason, int(question["rank"]))
    return replace(failed, case=str(question["case"])), reason


def ranks_to_run(job: TrainingJob, settings: CollectSettings) -> tuple[int, ...]:
    """The ranks of a job that are cells of their own; (0,) if one cell runs them all. Raises: CollectorError."""
    numbers, size = settings.numbers_of_ranks(), job.parallelism.world_size
    if not numbers:
        alone = settings.ranks == "one" or (settings.trace and settings.ranks != "real")
        return ranks_to_trace(job) if alone else (0,)
    if numbers[0] >= size:
        raise CollectorError(
            f"ranks={settings.ranks!r} names no rank of {job_in_words(job)}, which has {size}; they count from 0.",
            parameter="ranks",
            value=settings.ranks,
        )
    return tuple(number for number in numbers if number < size)


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
