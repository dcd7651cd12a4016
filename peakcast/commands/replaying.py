"""Simulates recorded allocator histories and compares one with a prediction: `replay`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from peakcast.commands.application import Gpu, Json, app

NOT_READ = 2
"""Exit code of `peakcast replay` if one of several files cannot be read; a single such file ends as every error does."""
DISAGREES = 3
"""Exit code of `peakcast replay` if the simulation differs from a recording."""


@app.command(epilog="Example: peakcast replay snapshot.pickle --against llama-3.2-1b --gpu H100-80GB --output beside.png")
def replay(
    files: Annotated[
        list[Path],
        typer.Argument(help="What torch.cuda.memory._dump_snapshot wrote, or published histories; or a folder of them."),
    ],
    against: Annotated[str | None, typer.Option(help="Compare with a prediction: a job file or a catalog name.")] = None,
    gpu: Gpu = None,
    rank: Annotated[str, typer.Option(help="Rank to predict: worst, last, or a number.")] = "worst",
    trace: Annotated[bool, typer.Option("--trace", help="Compare it with a trace, not with the ledger.")] = False,
    module: Annotated[str | None, typer.Option(help="Compare it with a trace of FILE.py:FUNCTION, as in explain.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also draw what is compared to this .png or .svg file.")] = None,
    json: Json = False,
) -> None:
    """Replay allocator histories through the simulated allocator, and say whether it does what was recorded.

    With --against JOB, also compare the recording with a prediction: which tensors are as predicted, which are missing,
    which were not predicted, and which memory belongs to no tensor. With several files, or a folder, --json prints one
    object a line. Exits with 0 when simulation and recordings agree, 3 when not, 2 when a file cannot be read.
    """
    from peakcast import api
    from peakcast.core.errors import SpecError
    from peakcast.printing import answers as render
    from peakcast.printing.recordings import replayed_text

    if len(files) == 1 and not files[0].is_dir():
        found = api.replay(files[0], against, gpu, rank, trace=trace, module=module, output=output)
        print(render.json_text(found.to_mapping()) if json else replayed_text(found))
        raise typer.Exit(0 if found.agrees else DISAGREES)
    if against is not None or module is not None or output is not None or trace:
        reason = "--against, --trace, --module and --output compare with one recording: name one file."
        raise SpecError(reason, parameter="files")
    raise typer.Exit(_replay_all(files, as_json=json))


def _replay_all(files: Sequence[Path], *, as_json: bool) -> int:
    """Replay each of `files`, say what came out as soon as it is known, and return the exit code."""
    from peakcast import api
    from peakcast.doors.replaying import NotReplayed
    from peakcast.printing import answers as render
    from peakcast.printing.recordings import one_of_many_text

    codes = {0}
    for found in api.replay_all(files):
        print(render.json_line(found.to_mapping()) if as_json else one_of_many_text(found), flush=True)
        if isinstance(found, NotReplayed):
            codes.add(NOT_READ)
        elif not found.agrees:
            codes.add(DISAGREES)
    return NOT_READ if NOT_READ in codes else max(codes)
