"""Configuration text to plain values: JSON, YAML's safe subset, TOML. Nothing is run; size and depth are bounded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from peakcast.errors import SpecError

MAX_FILE_BYTES = 4 * 2**20
"""A configuration larger than this is not one; refused before it is parsed."""
MAX_SLOW_CHARACTERS = 2**19
"""The same for YAML and TOML, whose parsers need seconds for a megabyte."""
MAX_DEPTH = 100
"""Mappings and lists of YAML inside one another."""
MAX_VALUES = 200_000
"""Values in one YAML document, each alias counted as everything that it stands for."""

ENDINGS = {
    ".json": "JSON", ".yaml": "YAML", ".yml": "YAML", ".toml": "TOML",
    ".sh": "shell", ".bash": "shell", ".slurm": "shell", ".sbatch": "shell", ".py": "Python",
}  # fmt: skip
"""What a file is by its ending."""
_COMMAND = re.compile(
    r"^#!.*\b(?:ba|z)?sh\b|^\s*(?:export\s+\w+=|\w+=\(|(?:torchrun|srun|deepspeed|accelerate|python3?|axolotl|llamafactory-cli)\s)"
    r"|^\s*\S*pretrain_\w+\.py\b",
    re.MULTILINE,
)
_TABLE = re.compile(r"\A(?:\s*(?:#.*)?\n)*\s*(?:\[[\w.\"-]+\]|[\w.]+\s*=\s*\S)")


_FILES_ARE_READ: ContextVar[bool] = ContextVar("files_are_read", default=True)


@contextmanager
def no_files() -> Iterator[None]:
    """Inside it no file that a question names is read: who asks may be somebody else than whose files they are."""
    token = _FILES_ARE_READ.set(False)
    try:
        yield
    finally:
        _FILES_ARE_READ.reset(token)


def read_text(path: Path, *, named: bool = True) -> str:
    """The text of a file; `named`: the question names it. Raises: SpecError when it is missing, too large or not UTF-8."""
    if named and not _FILES_ARE_READ.get():
        raise SpecError(f"{str(path)!r} is a path, and no files are read here; paste what the file holds.", value=str(path))
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SpecError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes; a configuration is not that big.")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}; check the path.") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text; give a YAML or JSON file.") from error


def kind_of(text: str, ending: str = "") -> str:
    """What `text` is: JSON, YAML, TOML, shell or Python; by the file's `ending` (".yml") where that says it."""
    if ending.lower() in ENDINGS:
        return ENDINGS[ending.lower()]
    if text.lstrip()[:1] in ("{", "["):
        return "TOML" if _TABLE.match(text) else "JSON"
    if _COMMAND.search(text):
        return "shell"
    return "TOML" if _TABLE.match(text) else "YAML"


def parse(text: str, kind: str, where: str) -> Any:
    """The value in `text`, which is JSON, YAML or TOML; `where` names it in messages. Raises: SpecError."""
    if len(text) > MAX_FILE_BYTES or (kind != "JSON" and len(text) > MAX_SLOW_CHARACTERS):
        raise SpecError(f"{where} has {len(text):,} characters; a configuration is not that big.")
    try:
        return _PARSERS[kind](text)
    except RecursionError as error:
        raise SpecError(f"{where} is nested too deeply to be a configuration.") from error
    except ValueError as error:
        why = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise SpecError(f"{where} is not valid {kind}: {why}.") from error


def _toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _weigh(yaml.parse(text, Loader=loader))
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _weigh(events: Iterable[Any]) -> None:
    """Refuse a YAML document that is too deep, too long or contains itself, from its flat stream of events, before
    anything is built from it: aliases make big things out of small texts."""
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = [(None, 0)]  # anchor and values so far of each collection that is not closed yet
    for event in events:
        name = type(event).__name__
        size = 0
        if name in ("MappingStartEvent", "SequenceStartEvent"):
            open_.append((event.anchor, 1))
        elif name in ("MappingEndEvent", "SequenceEndEvent"):
            anchor, size = open_.pop()
            sizes[anchor or ""] = size
        elif name == "ScalarEvent":
            size = 1
        elif name == "AliasEvent":
            if any(anchor == event.anchor for anchor, _ in open_):
                raise RecursionError
            size = sizes.get(event.anchor, 1)
        open_[-1] = (open_[-1][0], open_[-1][1] + size)
        if len(open_) > MAX_DEPTH:
            raise RecursionError
        if sum(values for _, values in open_) > MAX_VALUES:
            raise ValueError(f"it stands for more than {MAX_VALUES:,} values")


_PARSERS: dict[str, Callable[[str], Any]] = {"JSON": json.loads, "YAML": _yaml, "TOML": _toml}
