"""Compares a recorded run with its prediction: `watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peakcast.commands.application import Gpu, Json, app
from peakcast.doors.job_flags import AskedJob, takes_job

OUTSIDE = 3
"""Exit code of `peakcast watch` if a recorded peak is outside its bar."""


@app.command(epilog="Example: peakcast watch job.yaml --snapshot run.pickle --gpu H100-80GB --append-to mine.shard.jsonl")
@takes_job
def watch(
    asked: AskedJob,
    snapshot: Annotated[Path, typer.Option(help="What torch.cuda.memory._dump_snapshot wrote in the run.")],
    gpu: Gpu = None,
    rank: Annotated[str, typer.Option(help="Rank that was recorded: worst, last, or a number.")] = "worst",
    append_to: Annotated[Path | None, typer.Option(help="JSON-lines file that the row is added to.")] = None,
    json: Json = False,
) -> None:
    """Compare the peaks of a run that was recorded with the prediction of JOB, and propose the row that they make.

    Exits with 0 when both peaks lie inside their bars, 3 when not.
    """
    from peakcast import api
    from peakcast.printing import answers as render

    found = api.watch(asked.read(), gpu, rank, snapshot=snapshot, append_to=append_to)
    print(render.json_text(found.to_mapping()) if json else found.text())
    raise typer.Exit(0 if all(found.inside.values()) else OUTSIDE)
