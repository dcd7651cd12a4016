"""The report of a script's error: its traceback without frames of the dry run, and what the error itself does not say."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import traceback
import types

from peakcast.collectors.dryrun.noted import OF_DRY_RUNS

OURS = "peakcast"


def report(error: BaseException) -> str:
    """The text of `error` as Python would print it, without frames of the dry run."""
    with contextlib.suppress(Exception):  # an error may not take notes
        if lacks := _lacking(error):
            error.add_note(lacks)
    found = traceback.TracebackException(type(error), error, _from_the_script(error.__traceback__))
    cause: traceback.TracebackException | None = found
    while cause is not None:
        shown = [frame for frame in cause.stack if not frame.filename.startswith(OF_DRY_RUNS)]
        cause.stack = traceback.StackSummary.from_list(shown)
        cause = cause.__cause__ or cause.__context__
    return "".join(found.format())


def _from_the_script(raised: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the script's first frame on, without frames of the dry run."""
    at = raised
    while at is not None and at.tb_frame.f_globals.get("__name__", "").partition(".")[0] in (OURS, "runpy", ""):
        at = at.tb_next
    return at


def _lacking(error: BaseException) -> str:
    """Which installed package has the class that lacks an attribute which the script asked of it, or of an object of it; ""
    if `error` is not of that kind. Python's own text has no package, and of an enum not even the class."""
    if not isinstance(error, AttributeError) or error.obj is None or isinstance(error.obj, types.ModuleType):
        return ""
    kind = error.obj if isinstance(error.obj, type) else type(error.obj)
    package = kind.__module__.partition(".")[0]
    if package in sys.stdlib_module_names:
        return ""
    try:
        return f"{kind.__name__} of {package} {importlib.metadata.version(package)} has no {error.name}"
    except importlib.metadata.PackageNotFoundError:
        return ""  # the script's own class
