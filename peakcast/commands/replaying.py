"""Simulates a recorded allocator history and compares it with a prediction: `replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peakcast.commands.application import Gpu, Json, app

DISAGREES = 3
"""Exit code of `peakcast replay` if the simulation differs from the recording."""


@app.command(epilog="Example: peakcast replay snapshot.pickle --against llama-3.2-1b --gpu H100-80GB --output beside.png")
def replay(
    file: Annotated[Path, typer.Argument(help="What torch.cuda.memory._dump_snapshot wrote, or a published history.")],
    against: Annotated[str | None, typer.Option(help="Compare with a prediction: a job file or a catalog name.")] = None,
    gpu: Gpu = None,
    rank: Annotated[str, typer.Option(help="Rank to predict: worst, last, or a number.")] = "worst",
    trace: Annotated[bool, typer.Option("--trace", help="Compare it with a trace, not with the ledger.")] = False,
    module: Annotated[str | None, typer.Option(help="Compare it with a trace of FILE.py:FUNCTION, as in explain.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also draw the two to this .png or .svg file.")] = None,
    json: Json = False,
) -> None:
    """Replay the allocator history in FILE through the simulated allocator, and say whether it does what was recorded.

    With --against JOB the prediction is compared with it: which tensors are as predicted, which are missing, which
    nobody predicted, which memory no tensor has. Exits with 0 when simulation and recording agree, 3 when not.
    """
    from peakcast import api
    from peakcast.printing import answers as render
    from peakcast.printing.recordings import replayed_text

    found = api.replay(file, against, gpu, rank, trace=trace, module=module, output=output)
    print(render.json_text(found.to_mapping()) if json else replayed_text(found))
    raise typer.Exit(0 if found.agrees else DISAGREES)
