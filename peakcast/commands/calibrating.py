"""Calibrations and their accuracy: `fit`, `evaluate`, `report`, `reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from peakcast.commands.application import Datasets, Json, app
from peakcast.commands.option_groups import OptionGroup, takes_groups
from peakcast.core.errors import SpecError

FITTING, DRAWING, RECORDING = ("sklearn", "scipy"), ("matplotlib", "jinja2"), ("mlflow", "pandas")
"""The packages of what these commands do."""
HOLDS_EXIT_CODES = {"holds": 0, "broken": 3, "too few": 4}
"""Result -> exit code of `peakcast evaluate --against`; the worst of its checks counts."""


@dataclass(frozen=True, slots=True)
class TrackingOptions(OptionGroup):
    """Where what a command finds is recorded."""

    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow store; default: mlruns/mlflow.db of the working folder.")
    ] = None
    no_tracking: Annotated[bool, typer.Option("--no-tracking", help="Do not record this in MLflow.")] = False

    def tracker(self, *modules: str) -> Any:
        """The MLflow store, if wanted. Before it is opened, its packages and the command's own `modules` are asked for, so
        that one sentence names everything to install."""
        from peakcast import api
        from peakcast.core.extras import need

        if self.no_tracking:
            return None
        need("this, with its recording in MLflow (which --no-tracking leaves out),", *modules, *RECORDING)
        return api.tracker(self.tracking_uri)


@dataclass(frozen=True, slots=True)
class OwnRowOptions(OptionGroup):
    """A table of one's own measurements, and the calibration that is checked on it."""

    against: Annotated[
        Path | None, typer.Option(help="Check the calibrations on this table of your own measurements instead.")
    ] = None
    calibration: Annotated[Path | None, typer.Option(help="With --against: the calibration file to check.")] = None


@app.command(epilog="Example: peakcast fit --gpu H100-80GB")
@takes_groups
def fit(
    *,
    gpu: Annotated[str | None, typer.Option(help="GPU type whose calibration is fitted.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Fit every GPU type that has rows.")] = False,
    datasets: Datasets = None,
    output: Annotated[Path | None, typer.Option(help="Folder for <gpu>.json; default: where predict looks.")] = None,
    tracking: TrackingOptions,
    json: Json = False,
) -> None:
    """Fit the calibration of a GPU type from its measured rows, and register it in MLflow under the GPU's name."""
    from peakcast import api
    from peakcast.printing import answers as render

    name = _one_or_all(gpu, all_)
    with render.working() as progress:
        tracker = tracking.tracker(*FITTING)
        fitted = api.fit(name, datasets=datasets, output=output, tracker=tracker, progress=progress)
    print(render.json_text(render.fitted_mappings(fitted)) if json else render.fitted_text(fitted))


@app.command(epilog="Example: peakcast evaluate --markdown")
@takes_groups
def evaluate(
    *,
    gpu: Annotated[str | None, typer.Option(help="Show this GPU type only.")] = None,
    datasets: Datasets = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    write_readme: Annotated[Path | None, typer.Option(help="Also put the table between the markers of this file.")] = None,
    new_hardware: Annotated[bool, typer.Option(help="Also show how the error falls with rows of a new GPU type.")] = False,
    own_rows: OwnRowOptions,
    tracking: TrackingOptions,
    json: Json = False,
) -> None:
    """Judge the predictor on what it was not fitted on, print the accuracy table, and record it in MLflow.

    With --against it says whether the calibrations still hold on rows of your own, and exits with 0 when they do, 3 when
    not, 4 when the rows are too few to tell.
    """
    from peakcast import api
    from peakcast.printing import answers as render

    if own_rows.against is not None:
        checked = api.check(own_rows.against, gpu, calibration=own_rows.calibration)
        print(render.json_text(render.checked_mapping(checked)) if json else render.checked_text(checked))
        raise typer.Exit(max((HOLDS_EXIT_CODES[found.verdict] for found in checked.checks), key=(0, 4, 3).index))
    if own_rows.calibration is not None:
        raise SpecError("--calibration is the file that --against checks; give --against too.", parameter="calibration")
    with render.working() as progress:
        evaluation = api.evaluate(
            gpu,
            datasets=datasets,
            new_hardware=new_hardware,
            tracker=tracking.tracker(*FITTING, *DRAWING),
            progress=progress,
        )
    _print_evaluation(evaluation, gpu, markdown=markdown, json=json)
    if write_readme is not None:
        from peakcast.reports.readme import write_table

        write_table(evaluation, write_readme)


@app.command(epilog="Example: peakcast report --gpu H100-80GB")
def report(
    gpu: Annotated[str | None, typer.Option(help="GPU type of the report.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Write the report of every GPU type that has rows.")] = False,
    datasets: Datasets = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the reports; default: the checkout's reports/.")] = None,
    json: Json = False,
) -> None:
    """Write the accuracy report of a GPU type: a self-contained HTML page, Markdown and CSV."""
    from peakcast import api
    from peakcast.printing import answers as render

    with render.working() as progress:
        written = api.report(_one_or_all(gpu, all_), datasets=datasets, output=output, progress=progress)
    print(render.json_text([str(path) for path in written]) if json else "\n".join(str(path) for path in written))


@app.command(epilog="Example: peakcast reproduce")
@takes_groups
def reproduce(
    *,
    datasets: Datasets = None,
    output: Annotated[Path | None, typer.Option(help="Folder for all results; default: their usual places.")] = None,
    tracking: TrackingOptions,
    json: Json = False,
) -> None:
    """Do everything that is published here, from the measured rows: fit, evaluate on what was held out, write reports."""
    from peakcast import api
    from peakcast.printing import answers as render

    with render.working() as progress:
        tracker = tracking.tracker(*FITTING, *DRAWING)
        fitted, evaluation, written = api.reproduce(datasets=datasets, output=output, tracker=tracker, progress=progress)
    if json:
        found = {"fitted": render.fitted_mappings(fitted), "evaluation": evaluation.to_mapping()}
        print(render.json_text({**found, "reports": [str(path) for path in written]}))
        return
    print(render.fitted_text(fitted) + "\n")
    _print_evaluation(evaluation, None)
    print("\nReports: " + str(written[-1]))


def _one_or_all(gpu: str | None, all_: bool) -> str | None:
    if (gpu is None) == (not all_):
        raise SpecError("give either --gpu with a GPU type, or --all.", parameter="gpu", value=gpu)
    return gpu


def _print_evaluation(evaluation: Any, gpu: str | None, *, markdown: bool = False, json: bool = False) -> None:
    from peakcast.printing import answers as render
    from peakcast.reports.tables import headline_markdown

    if json:
        print(render.json_text(evaluation.to_mapping()))
    elif markdown:
        print(headline_markdown(evaluation, gpu), end="")
    else:
        render.print_evaluation(evaluation, gpu)
