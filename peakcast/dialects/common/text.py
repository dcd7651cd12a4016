"""Configuration files and texts: the format of each, and its values. `bounded` has the limits; nothing is run."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from peakcast.core import bounded
from peakcast.core.errors import SpecError

MAX_FILE_BYTES = 4 * 2**20
"""A larger file is no configuration; it is refused before it is parsed."""
MAX_SLOW_CHARACTERS = 2**19
"""The same limit for YAML and TOML, whose parsers take seconds for a megabyte."""

ENDINGS = {
    ".json": "JSON", ".jsonl": "JSON", ".yaml": "YAML", ".yml": "YAML", ".toml": "TOML",
    ".sh": "shell", ".bash": "shell", ".slurm": "shell", ".sbatch": "shell", ".py": "Python", ".ipynb": "JSON",
}  # fmt: skip
"""Ending of a file's name -> its format."""
_COMMAND = re.compile(
    r"^#!.*\b(?:ba|z)?sh\b"
    r"|^[ \t]*(?:\w+=[^\s\"']*[ \t]+)*"
    r"(?:export[ \t]+\w+=|\w+=\(|(?:torchrun|srun|deepspeed|accelerate|python3?|axolotl|llamafactory-cli)\s"
    r"|(?:swift|megatron|trl|litgpt|tune|ray|nemo|automodel|uv|colossalai|oumi|fairseq2)[ \t]+[a-z])"
    r"|^[ \t]*\S{0,400}?pretrain_\w{1,100}\.py\b",
    re.MULTILINE,
)
_PROGRAM = re.compile(r"(?:from\s+[\w.]+\s+import\s|import\s+[\w.]+(?:\s+as\s+\w+)?\s*(?:[,;#]|$))|(?:!|%)pip\s")
"""A line with which only Python programs and the code of notebooks begin."""
_TABLE = re.compile(r"\s*(?:\[[\w.\"-]+\]|[\w.]+\s*=\s*\S)")
"""A line with which only TOML begins, not YAML."""
_KEY = re.compile(r"[A-Za-z_][\w.-]*:(?:\s|$)")
"""A line with which only YAML begins."""
_NO_JSON = re.compile(r",\s*[}\]]|^\s*#", re.MULTILINE)
"""A comma before a closing bracket, or a comment: allowed in YAML, not in JSON."""


_FILES_ARE_READ: ContextVar[bool] = ContextVar("files_are_read", default=True)


@contextmanager
def no_files() -> Iterator[None]:
    """A context in which files named by a question are not read, because the person who asks may not own them."""
    token = _FILES_ARE_READ.set(False)
    try:
        yield
    finally:
        _FILES_ARE_READ.reset(token)


def files_are_read() -> bool:
    """Whether the question comes from the user whose files and token are on this machine: false inside `no_files`."""
    return _FILES_ARE_READ.get()


PICKLES = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
"""The first bytes of a pickle, for each protocol in use."""


def read_text(path: Path, *, named: bool = True) -> str:
    """The text of a file; `named`: whether its path comes from the question. Raises: SpecError when the file is missing,
    too large or not UTF-8."""
    if named and not _FILES_ARE_READ.get():
        raise SpecError(f"{str(path)!r} is a path, and no files are read here; paste what the file holds.", value=str(path))
    try:
        if bounded.first_bytes(path, 2) in PICKLES:
            raise SpecError(
                f"{path} is a pickle, as PyTorch's memory snapshots are: `peakcast replay {path} --against JOB` compares "
                "one with what JOB is predicted to take; give a YAML or JSON file as the job.",
                value=str(path),
            )
        text = bounded.file_bytes(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}; check the path.", value=str(path)) from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text; give a YAML or JSON file.") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def format_of(text: str, ending: str = "") -> str:
    """The kind of `text`: JSON, YAML, TOML, shell or Python; the file's `ending` (".yml") decides if it is known."""
    if ending.lower() in ENDINGS:
        return ENDINGS[ending.lower()]
    begins = (line for line in io.StringIO(text) if line.strip() and not line.lstrip().startswith("#"))
    first = next(begins, "")
    if _PROGRAM.match(first):
        return "Python"
    table = _TABLE.match(first) is not None
    if text.lstrip()[:1] in ("{", "["):
        return "TOML" if table else "YAML" if _NO_JSON.search(text) else "JSON"
    if not _KEY.match(first) and _COMMAND.search(text):
        return "shell"
    return "TOML" if table else "YAML"


def parse(text: str, kind: str, where: str) -> Any:
    """The value in `text`, which is JSON, YAML or TOML; `where` names it in messages. Raises: SpecError."""
    if len(text) > MAX_FILE_BYTES or (kind != "JSON" and len(text) > MAX_SLOW_CHARACTERS):
        raise SpecError(f"{where} has {len(text):,} characters; a configuration is not that big.")
    try:
        return _PARSERS[kind](text)
    except ValueError as error:
        if kind == "JSON" and (questions := _lines_of_json(text)):
            raise SpecError(
                f"{where} holds {questions} JSON values, one a line: give one of them, or ask all of them by `peakcast "
                f'predict --batch {where}`, each line as {{"job": ..., "gpu": "H100-80GB"}}.'
            ) from error
        why = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise SpecError(f"{where} is not valid {kind}: {why}.") from error


def _lines_of_json(text: str) -> int:
    """How many lines `text` has if it is JSON Lines, as batches are; 0 if it is not."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        whole = all(isinstance(bounded.json_value(line), dict) for line in lines)
    except ValueError:
        return 0
    return len(lines) if whole and len(lines) > 1 else 0


_PARSERS: dict[str, Callable[[str], Any]] = {
    "JSON": bounded.json_value, "YAML": bounded.yaml_value, "TOML": bounded.toml_value,
}  # fmt: skip
