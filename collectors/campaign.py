"""Half an hour on a GPU, spent on the most informative measurements: `python -P -m peakcast.collectors.campaign FOLDER`.

The same command continues where the last one stopped, so that three of them fill half an hour in short sessions. In this
order it measures: what each library takes when it is first used (`first_uses.json`); timelines through PyTorch's own
allocator (`replays.json`, for those that a rehearsal with `--trace` has left in FOLDER); the anchors, with the allocator's
history; the other grids, interleaved, each with its share of the time; and repeats. Rows are in `campaign.shard.jsonl` in
FOLDER. `--trace` rehearses without a GPU: every cell that can be traced is traced. It imports only the collectors, so it
needs nothing but torch and the stacks.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from peakcast.collectors.measure.grid import load_grid
from peakcast.collectors.measure.runner import CollectionSummary, collect, timelines_folder
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.collectors.measure.sharing import cell_identity
from peakcast.collectors.processes.engines import WORK
from peakcast.core.errors import PeakcastError
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements import store

ANCHORS = "campaign-anchors"
GRIDS = ("campaign-breadth", "campaign-layouts", "campaign-variants", "campaign-limits")
"""Grids whose cells are interleaved in proportion to their lengths: whenever the time is up, the same share of each has
been measured."""
NUM_REPEATS = 10
"""How many cells are measured a second time, to learn the noise: the first cells of the first grid, most distinct first."""
MINUTES = 8.5
CELL_SECONDS = 80
"""Time limit of a cell. With what runs before it, it stays below ten minutes, so that a session of that length never ends
within a cell."""
STEP_SECONDS = 150
"""Time limit of each program that runs before the first cell."""
TRACES, ROWS = "traces.shard.jsonl", "campaign.shard.jsonl"


def jobs_in_order(grids: Sequence[str] = GRIDS, num_repeats: int = NUM_REPEATS) -> list[TrainingJob]:
    """The jobs of all grids but the anchors, interleaved by how far each grid has come, and then the repeats."""
    cells = [load_grid(grid) for grid in grids]
    placed = [((place + 0.5) / len(jobs), which, job) for which, jobs in enumerate(cells) for place, job in enumerate(jobs)]
    ordered = [job for _, _, job in sorted(placed, key=lambda each: each[:2])]
    distinct = list(dict.fromkeys(ordered))
    return [*distinct, *cells[0][:num_repeats]]


def run(
    folder: Path, minutes: float = MINUTES, *, trace: bool = False, processes: int | None = None, work: str = WORK
) -> list[CollectionSummary]:
    """Continue the campaign in `folder` for `minutes`. Returns the summaries of the anchors and of the other grids."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    shard = folder / (TRACES if trace else ROWS)
    if not trace:
        timelines = timelines_folder(folder / TRACES)
        _once(folder / "first_uses.json", "peakcast.collectors.measure.first_uses")
        if timelines.is_dir():
            _once(folder / "replays.json", "peakcast.collectors.measure.replaying", str(timelines))
    done = []
    for jobs, history in ((load_grid(ANCHORS), True), (jobs_in_order(), False)):
        left = minutes - (time.monotonic() - started) / 60
        if left <= 0:
            break
        done.append(
            collect(
                failed_last(jobs, shard),
                shard,
                CollectSettings(
                    budget_minutes=left,
                    timeout_seconds=CELL_SECONDS,
                    trace=trace,
                    history=history,
                    ranks="one",
                    processes=processes,
                ),
                progress=_tell,
                work=work,
            )
        )
    return done


def failed_last(jobs: Sequence[TrainingJob], shard: Path) -> list[TrainingJob]:
    """`jobs`, with those that failed before moved to the end: they are tried again only when the others are done."""
    rows = store.read_shard(shard)[0] if shard.exists() else []
    failed = {cell_identity(row.job) for row in rows if row.outcome == "failed"}
    return sorted(jobs, key=lambda job: cell_identity(job) in failed)


def _once(file: Path, module: str, *arguments: str) -> None:
    """Run a program that writes `file`, unless the file exists. If it fails or hangs, the campaign goes on without it."""
    if file.exists():
        return
    command = [sys.executable, "-P", "-m", module, *arguments, str(file)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=STEP_SECONDS, check=False)
        said = ended.stderr.strip().splitlines()[-1:] if ended.returncode else ["done"]
    except subprocess.TimeoutExpired:
        said = [f"no answer within {STEP_SECONDS} s"]
    print(f"{file.name}: {' '.join(said)}", flush=True)


def _tell(cell: str, done: int, total: int) -> None:
    print(f"{done + 1} of {total}: {cell}", flush=True)


def main(arguments: list[str]) -> int:
    """Print a line per cell with its result. Returns exit code 1 if nothing that was tried succeeded."""
    parser = argparse.ArgumentParser(prog="python -P -m peakcast.collectors.campaign", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where rows and readings are, and what the last run left")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="start no cell after this long")
    parser.add_argument("--trace", action="store_true", help="rehearse on fake tensors; needs no GPU")
    parser.add_argument("--processes", type=int, help="traces at a time")
    asked = parser.parse_args(arguments)
    summaries = run(asked.folder, asked.minutes, trace=asked.trace, processes=asked.processes)
    for what, summary in zip(("anchors", "the rest"), summaries, strict=False):
        print(
            f"{what}: {summary.finished} finished, {summary.out_of_memory} out of memory, {summary.failed} failed, "
            f"{summary.skipped} there already, {summary.left} left of {summary.total}"
        )
    for reason in itertools.chain.from_iterable(summary.reasons for summary in summaries):
        print(f"  {reason}")
    tried = sum(each.finished + each.out_of_memory + each.failed for each in summaries)
    return int(tried > 0 and sum(each.failed for each in summaries) == tried)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PeakcastError as error:
        sys.exit(f"peakcast: {error}")
