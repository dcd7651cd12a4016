"""Recipes of networks from the library that is installed: `record`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from peakcast.commands.application import Json, app
from peakcast.doors.job_flags import AskedJob, takes_job


@app.command(epilog="Example: peakcast record --model config.json --checkpointing full --sequence-length 4096")
@takes_job
def record(
    asked: AskedJob,
    python: Annotated[str, typer.Option(help="Interpreter of another environment, whose libraries are recorded.")] = "",
    output: Annotated[Path | None, typer.Option(help="Also write the recipe to this .json.gz file.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--all", help="Instead of JOB: record all families that the ledger does not know, into this folder."),
    ] = None,
    families: Annotated[list[str] | None, typer.Option("--family", help="With --all: only this one. Repeatable.")] = None,
    library: Annotated[
        str, typer.Option(help="With --all: transformers, or torchtune for the networks that it has of its own.")
    ] = "transformers",
    timeout_seconds: Annotated[
        float, typer.Option(min=1.0, help="With --all: most time for one regime of a family.")
    ] = 1800.0,
    json: Json = False,
) -> None:
    """Record what JOB's network allocates, block by block, from the transformers installed here, without a GPU.

    Predictions with --baseline recipe use it, and those for networks of families that the ledger does not know.
    """
    from peakcast import api
    from peakcast.printing import answers as render

    interpreter = python or sys.executable
    if folder is None:
        found = api.record(asked.read(), python=interpreter, output=output)
        print(render.json_text(found.to_mapping()) if json else found.text())
        return
    with render.working() as progress:
        shipment = api.record_all(
            folder,
            families=families or (),
            python=interpreter,
            timeout_seconds=timeout_seconds,
            library=library,
            progress=progress,
        )
    print(render.json_text(shipment.to_mapping()) if json else shipment.text())
