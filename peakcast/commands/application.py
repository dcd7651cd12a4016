"""The application that the commands register with, and the options that several of them have."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from peakcast.commands.option_groups import OptionGroup
from peakcast.core.errors import SpecError
from peakcast.doors.job_flags import complete_gpu

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
RankOption = Annotated[str, typer.Option("--rank", help="worst, last, or a number.")]
HostMemoryOption = Annotated[
    float | None, typer.Option("--host-memory-gib", min=0.0, help="Host memory of a node in GiB, which then counts too.")
]
CalibrationOption = Annotated[Path | None, typer.Option(help="A calibration file instead of the shipped one.")]
Details = Annotated[bool, typer.Option("--details", "--all-findings", help="Print the whole answer, not one screen.")]
Datasets = Annotated[Path | None, typer.Option(help="Folder of measured tables; default: the checkout's datasets/.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Cells at a time; default: one, or a trace for each core.")]


@dataclass(frozen=True, slots=True)
class ShownOptions(OptionGroup):
    """How an answer is printed."""

    details: Details = False
    json: Json = False


@dataclass(frozen=True, slots=True)
class ShownJobOptions(ShownOptions):
    """How an answer, or instead of it the job that was asked about, is printed."""

    print_job: Annotated[bool, typer.Option("--print-job", help="Print the job with every default, and stop.")] = False


@dataclass(frozen=True, slots=True)
class NodeOptions(OptionGroup):
    """The node whose host memory the ranks of a job share."""

    host_memory_gib: HostMemoryOption = None
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a node, which share its host memory; default: 8.")
    ] = None


def named_gpu(gpu: str | None) -> str:
    """The GPU type that was given. Raises: SpecError if none was."""
    if gpu is None:
        raise SpecError("--gpu is required and missing; give a GPU type such as --gpu H100-80GB.", parameter="gpu")
    return gpu


def say(message: str) -> None:
    """Print to standard error what is being done, beside the answer."""
    print(f"peakcast: {message}", file=sys.stderr, flush=True)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from peakcast import __version__

        print(f"peakcast {__version__}")
        raise typer.Exit
