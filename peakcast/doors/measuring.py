"""Rows: the implementation of `collect`, which measures or traces them; `verify`, which compares the ledger with traces;
`import_published`, which imports measurements of others; and `collect_constants`, which reads memory outside of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from peakcast.core.errors import SpecError
from peakcast.core.extras import need

if TYPE_CHECKING:
    from peakcast.collectors.measure.constants import MeasuredConstants
    from peakcast.collectors.measure.runner import CollectionSummary
    from peakcast.collectors.measure.settings import CollectSettings
    from peakcast.jobs.spec import TrainingJob
    from peakcast.models.baseline.agreement import Agreement
    from peakcast.searching.search_settings import Progress

SELECTIONS = ("grid", "informative")
UNNAMED_GPU = "A100-80GB"
"""The GPU type on which cells are compared if none is named; only their order depends on it."""


def collect(
    grid: str | Path | Iterable[TrainingJob],
    shard: Path,
    settings: CollectSettings | None = None,
    *,
    select: str = "grid",
    plot: Path | None = None,
    progress: Progress | None = None,
) -> CollectionSummary:
    """Measure the cells of `grid` that `shard` does not have yet, each in a process of its own. Returns a summary.

    `settings`: how cells are run (`peakcast.collectors.measure.settings.CollectSettings`); None: measured here, one by one.
    `select`: "grid" runs cells in the grid's order, "informative" first those that tell most about the others, given the
    tables in `datasets/` and `shard`. `plot`: a picture (.png or .svg) of measured against predicted, drawn again as rows
    come.
    """
    from peakcast.collectors.measure.settings import CollectSettings

    chosen = settings or CollectSettings()
    if chosen.engine == "local":  # other engines run cells on machines with packages of their own
        need("a trace" if chosen.trace else "measuring", "torch")
    from peakcast.collectors.measure.runner import collect as run
    from peakcast.doors.collected import Collected, telling_time

    collected, told = Collected(plot), telling_time(progress) if progress else None
    summary = run(_selected(grid, shard, chosen.gpu, select), shard, chosen, progress=told, on_row=collected.add)
    collected.finish()
    summary.errors = collected.table()
    return summary


def collect_constants(gpu: str | None = None, *, timeout_seconds: float = 600) -> MeasuredConstants:
    """Read what this machine's GPU holds outside PyTorch's allocator, and store it in the user's own file for the GPU type.
    Predictions for that type then use it (`peakcast.catalog.constants`).

    `gpu`: the type's name, if CUDA's name is not in the catalog. `timeout_seconds`: for each of the two programs that read.
    Raises: CollectorError if nothing can be read, RecordError if the file cannot be written.
    """
    from dataclasses import replace

    from peakcast import catalog
    from peakcast.catalog.constants import save_constants
    from peakcast.collectors.measure.constants import read_constants

    if not 0 < timeout_seconds < math.inf:
        raise SpecError(
            f"timeout_seconds={timeout_seconds} must be above 0 and finite.",
            parameter="timeout_seconds",
            value=timeout_seconds,
        )
    read = read_constants(catalog.gpu(gpu).name if gpu is not None else None, timeout_seconds)
    return replace(read, constants=replace(read.constants, path=str(save_constants(read.constants))))


def _selected(
    grid: str | Path | Iterable[TrainingJob], shard: Path, gpu: str | None, select: str
) -> str | Path | Iterable[TrainingJob]:
    if select not in SELECTIONS:
        raise SpecError(f"select={select!r} must be one of {', '.join(SELECTIONS)}.", parameter="select", value=select)
    if select == "grid":
        return grid
    from peakcast import catalog
    from peakcast.collectors.measure.grid import load_grid
    from peakcast.measurements.store import load, read_shard
    from peakcast.models.calibration.samples import prepare
    from peakcast.models.evaluation.selection import most_informative, point, point_of

    jobs = load_grid(grid) if isinstance(grid, (str, Path)) else list(grid)
    rows = [*load(None), *read_shard(shard)[0]]
    device = catalog.gpu(gpu or UNNAMED_GPU)
    measured = [point_of(sample) for sample in prepare(rows).samples]
    return [jobs[index] for index in most_informative([point(job, device) for job in jobs], measured)]


def verify(
    grid: str | Path,
    shard: Path,
    *,
    output: Path | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[Agreement]:
    """Trace the cells of `grid` that `shard` does not have yet, and compare the ledger with every trace, in the grid's
    order. Recipes that the cells need are recorded first.

    `output`: a folder for ledger.md, a page with every cell. Needs torch and the stacks of the grid, but no GPU.
    Raises: MissingPackageError, CollectorError for a bad grid, RecordError when a file cannot be written.
    """
    need("a trace", "torch")
    from peakcast.collectors.measure.grid import load_grid
    from peakcast.collectors.measure.runner import collect as run
    from peakcast.collectors.measure.settings import CollectSettings, traces_at_once
    from peakcast.collectors.measure.sharing import cell_identity
    from peakcast.core.workers import check_processes
    from peakcast.doors.collected import telling_time
    from peakcast.doors.recording import ensure_recipes
    from peakcast.jobs.ranks import ranks_to_trace
    from peakcast.measurements.store import read_shard
    from peakcast.models.baseline.agreement import agreements

    jobs = load_grid(grid)
    shown = telling_time(progress) if progress else None
    ensure_recipes(jobs, check_processes(processes) if processes is not None else traces_at_once(), shown)
    settings = CollectSettings(trace=True, processes=processes)
    run(jobs, shard, settings, progress=telling_time(progress) if progress else None)
    rows = {cell_identity(row.job, row.rank): row for row in read_shard(shard)[0] if row.provenance == "traced"}
    names = (cell_identity(job, rank) for job in jobs for rank in ranks_to_trace(job))
    cells = agreements(rows[name] for name in names if name in rows)
    if output is not None:
        from peakcast.core.durable import replace_file
        from peakcast.reports.agreement import agreement_markdown

        replace_file(output / "ledger.md", agreement_markdown(cells, Path(grid).stem).encode())
    return cells


def import_published(sources: Path | None = None, output: Path | None = None) -> dict[str, int]:
    """Write tables of what others published, from the files in `sources`, to `output`. Returns the number of rows by GPU
    type.

    Raises: RecordError when a source is missing or damaged, or `output` cannot be written.
    """
    from collections import Counter

    from peakcast.collectors.published.__main__ import import_published as run
    from peakcast.measurements.store import SOURCES_FOLDER, datasets_folder

    published = datasets_folder() / "published"
    rows = run(sources or published / SOURCES_FOLDER, output or published)
    return dict(sorted(Counter(row.gpu for row in rows).items()))
