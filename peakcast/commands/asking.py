"""Questions about a job: `predict`, `megatron`, `explain`, `search`, and the page that asks them, `web`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peakcast.commands.application import (
    CalibrationOption,
    Gpu,
    HostMemoryOption,
    Json,
    NodeOptions,
    RankOption,
    ShownJobOptions,
    ShownOptions,
    app,
    named_gpu,
    say,
)
from peakcast.commands.option_groups import OptionGroup, takes_groups
from peakcast.core.errors import SpecError
from peakcast.doors.job_flags import VERSIONS, AskedJob, takes_job

if TYPE_CHECKING:
    from peakcast.answers.prediction import Answer

FITS_EXIT_CODES = {"yes": 0, "no": 3, "uncertain": 4}
"""Verdict -> exit code of `peakcast predict`; 2 means that the question cannot be answered."""


@dataclass(frozen=True, slots=True)
class RankOptions(OptionGroup):
    """Of which ranks the peaks are."""

    rank: RankOption = "worst"
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Add a line for every distinct rank.")] = False


@dataclass(frozen=True, slots=True)
class BatchOptions(OptionGroup):
    """A file of questions, and how it is worked on."""

    batch: Annotated[Path | None, typer.Option(help="Questions, one JSON object a line ('-': standard input).")] = None
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that share a batch; default: all cores for a long file.")
    ] = None
    timeout_seconds: Annotated[float | None, typer.Option(help="Most time for one question of a batch; default: 60.")] = (
        None
    )


@dataclass(frozen=True, slots=True)
class GpuOptions(OptionGroup):
    """The GPUs for which a search looks for layouts."""

    gpu: Gpu = None
    price: Annotated[
        Path | None,
        typer.Option(help="A YAML or JSON file with the price of an hour of each GPU type; plans are then ranked by cost."),
    ] = None
    num_gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to spread the job over; default: those of JOB.")] = None
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs that tensor parallelism may span.")] = 8
    host_memory_gib: HostMemoryOption = None


@dataclass(frozen=True, slots=True)
class VersionOptions(OptionGroup):
    """The versions of packages."""

    versions: Annotated[list[str] | None, VERSIONS["versions"][1]] = None
    container: Annotated[str | None, VERSIONS["container"][1]] = None
    here: Annotated[bool, VERSIONS["here"][1]] = False


@dataclass(frozen=True, slots=True)
class TraceOptions(OptionGroup):
    """Whether and what of the real library is traced, instead of counted by the ledger."""

    trace: Annotated[bool, typer.Option("--trace", help="Run the real library on fake tensors, without a GPU.")] = False
    module: Annotated[str | None, typer.Option(help="Trace FILE.py:FUNCTION, which returns (model, step).")] = None


@dataclass(frozen=True, slots=True)
class PictureOptions(OptionGroup):
    """Files that a timeline is written to."""

    picture: Annotated[Path | None, typer.Option(help="Also draw the timeline to this .png or .svg file.")] = None
    snapshot: Annotated[Path | None, typer.Option(help="Also write it for PyTorch's memory viewer (a pickle).")] = None


@app.command(epilog="Example: peakcast predict --model llama-3.1-8b --method lora --lora-rank 16 --gpu A100-80GB")
@takes_job
@takes_groups
def predict(
    asked: AskedJob,
    *,
    gpu: Gpu = None,
    ranks: RankOptions,
    batch: BatchOptions,
    node: NodeOptions,
    baseline: Annotated[str, typer.Option(help="auto, ledger, recipe (of the library installed here) or trace.")] = "auto",
    calibration: CalibrationOption = None,
    shown: ShownJobOptions,
) -> None:
    """Predict the peak memory of one rank of JOB, with error bars, and whether it fits.

    Exits with 0 when it fits, 3 when not, 4 when that is uncertain, 2 when the question cannot be answered.
    """
    from peakcast import api
    from peakcast.printing import answers as render

    if batch.batch is not None:
        if asked.given:
            raise SpecError("--batch asks the questions of its file; give no JOB and no job flags with it.")
        if baseline != "auto":
            raise SpecError("--baseline is of a single question; leave it out with --batch.", parameter="baseline")
        _answer_batch(batch.batch, batch)
    elif shown.print_job:
        print(render.job_text(asked.read(), as_json=shown.json))
    else:
        options: dict[str, Any] = {**asdict(node), **asdict(ranks), "baseline": baseline, "recipe": asked.recipe}
        read = asked.read()
        _print(api.predict(read, named_gpu(gpu), calibration=calibration, progress=say, **options), shown)


def _answer_batch(questions: Path, batch: BatchOptions) -> None:
    """Print an answer for each line of `questions`."""
    from peakcast import api
    from peakcast.doors.batching import LINE_SECONDS, lines_and_processes
    from peakcast.printing import answers as render

    lines, processes = lines_and_processes(questions, batch.processes)
    for answer in api.predict_batch(lines, processes, timeout_seconds=batch.timeout_seconds or LINE_SECONDS):
        print(render.json_line(answer), flush=str(questions) == "-")


@app.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: peakcast megatron --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--micro-batch-size 1 --bf16 --tensor-model-parallel-size 4 --num-gpus 8 --gpu H100-80GB",
)
@takes_groups
def megatron(
    *,
    arguments: Annotated[list[str] | None, typer.Argument(help="Megatron-LM's own flags, as for pretrain_gpt.py.")] = None,
    gpu: Gpu = None,
    num_gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of the whole run; default: WORLD_SIZE.")] = None,
    rank: RankOption = "worst",
    node: NodeOptions,
    versions: VersionOptions,
    calibration: CalibrationOption = None,
    shown: ShownJobOptions,
) -> None:
    """Predict the peak memory of a Megatron-LM run: put `peakcast megatron` in the place of `pretrain_gpt.py`."""
    from peakcast import api
    from peakcast.dialects.common.asked_versions import asked_versions
    from peakcast.dialects.megatron_arguments import from_arguments
    from peakcast.printing import answers as render

    given = asked_versions(versions.versions, versions.container, versions.here)
    asked = from_arguments(arguments or [], os.environ, num_gpus, given)
    if shown.print_job:
        print(render.job_text(asked, as_json=shown.json))
        return
    _print(api.predict(asked, named_gpu(gpu), rank, calibration, progress=say, **asdict(node)), shown)


@app.command(epilog="Example: peakcast explain --model llama-3.1-8b --gpu H100-80GB --picture step.png")
@takes_job
@takes_groups
def explain(
    asked: AskedJob,
    *,
    gpu: Gpu = None,
    rank: RankOption = "worst",
    against: Annotated[str | None, typer.Option(help="Compare with: a job file, a catalog name, or FIELD=VALUE.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show every layer, and the shape of every parameter.")] = False,
    drawn: PictureOptions,
    traced: TraceOptions,
    shown: ShownOptions,
) -> None:
    """Explain the memory of one rank of JOB: why the peak is where it is, layer by layer, and what would lower it."""
    from peakcast import api
    from peakcast.printing import answers as render
    from peakcast.printing.explanations import explanation_text

    if traced.module is not None and asked.given:
        raise SpecError("--module traces your own step; give no JOB and no job flags with it.", parameter="module")
    found = api.explain(
        asked.read() if traced.module is None else None,
        gpu,
        rank,
        against=asked.other(against),
        recipe=asked.recipe,
        progress=say,
        **asdict(traced),
        **asdict(drawn),
    )
    whole = shown.details
    print(render.json_text(found.to_mapping()) if shown.json else explanation_text(found, layers=layers, whole=whole))


@app.command(epilog="Example: peakcast search --model llama-3.1-70b --framework megatron --gpu H100-80GB --num-gpus 64")
@takes_job
@takes_groups
def search(
    asked: AskedJob,
    *,
    gpus: GpuOptions,
    global_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences per optimizer step; default: those of JOB, at least a micro-batch a GPU."),
    ] = None,
    find: Annotated[
        str, typer.Option(help="plans; the largest micro_batch_size, sequence_length or model; or the fewest num_gpus.")
    ] = "plans",
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 20,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
    shown: ShownOptions,
) -> None:
    """Search the layouts, micro-batches, checkpointing, sharding and offloading with which JOB fits, ranked.

    With several GPU types (--gpu A100-80GB,H100-80GB) or --price, GPU types are compared.

    Exits with 0 when something surely fits, 3 when nothing does, 4 when that is uncertain.
    """
    from peakcast import api
    from peakcast.printing import answers as render
    from peakcast.printing.plans import search_text

    if gpus.price is None:
        named_gpu(gpus.gpu)
    with render.working() as progress:
        found = api.search(
            asked.read(),
            **asdict(gpus),
            global_batch_size=global_batch_size,
            find=find,
            top=top,
            recipe=asked.recipe,
            processes=processes,
            progress=progress,
        )
    print(render.json_text(found.to_mapping()) if shown.json else search_text(found, whole=shown.details))
    raise typer.Exit(FITS_EXIT_CODES[found.fits])


@app.command(epilog="Example: peakcast web --port 8000")
def web(
    host: Annotated[str, typer.Option(help="Address to listen on; only this machine by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 7860,
    json: Json = False,
) -> None:
    """Ask the same questions in a browser: paste a configuration, change a knob, see the peak move."""
    from peakcast import api
    from peakcast.printing import answers as render

    def tell(address: str) -> None:
        text = render.json_line({"address": address}) if json else f"peakcast: {address} (stop with Ctrl-C)"
        print(text, flush=True)

    api.web(host, port, progress=tell)


@app.command(epilog="Example: peakcast mcp")
def mcp(json: Annotated[bool, typer.Option("--json", help="Print the tools as JSON and end.")] = False) -> None:
    """Serve predict, explain, search and more as tools to an assistant (Model Context Protocol, over stdio)."""
    from peakcast.core.extras import need

    need("the server for assistants", "mcp")
    from peakcast.commands import assistant
    from peakcast.printing import answers as render

    if json:
        print(render.json_text(assistant.tools()))
    else:
        assistant.serve()


def _print(prediction: Answer, shown: ShownOptions) -> None:
    """Print a prediction, and exit with the verdict's code."""
    from peakcast.printing import answers as render
    from peakcast.printing.screen import prediction_text

    print(render.json_text(prediction.to_mapping()) if shown.json else prediction_text(prediction, details=shown.details))
    raise typer.Exit(FITS_EXIT_CODES[prediction.fits])
