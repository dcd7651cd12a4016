"""Rows, measured, traced or published: `collect` (which also reads constants), `verify`, `import-published`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peakcast.commands.application import Json, Processes, app
from peakcast.commands.option_groups import OptionGroup, takes_groups
from peakcast.core.errors import SpecError

if TYPE_CHECKING:
    from peakcast.collectors.measure.settings import CollectSettings

NOTHING_MEASURED = 1
"""Exit code of `peakcast collect` if every cell that it started failed."""

CONSTANTS = "constants"
"""In place of a grid: read memory outside of tensors instead. A grid file with this name can be given as ./constants."""
OF_CONSTANTS = {"context", "grid", "gpu", "timeout_seconds", "json"}
"""Arguments that are allowed in this case."""

DISAGREES = 1
"""Exit code of `peakcast verify` if ledger and trace differ."""


@dataclass(frozen=True, slots=True)
class CellOptions(OptionGroup):
    """How the cells of a grid are run: `CollectSettings` as options."""

    budget_minutes: Annotated[float | None, typer.Option(help="Start no cell after this long.")] = None
    trace: Annotated[bool, typer.Option("--trace", help="Trace on fake tensors; needs no GPU.")] = False
    timeout_seconds: Annotated[float, typer.Option(help="Most time that one cell may take.")] = 600
    gpu: Annotated[str | None, typer.Option(help="GPU type to trace for, or of this GPU, if its name is unknown.")] = None
    processes: Processes = None
    engine: Annotated[str, typer.Option(help="Where cells run: local, ray or slurm.")] = "local"
    engine_options: Annotated[
        list[str] | None, typer.Option("--engine-set", help="An option of the engine: --engine-set slurm_partition=gpu")
    ] = None
    history: Annotated[bool, typer.Option("--history", help="Keep the allocator's history of each run.")] = False
    ranks: Annotated[
        str, typer.Option(help="Ranks of a job to run: auto (all if there are GPUs enough, else one), real, one, or 0,3.")
    ] = "auto"
    repeats: Annotated[int, typer.Option(min=1, help="Run each cell this often, to see the noise between runs.")] = 1

    def settings(self) -> CollectSettings:
        """The settings that these options state. Raises: CollectorError."""
        from peakcast.collectors.measure.settings import CollectSettings

        return CollectSettings(**{**asdict(self), "engine_options": _options(self.engine_options or [])})


@app.command(epilog="Example: peakcast collect my-grid.yaml --budget-minutes 25")
@takes_groups
def collect(
    context: typer.Context,
    *,
    grid: Annotated[str, typer.Argument(help="A grid file, the name of a shipped grid, or: constants.")],
    shard: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to.")] = Path("peakcast.shard.jsonl"),
    runs: CellOptions,
    select: Annotated[str, typer.Option(help="Order of the cells: grid, or informative, which tells most first.")] = "grid",
    plot: Annotated[Path | None, typer.Option(help="Draw measured against predicted to this .png or .svg.")] = None,
    json: Json = False,
) -> None:
    """Measure the cells of GRID that SHARD does not have yet, each in its own process; interrupt and resume at will.

    `peakcast collect constants` measures instead, in seconds, the memory of this GPU that no tensor takes: CUDA context,
    libraries, NCCL. Predictions for that GPU type then use it.
    """
    from peakcast import api
    from peakcast.printing import answers as render

    if grid == CONSTANTS:
        _refuse_all_but(context, OF_CONSTANTS)
        read = api.collect_constants(runs.gpu, timeout_seconds=runs.timeout_seconds)
        print(render.json_text(render.constants_mapping(read)) if json else render.constants_text(read))
        return
    settings = runs.settings()
    with render.working() as progress:
        summary = api.collect(grid, shard, settings, select=select, plot=plot, progress=progress)
    print(render.json_text(summary) if json else render.summary_text(summary, shard))
    raise typer.Exit(NOTHING_MEASURED if summary.failed and not summary.finished + summary.out_of_memory else 0)


@app.command(epilog="Example: peakcast verify agreement-sample")
def verify(
    grid: Annotated[str, typer.Argument(help="A grid file, or the name of a shipped grid.")] = "agreement",
    shard: Annotated[Path, typer.Option(help="JSON-lines file that traces are kept in.")] = Path("agreement.shard.jsonl"),
    output: Annotated[Path | None, typer.Option(help="Also write ledger.md, with every cell, to this folder.")] = None,
    processes: Processes = None,
    json: Json = False,
) -> None:
    """Trace the real training step of every cell of GRID on fake tensors, and compare the analytical ledger with it.

    Needs no GPU. Exits with 1 when a cell is further off than 0.1 % in some phase (0.5 % in parallel layouts).
    """
    from peakcast import api
    from peakcast.printing import answers as render
    from peakcast.reports.agreement import agreement_text

    with render.working() as progress:
        cells = api.verify(grid, shard, output=output, processes=processes, progress=progress)
    print(render.json_text([cell.to_mapping() for cell in cells]) if json else agreement_text(cells))
    raise typer.Exit(0 if all(cell.holds for cell in cells) else DISAGREES)


@app.command(name="import-published", epilog="Example: peakcast import-published")
def import_published(
    sources: Annotated[Path | None, typer.Option(help="Folder of the source files; default: the shipped ones.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the tables; default: datasets/published.")] = None,
    json: Json = False,
) -> None:
    """Import what others published into tables, one per source file; the same sources give the same bytes."""
    from peakcast import api
    from peakcast.printing import answers as render

    counts = api.import_published(sources, output)
    print(render.json_text(counts) if json else "\n".join(f"{gpu}: {rows} rows" for gpu, rows in counts.items()))


def _refuse_all_but(context: typer.Context, allowed: set[str]) -> None:
    for name in set(context.params) - allowed:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--engine-set" if name == "engine_options" else f"--{name.replace('_', '-')}"
            raise SpecError(f"{flag} is for the cells of a grid; leave it out to collect constants.", parameter=name)


def _options(texts: list[str]) -> dict[str, Any]:
    from peakcast.core.bounded import yaml_value

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise SpecError(f"--engine-set {text!r} must be NAME=VALUE, such as num_gpus=1.", parameter="engine-set")
        try:
            found[name] = yaml_value(value)
        except ValueError as error:
            raise SpecError(f"--engine-set {text!r} has no valid value: {error}.", parameter="engine-set") from error
    return found
