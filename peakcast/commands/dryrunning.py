"""`peakcast dryrun`: the user's own training command, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peakcast.commands.application import CalibrationOption, Gpu, ShownOptions, app, say
from peakcast.commands.asking import FITS_EXIT_CODES
from peakcast.commands.option_groups import OptionGroup, takes_groups
from peakcast.core.errors import ScriptError, SpecError

if TYPE_CHECKING:
    from peakcast.doors.dryrunning import Dryrun


@dataclass(frozen=True, slots=True)
class RunOptions(OptionGroup):
    """The run that the script is a part of."""

    rank: Annotated[int | None, typer.Option(help="Rank to run; default: 0.")] = None
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks of the run; default: those of the launcher.")] = None
    torch: Annotated[
        str | None, typer.Option(help="The run's torch, if older than the one here: known differences are counted.")
    ] = None
    skip_evaluation: Annotated[bool, typer.Option("--skip-evaluation", help="Leave evaluation out of the peak.")] = False


@dataclass(frozen=True, slots=True)
class RowOptions(OptionGroup):
    """The rows that replace missing data."""

    length: Annotated[int | None, typer.Option(min=1, help="Tokens of the rows that replace missing data.")] = None
    lengths: Annotated[
        str | None,
        typer.Option(metavar="SHORTEST..LONGEST", help="A range instead, for lengths that change from step to step."),
    ] = None

    def asked(self) -> dict[str, Any]:
        """Both as arguments of `api.dryrun`. Raises: SpecError."""
        return {"length": self.length, "lengths": _range(self.lengths)}


@dataclass(frozen=True, slots=True)
class LimitOptions(OptionGroup):
    """What the script may use of this machine."""

    timeout_seconds: Annotated[float, typer.Option(min=1.0, help="Most time that the script may take.")] = 600.0
    memory_gib: Annotated[
        float | None, typer.Option(help="Host memory that the script may use; default: 80 % of what is free.")
    ] = None


@dataclass(frozen=True, slots=True)
class ShownRunOptions(ShownOptions):
    """What of a run is printed."""

    output: Annotated[bool, typer.Option("--show-output", help="Show what the script prints.")] = False


@app.command(
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog="Example: peakcast dryrun --gpu H100-80GB -- torchrun --nproc-per-node 8 train.py --config mine.yaml",
)
@takes_groups
def dryrun(
    *,
    command: Annotated[list[str] | None, typer.Argument(help="The command that trains, after --.")] = None,
    gpu: Gpu = None,
    run: RunOptions,
    rows: RowOptions,
    save_recipe: Annotated[
        Path | None, typer.Option(help="Keep the network in this .json.gz file: predict --recipe FILE varies it.")
    ] = None,
    limits: LimitOptions,
    calibration: CalibrationOption = None,
    shown: ShownRunOptions,
) -> None:
    """Run the training COMMAND on fake CUDA tensors for three steps, and predict its peaks: no GPU, nothing written.

    Exits with 0 when it fits, 3 when not, 4 when that is uncertain, 2 when the script cannot be followed.
    """
    from peakcast import api

    if gpu is None:
        raise _gpu_missing(command or [])
    try:
        found = api.dryrun(
            command or [],
            gpu,
            calibration=calibration,
            save_recipe=save_recipe,
            progress=say,
            output=_show if shown.output else None,
            **asdict(run),
            **rows.asked(),
            **asdict(limits),
        )
    except ScriptError as error:
        if not shown.output:
            _show("".join(f"  | {line}\n" for line in error.last_lines))
        raise
    _print(found, shown)
    _say_kept(found, save_recipe)
    raise typer.Exit(FITS_EXIT_CODES[found.fits])


def _print(found: Dryrun, shown: ShownOptions) -> None:
    from peakcast.printing import answers as render
    from peakcast.printing.screen import prediction_text

    print(render.json_text(found.to_mapping()) if shown.json else prediction_text(found.answer, details=shown.details))


def _say_kept(found: Dryrun, path: Path | None) -> None:
    """Say where the recipe is, if one was asked for. Raises: SpecError if it was not saved."""
    if found.not_kept:
        raise SpecError(found.not_kept, parameter="save_recipe", value=str(path))
    if found.kept is not None:
        say(f"the recipe of {found.job.architecture.name} is in {path}. {found.kept.text()}")


def _gpu_missing(command: Sequence[str]) -> SpecError:
    """Says that no GPU type was given, or that it stands among the words of the command."""
    way = "give a GPU type such as --gpu H100-80GB"
    if "--gpu" in (word.partition("=")[0] for word in command):
        way = "its options come before the command: peakcast dryrun --gpu H100-80GB -- python train.py"
    return SpecError(f"--gpu is required and missing; {way}.", parameter="gpu")


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    shortest, dots, longest = text.partition("..")
    if not (dots and shortest.isdecimal() and longest.isdecimal()):
        raise SpecError(
            f"--lengths {text} must be two numbers of tokens with .. between, such as 128..4096.",
            parameter="lengths",
            value=text,
        )
    return int(shortest), int(longest)


def _show(text: str) -> None:
    sys.stderr.write(text)
