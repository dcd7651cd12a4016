"""The command line: collects the commands of `peakcast.commands`, runs one, and turns errors into sentences."""

from __future__ import annotations

import gc
import os
import sys
from copy import copy

import typer

from peakcast.commands.application import Json, app
from peakcast.commands.asking import FITS_EXIT_CODES, explain, mcp, megatron, predict, search, web
from peakcast.commands.calibrating import HOLDS_EXIT_CODES, evaluate, fit, report, reproduce
from peakcast.commands.dryrunning import dryrun
from peakcast.commands.measuring import collect, import_published, verify
from peakcast.commands.recording import record
from peakcast.commands.replaying import replay
from peakcast.commands.watching import watch
from peakcast.core.errors import PeakcastError, SpecError, shortened
from peakcast.core.output import READER_GONE, OutputError, prepare

__all__ = [
    "FITS_EXIT_CODES", "HOLDS_EXIT_CODES", "app", "collect", "doctor", "dryrun", "evaluate", "explain", "fit",
    "import_published", "main", "mcp", "megatron", "predict", "record", "replay", "report", "reproduce", "search", "verify",
    "watch", "web",
]  # fmt: skip

QUICK = (["predict"], ["megatron"])
"""Commands that take half a second and multiply no large matrices. For them numpy's OpenBLAS is not allowed to start a
thread for each core, and Python looks for unreachable cycles of objects less often: both would only take time."""
OBJECTS_BETWEEN_COLLECTIONS = 500_000
"""The threshold of `gc` for such commands, in objects made; Python's own is 700."""


@app.command(epilog="Example: peakcast doctor")
def doctor(json: Json = False) -> None:
    """Show what is installed here, which GPUs and calibrations are found, and which parts of peakcast work."""
    from peakcast import api
    from peakcast.printing import answers as render

    found = api.doctor()
    print(render.json_text(found.to_mapping()) if json else render.installation_text(found))


def main() -> None:
    """The `peakcast` command. An error becomes one sentence on standard error and exit code 2; without arguments the help
    is shown."""
    prepare()
    code = _run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OutputError as error:
        code = error.code
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    if arguments[:1] in QUICK:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    try:
        _refuse_second_gpu(arguments)
        code = _application(arguments)(arguments or ["--help"], standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except PeakcastError as error:
        return _say(error.message)
    except (KeyboardInterrupt, typer.Abort):
        print("peakcast: interrupted", file=sys.stderr)
        return 130
    except OutputError as error:
        return error.code if error.code == READER_GONE else _say(str(error), error.code)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # typer's own, from whichever click it brings along
        if usage is not None:
            known = [name for name in arguments[:1] if name.replace("-", "_") in __all__]
            return _say(f"{usage()} See {' '.join(['peakcast', *known, '--help'])}.")
        if os.environ.get("PEAKCAST_DEBUG") == "1":
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return _say(f"this is a bug in peakcast: {what} (PEAKCAST_DEBUG=1 shows where)", 70)


def _application(arguments: list[str]) -> typer.Typer:
    """The application with only the command that the first argument names, if it names one: typer builds the options of
    every command anew for each call, which takes longer than a short answer."""
    one = copy(app)
    one.registered_commands = [
        command
        for command in app.registered_commands
        if command.callback and [command.name or command.callback.__name__.replace("_", "-")] == arguments[:1]
    ]
    return one if one.registered_commands else app


def _refuse_second_gpu(arguments: list[str]) -> None:
    """Raises: SpecError where --gpu is given twice, of which typer would take the last in silence. What follows the script
    of `dryrun`, or --, is not peakcast's."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    given = [own[at + 1] for at, word in enumerate(own[:-1]) if word == "--gpu"]
    if len(given) > 1 and arguments[0] != "dryrun":
        way = f"several types are one value of `search`: --gpu {','.join(given)}; over unequal GPUs the one with the least"
        raise SpecError(f"--gpu is given {len(given)} times; {way} memory decides, so ask with that.", parameter="gpu")


def _say(message: str, code: int = 2) -> int:
    print(f"peakcast: {shortened(' '.join(message.split()))}", file=sys.stderr)
    return code
