"""Programs that a script starts and that may train. They are run as dry runs too, and the first one that trains gives the
answer."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peakcast.collectors.dryrun.command import read_command, trains
from peakcast.core.errors import SpecError

ASKED = ("script", "arguments", "as_module", "world_size", "ranks_per_node", "launched", "accelerate")
"""Fields of a command that are passed to the process that runs it."""


class Children:
    """Replaces programs that a script starts and that may train by dry runs of them. `question` is the script's own."""

    def __init__(self, question: Mapping[str, Any]) -> None:
        self._question = question
        self._numbers = itertools.count()

    def install(self) -> None:
        """Install it in this process."""
        begin, execute, execute_with, system = subprocess.Popen.__init__, os.execv, os.execve, os.system

        def started(popen: Any, args: Any, *rest: Any, **keywords: Any) -> None:
            folder = keywords.get("cwd")
            with contextlib.chdir(folder if folder and os.path.isdir(folder) else "."):
                followed = self.instead(_words(args, shell=bool(keywords.get("shell"))))
            if followed is not None:
                args, keywords = followed, {**keywords, "shell": False, "executable": None}
            begin(popen, args, *rest, **keywords)

        def became(path: Any, args: Any) -> Any:
            followed = self.instead(_words(args, shell=False))
            return execute(path, args) if followed is None else execute(followed[0], followed)

        def became_with(path: Any, args: Any, environment: Any) -> Any:
            followed = self.instead(_words(args, shell=False))
            if followed is None:
                return execute_with(path, args, environment)
            return execute_with(followed[0], followed, environment)

        def ran(command: Any) -> int:
            followed = self.instead(_words(command, shell=True))
            return system(command) if followed is None else subprocess.call(followed) << 8  # in the form of wait(2)

        subprocess.Popen.__init__ = started  # type: ignore[method-assign,assignment]
        os.execv, os.execve, os.system = became, became_with, ran  # type: ignore[assignment]
        if "fork" in multiprocessing.get_all_start_methods():  # a forked child is in the dry run too
            multiprocessing.set_start_method("fork", force=True)
            context: Any = multiprocessing.get_context
            multiprocessing.get_context = lambda method=None: context("fork")  # type: ignore[assignment]

    def instead(self, words: list[str]) -> list[str] | None:
        """The command that dry-runs what `words` would run; None if that does not train, judging by its name."""
        try:
            command = read_command(words)
        except SpecError:
            return None
        if not trains(command):
            return None
        question = {**self._question, **{field: getattr(command, field) for field in ASKED}, "is_child": True}
        question.pop("function", None)
        if self._question["world_size"] > 1:  # a launcher has given it
            question |= {name: self._question[name] for name in ("world_size", "ranks_per_node", "launched")}
        question["rank"] = self._question["rank"] % question["world_size"]
        os.environ.update(dict(variable.split("=", 1) for variable in command.environment))
        path = Path(self._question["folder"]) / f"question-{os.getpid()}-{next(self._numbers)}.json"
        path.write_text(json.dumps(question), encoding="utf-8")
        return [sys.executable, "-P", "-m", "peakcast.collectors.dryrun", str(path)]


def _words(args: Any, *, shell: bool) -> list[str]:
    """A command as words; a shell's command is parsed as a script."""
    if isinstance(args, (str, bytes, os.PathLike)):
        text = os.fsdecode(args)
        return ["sh", "-c", text] if shell else [text]
    words = [os.fsdecode(word) for word in args] if isinstance(args, Sequence) else []
    return ["sh", "-c", *words] if shell else words
