"""The application that the commands register with, and the options that several of them have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

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
HostMemoryOption = Annotated[
    float | None, typer.Option("--host-memory-gib", min=0.0, help="Host memory of a node in GiB, which then counts too.")
]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="GPUs of a node, which share its host memory; default: 8.")]
Details = Annotated[bool, typer.Option("--details", "--all-findings", help="Print the whole answer, not one screen.")]
Datasets = Annotated[Path | None, typer.Option(help="Folder of measured tables; default: the checkout's datasets/.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Cells at a time; default: one, or a trace for each core.")]
TrackingUri = Annotated[str | None, typer.Option(help="MLflow store; default: mlruns/mlflow.db of the working folder.")]
NoTracking = Annotated[bool, typer.Option("--no-tracking", help="Do not record this in MLflow.")]


def say(message: str) -> None:
    """Print to standard error what is being done, beside the answer."""
    print(f"peakcast: {message}", file=sys.stderr, flush=True)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from peakcast import __version__

        print(f"peakcast {__version__}")
        raise typer.Exit
