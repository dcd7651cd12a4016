"""The command line: each command parses, calls the function of `peakcast.api` of the same name, and prints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from peakcast.errors import PeakcastError, SpecError
from peakcast.job_flags import AskedJob, complete_gpu, takes_job

FITS_EXIT_CODES = {"yes": 0, "no": 3, "uncertain": 4}
"""What `peakcast predict` exits with; 2 is a question that cannot be answered."""
HOLDS_EXIT_CODES = {"holds": 0, "broken": 3, "too few": 4}
"""What `peakcast evaluate --against` exits with, the worst of its checks."""
NOTHING_MEASURED = 1
"""What `peakcast collect` exits with when every cell that it started failed."""

DISAGREES = 1
"""What `peakcast verify` exits with when ledger and trace differ."""

app = typer.Typer(
    name="peakcast",
    help="Predicts the peak GPU memory of LLM training, with error bars that hold.",
    epilog="Example: peakcast predict --model llama-3.1-8b --gpu H100-80GB",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Gpu = Annotated[str | None, typer.Option(help="GPU type, such as H100-80GB.", autocompletion=complete_gpu)]
Datasets = Annotated[Path | None, typer.Option(help="Folder of measured tables; default: the checkout's datasets/.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Cells at a time; default: one, or a trace for each core.")]
TrackingUri = Annotated[str | None, typer.Option(help="MLflow store; default: mlruns/mlflow.db of the working folder.")]
NoTracking = Annotated[bool, typer.Option("--no-tracking", help="Do not record this in MLflow.")]


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from peakcast import __version__

        print(f"peakcast {__version__}")
        raise typer.Exit


@app.command(epilog="Example: peakcast predict --model llama-3.1-8b --method lora --lora-rank 16 --gpu A100-80GB")
@takes_job
def predict(
    asked: AskedJob,
    gpu: Gpu = None,
    rank: Annotated[str, typer.Option(help="worst, last, or a number.")] = "worst",
    batch: Annotated[Path | None, typer.Option(help="Questions, one JSON object a line ('-': standard input).")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that share a batch; default: all cores for a long file.")
    ] = None,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Add a line for every distinct rank.")] = False,
    calibration: Annotated[Path | None, typer.Option(help="A calibration file instead of the shipped one.")] = None,
    print_job: Annotated[bool, typer.Option("--print-job", help="Print the job with every default, ask nothing.")] = False,
    json: Json = False,
) -> None:
    """Predict the peak memory of one rank of JOB, with error bars, and whether it fits.

    Exits with 0 when it fits, 3 when not, 4 when that is uncertain, 2 when the question cannot be answered.
    """
    from peakcast import api, render

    if batch is not None:
        if asked.given:
            raise SpecError("--batch asks the questions of its file; give no JOB and no job flags beside it.")
        for answer in api.predict_batch(*render.batch_of(batch, processes)):
            print(render.json_line(answer), flush=str(batch) == "-")
        return
    _answer(asked.read(), gpu, rank, calibration, print_job=print_job, json=json, all_ranks=all_ranks)


@app.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: peakcast megatron --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--micro-batch-size 1 --bf16 --tensor-model-parallel-size 4 --num-gpus 8 --gpu H100-80GB",
)
def megatron(
    arguments: Annotated[list[str] | None, typer.Argument(help="Megatron-LM's own flags, as for pretrain_gpt.py.")] = None,
    gpu: Gpu = None,
    num_gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of the whole run; default: WORLD_SIZE.")] = None,
    rank: Annotated[str, typer.Option(help="worst, last, or a number.")] = "worst",
    calibration: Annotated[Path | None, typer.Option(help="A calibration file instead of the shipped one.")] = None,
    print_job: Annotated[bool, typer.Option("--print-job", help="Print the job with every default, ask nothing.")] = False,
    json: Json = False,
) -> None:
    """Predict the peak memory of a Megatron-LM run: put `peakcast megatron` in the place of `pretrain_gpt.py`."""
    from peakcast.dialects.recognise import from_arguments

    asked = from_arguments(arguments or [], os.environ, num_gpus)
    _answer(asked, gpu, rank, calibration, print_job=print_job, json=json)


@app.command(epilog="Example: peakcast explain --model llama-3.1-8b --gpu H100-80GB --picture step.png")
@takes_job
def explain(
    asked: AskedJob,
    gpu: Gpu = None,
    rank: Annotated[str, typer.Option(help="worst, last, or a number.")] = "worst",
    against: Annotated[str | None, typer.Option(help="Compare with: a job file, a catalog name, or FIELD=VALUE.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show every layer, and the shape of every parameter.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw the timeline to this .png or .svg file.")] = None,
    snapshot: Annotated[Path | None, typer.Option(help="Also write it for PyTorch's memory viewer (a pickle).")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Run the real library on fake tensors, without a GPU.")] = False,
    module: Annotated[str | None, typer.Option(help="Trace FILE.py:FUNCTION, which returns (model, step).")] = None,
    json: Json = False,
) -> None:
    """Explain the memory of one rank of JOB: why the peak is where it is, layer by layer, and what would lower it."""
    from peakcast import api, render
    from peakcast.explaining.text import explanation_text

    if module is not None and asked.given:
        raise SpecError("--module traces your own step; give no JOB and no job flags beside it.", parameter="module")
    found = api.explain(
        asked.read() if module is None else None,
        gpu,
        rank,
        against=asked.other(against),
        trace=trace,
        module=module,
        picture=picture,
        snapshot=snapshot,
    )
    print(render.json_text(found.to_mapping()) if json else explanation_text(found, layers=layers))


@app.command(epilog="Example: peakcast fit --gpu H100-80GB")
def fit(
    gpu: Annotated[str | None, typer.Option(help="GPU type whose calibration is fitted.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Fit every GPU type that has rows.")] = False,
    datasets: Datasets = None,
    output: Annotated[Path | None, typer.Option(help="Folder for <gpu>.json; default: where predict looks.")] = None,
    tracking_uri: TrackingUri = None,
    no_tracking: NoTracking = False,
    json: Json = False,
) -> None:
    """Fit the calibration of a GPU type from its measured rows, and register it in MLflow under the GPU's name."""
    from peakcast import api, render

    name = _one_or_all(gpu, all_)
    with render.working() as progress:
        fitted = api.fit(
            name, datasets=datasets, output=output, tracker=_tracker(tracking_uri, no_tracking), progress=progress
        )
    print(render.json_text(render.fitted_mappings(fitted)) if json else render.fitted_text(fitted))


@app.command(epilog="Example: peakcast evaluate --markdown")
def evaluate(
    gpu: Annotated[str | None, typer.Option(help="Show this GPU type only.")] = None,
    datasets: Datasets = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    write_readme: Annotated[Path | None, typer.Option(help="Also put the table between the markers of this file.")] = None,
    new_hardware: Annotated[bool, typer.Option(help="Also show how the error falls with rows of a new GPU type.")] = False,
    against: Annotated[
        Path | None, typer.Option(help="Check the calibrations on this table of your own measurements instead.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="With --against: the calibration file to check.")] = None,
    tracking_uri: TrackingUri = None,
    no_tracking: NoTracking = False,
    json: Json = False,
) -> None:
    """Judge the predictor on what it was not fitted on, print the accuracy table, and record it in MLflow.

    With --against it says whether the calibrations still hold on rows of your own, and exits with 0 when they do, 3 when
    not, 4 when the rows are too few to tell.
    """
    from peakcast import api, render

    if against is not None:
        checked = api.check(against, gpu, calibration=calibration)
        print(render.json_text(render.checked_mapping(checked)) if json else render.checked_text(checked))
        raise typer.Exit(max((HOLDS_EXIT_CODES[found.verdict] for found in checked.checks), key=(0, 4, 3).index))
    if calibration is not None:
        raise SpecError("--calibration is the file that --against checks; give --against too.", parameter="calibration")
    with render.working() as progress:
        evaluation = api.evaluate(
            gpu,
            datasets=datasets,
            new_hardware=new_hardware,
            tracker=_tracker(tracking_uri, no_tracking),
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
    from peakcast import api, render

    with render.working() as progress:
        written = api.report(_one_or_all(gpu, all_), datasets=datasets, output=output, progress=progress)
    print(render.json_text([str(path) for path in written]) if json else "\n".join(str(path) for path in written))


@app.command(epilog="Example: peakcast reproduce")
def reproduce(
    datasets: Datasets = None,
    output: Annotated[Path | None, typer.Option(help="Folder for all results; default: their usual places.")] = None,
    tracking_uri: TrackingUri = None,
    no_tracking: NoTracking = False,
    json: Json = False,
) -> None:
    """Do everything that is published here, from the measured rows: fit, evaluate on what was held out, write reports."""
    from peakcast import api, render

    with render.working() as progress:
        fitted, evaluation, written = api.reproduce(
            datasets=datasets, output=output, tracker=_tracker(tracking_uri, no_tracking), progress=progress
        )
    if json:
        found = {"fitted": render.fitted_mappings(fitted), "evaluation": evaluation.to_mapping()}
        print(render.json_text({**found, "reports": [str(path) for path in written]}))
        return
    print(render.fitted_text(fitted) + "\n")
    _print_evaluation(evaluation, None)
    print("\nReports: " + str(written[-1]))


@app.command(epilog="Example: peakcast collect my-grid.yaml --budget-minutes 25")
def collect(
    grid: Annotated[str, typer.Argument(help="A grid file, or the name of a shipped grid.")],
    shard: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to.")] = Path("peakcast.shard.jsonl"),
    budget_minutes: Annotated[float | None, typer.Option(help="Start no cell after this long.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Trace on fake tensors; needs no GPU.")] = False,
    timeout_seconds: Annotated[float, typer.Option(help="Longest that one cell may take.")] = 600,
    gpu: Annotated[str | None, typer.Option(help="GPU type to trace for.")] = None,
    processes: Processes = None,
    select: Annotated[str, typer.Option(help="Order of the cells: grid, or informative, which tells most first.")] = "grid",
    engine: Annotated[str, typer.Option(help="Where cells run: local, ray or slurm.")] = "local",
    engine_options: Annotated[
        list[str] | None, typer.Option("--engine-set", help="An option of the engine: --engine-set slurm_partition=gpu")
    ] = None,
    history: Annotated[bool, typer.Option("--history", help="Keep the allocator's history of each run.")] = False,
    ranks: Annotated[
        str, typer.Option(help="Of a job of several: auto (all where there are GPUs enough, else one), real, one, or 0,3.")
    ] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Each cell so many times, for the noise between runs.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw measured against predicted to this .png or .svg.")] = None,
    json: Json = False,
) -> None:
    """Measure the cells of GRID that SHARD does not have yet, each in its own process; interrupt and resume at will."""
    from peakcast import api, render

    with render.working() as progress:
        summary = api.collect(
            grid,
            shard,
            budget_minutes=budget_minutes,
            trace=trace,
            timeout_seconds=timeout_seconds,
            gpu=gpu,
            processes=processes,
            select=select,
            engine=engine,
            engine_options=_options(engine_options or []),
            history=history,
            ranks=ranks,
            repeats=repeats,
            plot=plot,
            progress=progress,
        )
    print(render.json_text(render.plain(summary)) if json else render.summary_text(summary, shard))
    raise typer.Exit(NOTHING_MEASURED if summary.failed and not summary.finished + summary.out_of_memory else 0)


@app.command(epilog="Example: peakcast verify agreement-sample")
def verify(
    grid: Annotated[str, typer.Argument(help="A grid file, or the name of a shipped grid.")] = "agreement",
    shard: Annotated[Path, typer.Option(help="JSON-lines file that traces are kept in.")] = Path("agreement.shard.jsonl"),
    output: Annotated[Path | None, typer.Option(help="Also write ledger.md, with every cell, to this folder.")] = None,
    processes: Processes = None,
    json: Json = False,
) -> None:
    """Trace the real training step of every cell of GRID on fake tensors, and lay the analytical ledger beside it.

    Needs no GPU. Exits with 1 when a cell is further off than 0.1 % in some phase (0.5 % in parallel layouts).
    """
    from peakcast import api, render
    from peakcast.reports.agreement import agreement_text

    with render.working() as progress:
        cells = api.verify(grid, shard, output=output, processes=processes, progress=progress)
    print(render.json_text([cell.to_mapping() for cell in cells]) if json else agreement_text(cells))
    raise typer.Exit(0 if all(cell.holds for cell in cells) else DISAGREES)


@app.command(epilog="Example: peakcast search --model llama-3.1-70b --framework megatron --gpu H100-80GB --num-gpus 64")
@takes_job
def search(
    asked: AskedJob,
    gpu: Gpu = None,
    num_gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to spread the job over; default: those of JOB.")] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences per optimizer step; default: those of JOB.")
    ] = None,
    find: Annotated[
        str, typer.Option(help="plans, or what should be largest: micro_batch_size, sequence_length, model; or num_gpus.")
    ] = "plans",
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 20,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs that tensor parallelism may span.")] = 8,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
    json: Json = False,
) -> None:
    """Search the layouts, micro-batches, checkpointing, sharding and offloading with which JOB fits, ranked.

    Exits with 0 when something surely fits, 3 when nothing does, 4 when that is uncertain.
    """
    from peakcast import api, render
    from peakcast.searching.found import Found
    from peakcast.searching.text import found_text, largest_text

    if gpu is None:
        raise SpecError("--gpu is required and missing; give a GPU type such as --gpu H100-80GB.", parameter="gpu")
    with render.working() as progress:
        found = api.search(
            asked.read(),
            gpu,
            num_gpus=num_gpus,
            global_batch_size=global_batch_size,
            find=find,
            top=top,
            gpus_per_node=gpus_per_node,
            processes=processes,
            progress=progress,
        )
    text = found_text(found) if isinstance(found, Found) else largest_text(found)
    print(render.json_text(found.to_mapping()) if json else text)
    raise typer.Exit(FITS_EXIT_CODES[found.fits])


@app.command(epilog="Example: peakcast web --port 8000")
def web(
    host: Annotated[str, typer.Option(help="Address to listen on; only this machine by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 7860,
    json: Json = False,
) -> None:
    """Ask the same questions in a browser: paste a configuration, change a knob, see the peak move."""
    from peakcast import api, render

    def say(address: str) -> None:
        text = render.json_line({"address": address}) if json else f"peakcast: {address} (stop with Ctrl-C)"
        print(text, flush=True)

    api.web(host, port, progress=say)


@app.command(name="import-published", epilog="Example: peakcast import-published")
def import_published(
    sources: Annotated[Path | None, typer.Option(help="Folder of the source files; default: the shipped ones.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the tables; default: datasets/published.")] = None,
    json: Json = False,
) -> None:
    """Import what others published into tables, one per GPU type; the same sources give the same bytes."""
    from peakcast import api, render

    counts = api.import_published(sources, output)
    print(render.json_text(counts) if json else "\n".join(f"{gpu}: {rows} rows" for gpu, rows in counts.items()))


def _answer(
    asked: object,
    gpu: str | None,
    rank: str,
    calibration: Path | None,
    *,
    print_job: bool,
    json: bool,
    all_ranks: bool = False,
) -> None:
    """Print the job that was read, or the prediction for it and exit with whether it fits."""
    from peakcast import api, render

    if print_job:
        print(render.job_text(asked, as_json=json))
        return
    if gpu is None:
        raise SpecError("--gpu is required and missing; give a GPU type such as --gpu H100-80GB.", parameter="gpu")
    prediction = api.predict(asked, gpu, rank=rank, calibration=calibration, all_ranks=all_ranks)
    print(render.json_text(prediction.to_mapping()) if json else render.prediction_text(prediction))
    raise typer.Exit(FITS_EXIT_CODES[prediction.fits])


def _options(texts: list[str]) -> dict[str, Any]:
    import yaml

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise SpecError(f"--engine-set {text!r} must be NAME=VALUE, such as num_gpus=1.", parameter="engine-set")
        found[name] = yaml.safe_load(value)
    return found


@app.command(epilog="Example: peakcast doctor")
def doctor(json: Json = False) -> None:
    """Show what is installed here, which GPUs and calibrations are found, and what of peakcast works with them."""
    from peakcast import api, render

    found = api.doctor()
    print(render.json_text(found.to_mapping()) if json else render.installation_text(found))


def _one_or_all(gpu: str | None, all_: bool) -> str | None:
    if (gpu is None) == (not all_):
        raise SpecError("give either --gpu with a GPU type, or --all.", parameter="gpu", value=gpu)
    return gpu


def _tracker(uri: str | None, no_tracking: bool) -> Any:
    from peakcast import api

    return None if no_tracking else api.tracker(uri)


def _print_evaluation(evaluation: Any, gpu: str | None, *, markdown: bool = False, json: bool = False) -> None:
    from peakcast import render
    from peakcast.reports.tables import headline_markdown

    if json:
        print(render.json_text(evaluation.to_mapping()))
    elif markdown:
        print(headline_markdown(evaluation, gpu), end="")
    else:
        render.print_evaluation(evaluation, gpu)


def main() -> None:
    """The `peakcast` command. A fault becomes one sentence on standard error and exit code 2."""
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    try:
        code = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except PeakcastError as error:
        return _say(error.message)
    except (KeyboardInterrupt, typer.Abort):
        print("peakcast: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        usage = getattr(error, "format_message", None)  # typer's own, from whichever click it brings along
        if usage is not None:
            return _say(f"{usage()} See peakcast {' '.join(arguments[:1])} --help.")
        if os.environ.get("PEAKCAST_DEBUG") == "1":
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return _say(f"this is a bug in peakcast: {what} (PEAKCAST_DEBUG=1 shows where)", 70)


def _say(message: str, code: int = 2) -> int:
    print(f"peakcast: {' '.join(message.split())}", file=sys.stderr)
    return code
