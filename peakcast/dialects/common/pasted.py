"""`Pasted`: a configuration of another project as the user gave it, with its other files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from peakcast.core.bounded import is_file
from peakcast.core.errors import SpecError
from peakcast.dialects.common.asked_versions import NO_VERSIONS, AskedVersions
from peakcast.dialects.common.text import format_of, parse, read_text
from peakcast.dialects.common.translation import Notes

THE_TEXT = "the text"
"""Name for a configuration that was given as text, in messages."""
MOST_ABOVE = 4
"""Folders above a configuration in which the files that it names are searched."""
_READS = re.compile(r"The script's '(source|\.) ")
"""Beginning of the remark about a file that a script reads and that is not there (`shell/script.py`)."""
_BETWEEN = re.compile(r"^---(.*)$", re.MULTILINE)


class Document(NamedTuple):
    """One of several configurations in one text."""

    name: str
    """Name of the file that it replaces; "" if the text does not say."""
    text: str


def documents(text: str) -> list[Document]:
    """The parts of `text` between lines of `---`. Each has the name that follows the dashes above it (`---
    ds_config.json`). Empty parts are left out, but there is always one."""
    first, *rest = _BETWEEN.split(text)
    parts = [Document("", first), *(Document(name.strip(), part) for name, part in zip(rest[::2], rest[1::2], strict=True))]
    return [part for part in parts if part.text.strip()] or [Document("", text)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pasted:
    """The input of a dialect."""

    values: Mapping[str, Any]
    where: str = "the configuration"
    """Its name in messages: the file's name."""
    folder: Path | None = None
    """The folder in which files that it names are searched."""
    companions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other files that were given with it, by dialect ("deepspeed") and by file name ("ds_z3_config.json")."""
    num_gpus: int | None = None
    """GPUs of the whole run, as asked for or from the launcher; None if neither says."""
    model: str | Mapping[str, Any] | None = None
    """The network to use instead of the named one: its name, or the mapping of its config.json."""
    env: Mapping[str, str] = field(default_factory=dict)
    program: str = ""
    """The program that the launch script runs; "" if there is none."""
    used: set[str] = field(default_factory=set)
    """Names of the companions that were read."""
    versions: AskedVersions = NO_VERSIONS
    """Package versions that the question gives in addition."""
    remarks: tuple[str, ...] = ()
    """Sentences about parts of a launch script that were not followed."""
    unset: Mapping[str, str] = field(default_factory=dict)
    """Flag of a launch script whose value is a variable that nothing sets -> the variable's name."""

    def gpus(self, notes: Notes, default: int = 1, why: str = "") -> int:
        """The number of GPUs; `default` with an assumption if it is not given."""
        if self.num_gpus is not None:
            return self.num_gpus
        notes.assumptions.append(f"the number of GPUs is not given; {default} is assumed{why}. --num-gpus changes it.")
        return default

    def file(self, name: object, role: str, key: str) -> Mapping[str, Any]:
        """The mapping in the file `name`, to which `key` refers. A file that the question gives too comes first. Otherwise
        `name` is a path from the folder of the configuration, or from a folder above it, as projects are often run from
        their root.

        Raises: SpecError saying that it is missing and how to give it.
        """
        if isinstance(name, Mapping):
            return name
        if name is True and role not in self.companions:
            raise SpecError(f"{key} in {self.where} names no file; give the file {self.beside()}.", parameter=key)
        path = Path(str(name))
        for known in (path.name, role):
            if known in self.companions:
                self.used.add(known)
                return self.companions[known]
        for folder in (self.folder, *self.folder.absolute().parents[:MOST_ABOVE]) if self.folder is not None else ():
            if is_file(folder / path):
                return mapping_of_file(folder / path)
        for candidate in (path, self.folder / path.name) if self.folder is not None else ():
            if is_file(candidate):
                return mapping_of_file(candidate)
        raise SpecError(
            f"{key}={str(name)!r} in {self.where} is another file, and it is not here; give it {self.beside(path.name)}.",
            parameter=key,
            value=str(name),
        )

    def explained(self, error: SpecError) -> SpecError:
        """`error`, with the variable that the launch script takes the value from, if nothing sets that variable."""
        key = str(error.parameter).replace("-", "_")
        variable = next((name for flag, name in self.unset.items() if flag.replace("-", "_") == key), None)
        if variable is None:
            unread = next((remark for remark in self.remarks if _READS.match(remark)), "")
            if not unread or "missing" not in error.message:
                return error
            way_out = f"{unread} That file is not here: put it beside the script, or write its lines into the script."
            return SpecError(f"{error.message} {way_out}", parameter=error.parameter, value=error.value)
        way_out = f"The script takes it from ${variable}, which is not set: write a line {variable}=... above the command."
        return SpecError(f"{error.message} {way_out}", parameter=error.parameter, value=error.value)

    def beside(self, name: str = "") -> str:
        """Words for a message that say how the user can give another file (called `name`), on the command line or with a
        text."""
        if self.where != THE_TEXT:
            return f"by --with {name or 'FILE'}"
        return f"below, after a line of --- {name}".rstrip()


def mapping_of_file(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML, JSON or TOML file. Raises: SpecError."""
    return mapping_of_text(read_text(path), str(path), path.suffix)


def mapping_of_text(text: str, where: str, ending: str = "") -> Mapping[str, Any]:
    """The mapping in the `text` of a YAML, JSON or TOML file, whose name in messages is `where`. Raises: SpecError."""
    kind = format_of(text, ending)
    if kind not in ("JSON", "YAML", "TOML"):
        raise SpecError(f"{where} is no YAML, JSON or TOML file.")
    value = parse(text, kind, where)
    if not isinstance(value, dict):
        raise SpecError(f"{where} must hold a mapping of keys to values, not {type(value).__name__}.")
    return value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`: keys with dots become inner mappings. Raises: SpecError if two keys contradict each other."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        place = out
        *parents, name = str(key).split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise SpecError(
                    f"{key}={value!r} goes inside {parent}, which is given as a value.", parameter=key, value=value
                )
        place[name] = value
    return out


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` updated with `changes`, inner mappings key by key."""
    out = dict(values)
    for key, value in changes.items():
        old = out.get(key)
        out[key] = merged(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return out
