"""Notes what a dry run had to make up or leave out, with the file and line of the script that asked for it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

import torch

import peakcast
from peakcast import collectors
from peakcast.core.findings import Direction, Finding

MOST_NOTES = 20
"""Most findings of one run; a loop over layers could repeat the same one at as many places."""
_TORCH, *_OURS = (
    os.path.join(os.path.dirname(os.path.abspath(module.__file__ or "")), "") for module in (torch, peakcast, collectors)
)
_MACHINERY = (_TORCH, *_OURS)
"""Folders whose frames are never reported as the place."""
OF_DRY_RUNS = (*_OURS, *(_TORCH + part for part in ("_", "utils/_", "nn/modules/module.py")))
"""What the names of files begin with that run operators on tensors without values: those of peakcast, and torch's private
ones."""
_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
"""The folder of Python's own library."""


@dataclass
class RunFindings:
    """Findings of one run, each place once."""

    findings: list[Finding] = field(default_factory=list)
    _places: set[tuple[str, str]] = field(default_factory=set)

    def add(self, code: str, parameter: str, sentence: str, direction: Direction = "either") -> None:
        """Add one finding, if there is room."""
        if (code, sentence) not in self._places and len(self.findings) < MOST_NOTES:
            self._places.add((code, sentence))
            self.findings.append(Finding(code, parameter, direction, sentence))

    def value(self, asked: str, answer: object) -> None:
        """Note that the script read a value that is only known in a run with data."""
        place = where()
        if ("value", place) not in self._places:
            self._places.add(("value", place))
            asked = re.sub(r"^a (?=[aeio])", "an ", asked)
            sentence = f"{place} reads {asked} from the GPU, which only a run knows; it was given {answer}."
            self.add("value_assumed", place.partition(":")[0], sentence)

    def balanced(self) -> None:
        """Note that the script read a number that follows from a choice of the largest of unknown numbers, as a router of
        tokens makes it."""
        place = where()
        sentence = (
            f"{place} reads which of unknown numbers are the largest, as a router chooses experts or a generation tokens; "
            "every choice was taken to come equally often."
        )
        self.add("value_assumed", place.partition(":")[0], sentence)


def where() -> str:
    """File and line of the script that is running, "train.py:12"; if no frame is the script's own, those of the library
    that it called."""
    first = ""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file.startswith("<") or file.startswith(_MACHINERY):
            continue
        line = f":{frame.f_lineno}"
        if is_own(file):
            return short_path(file) + line
        first = first or ("" if file.startswith(_LIBRARY) else _within_package(file) + line)
    return first or "the script"


def asking() -> FrameType | None:
    """The frame of the script's or a library's code that asked torch for something."""
    frames = (frame for frame in _frames() if not frame.f_code.co_filename.startswith(("<", *_MACHINERY)))
    return next(frames, None)


ITS_MEANS = frozenset({"peakcast", "numpy", "torch", *sys.stdlib_module_names} - {"__main__"})
"""Packages through which a script reads its files."""
DIRECTLY = frozenset({"peakcast", "importlib", "os", "pathlib"})
"""Packages between a line of the script and a hook of the dry run, if the script itself imports a module or lists a
folder."""


def asker(means: frozenset[str] = ITS_MEANS) -> str | None:
    """The file of the script that made the current call, directly or through the packages of `means`; None if a library
    made it."""
    for frame in _frames():
        if frame.f_globals.get("__name__", "").partition(".")[0] not in means:
            return frame.f_code.co_filename if is_own(frame.f_code.co_filename) else None
    return None


def is_own(file: str) -> bool:
    """Whether `file` belongs to the script rather than to an installed package."""
    installed = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    own = (os.getcwd() + os.sep, os.path.dirname(os.path.abspath(sys.argv[0])) + os.sep)
    return os.path.abspath(file).startswith(own) and not os.path.abspath(file).startswith(installed)


def is_of_script(file: str) -> bool:
    """Whether `file` belongs to the script, also where the script lies beside this package."""
    return not file.startswith(("<", *_MACHINERY)) and is_own(file)


def short_path(file: str) -> str:
    """The path of the script's own `file`, from the folder in which it was started or else from the script's."""
    near = os.path.relpath(file)
    return near if not near.startswith(os.pardir) else os.path.relpath(file, os.path.dirname(os.path.abspath(sys.argv[0])))


def _within_package(file: str) -> str:
    """The path of `file` from the folder of its package on."""
    roots = [path for path in sys.path if path and file.startswith(path + os.sep)]
    return os.path.relpath(file, max(roots, key=len)) if roots else file


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
