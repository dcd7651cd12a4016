"""`python -P -m peakcast.collectors.dryrun.started QUESTION.json NAME ARGUMENTS...`: what a stand-in of a program of this
environment does (`programs.py`). It dry-runs the command if that trains, else becomes the program itself."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from peakcast.collectors.dryrun.children import Children
from peakcast.collectors.dryrun.command import PYTHON

NOT_FOUND = 127
"""Exit code of a shell that does not find a command (POSIX, Shell Command Language, 2.8.2)."""


def become(question: Path, words: list[str]) -> NoReturn:
    """Become the dry run of the command `words`, which a shell of the script of `question` has started, or its program."""
    followed = Children(json.loads(question.read_text(encoding="utf-8"))).instead(words)
    if followed is not None:
        os.execv(followed[0], followed)
    places = (os.path.dirname(sys.executable), *os.environ.get("PATH", os.defpath).split(os.pathsep))
    path = os.pathsep.join(place for place in places if Path(place) != question.parent / "bin")
    program = sys.executable if PYTHON.fullmatch(words[0]) else shutil.which(words[0], path=path)
    if program is None:
        print(f"{words[0]}: command not found", file=sys.stderr)
        sys.exit(NOT_FOUND)
    os.execv(program, [program, *words[1:]])


if __name__ == "__main__":
    become(Path(sys.argv[1]), sys.argv[2:])
