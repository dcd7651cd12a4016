"""Keeps a Markdown file up to date: its accuracy table and the output below its commands are written by running them.

`python -P -m peakcast.reports.readme [FILE]` refreshes FILE (README.md of the working folder): the table between the two
markers, and what follows each `$ command` inside a ```console block. The commands of a file run in order, in a folder that
is empty at first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from peakcast.core.errors import RecordError
from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.reports.tables import short_markdown

BEGIN = "<!-- accuracy: written by `peakcast evaluate --write-readme README.md` -->"
END = "<!-- /accuracy -->"
_CONSOLE = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def accuracy_table(text: str, path: Path) -> str:
    """The text between the markers of `text`, the content of the file at `path`. Raises: RecordError."""
    _, begin, rest = text.partition(BEGIN + "\n")
    table, end, _ = rest.partition(END)
    if not (begin and end):
        raise RecordError(f"{path} has no lines {BEGIN!r} and {END!r}; add them where the table belongs.", parameter="path")
    return table


def write_table(evaluation: Evaluation, path: Path) -> None:
    """Replace the text between the markers of the file at `path`. Raises: RecordError."""
    try:
        text = path.read_text(encoding="utf-8")
        old = f"{BEGIN}\n{accuracy_table(text, path)}{END}"
        path.write_text(text.replace(old, f"{BEGIN}\n{short_markdown(evaluation)}{END}"), encoding="utf-8")
    except OSError as error:
        raise RecordError(f"{path} cannot be rewritten: {error.strerror}; check the path.", parameter="path") from error


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of the console blocks of `text`, with the output shown below it. Lines that begin with `>` continue a
    command, as in a shell."""
    for block in _CONSOLE.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            first, *rest = part.rstrip("\n").split("\n")
            length = next((i for i, line in enumerate(rest) if not line.startswith(">")), len(rest))
            command = "\n".join([first, *(line[1:].removeprefix(" ") for line in rest[:length])])
            yield command, "\n".join(rest[length:])


def run(command: str, folder: Path, first: Sequence[Path] = ()) -> str:
    """The standard output of `command` in `folder`, run by the shell. PATH begins with the folders `first` and with that of
    this interpreter's scripts."""
    path = os.pathsep.join([*map(str, first), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "COLUMNS": "120"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout.rstrip("\n") or done.stderr.rstrip("\n")


def _prompted(command: str) -> str:
    """`command` as the page shows it, with `>` before continued lines."""
    return "\n".join(line.rstrip() for line in command.replace("\n", "\n> ").split("\n"))


def with_outputs(text: str, answer: Callable[[str], str]) -> str:
    """`text`, in which the output below each command is replaced by `answer(command)`."""

    def refreshed(block: re.Match[str]) -> str:
        asked = [command for command, _ in commands(f"```console\n{block.group(0)}```\n")]
        shown = [(command, answer(command)) for command in asked]
        return "".join(f"$ {_prompted(command)}\n" + (f"{output}\n" if output else "") for command, output in shown)

    return _CONSOLE.sub(refreshed, text)


def prepare(folder: Path, path: Path) -> Path:
    """Prepare `folder` for the commands of the page at `path`: copy the examples that are beside the page."""
    examples = path.resolve().parent / "examples"
    if examples.is_dir():
        shutil.copytree(examples, folder / "examples")
    return folder


def refresh(path: Path) -> None:
    """Rewrite the outputs in the file at `path`, and its accuracy table if it has one."""
    from peakcast.measurements.store import load
    from peakcast.models.evaluation.evaluation import evaluate

    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare(Path(temporary), path)
        path.write_text(with_outputs(text, lambda command: run(command, folder)), encoding="utf-8")
    if BEGIN in text:
        write_table(evaluate(load()), path)


if __name__ == "__main__":
    refresh(Path(sys.argv[1] if len(sys.argv) > 1 else "README.md"))
