"""The names that users import, as `public_api.txt` lists them: a change of any is seen and meant.

`python -P tests/test_public_api.py` writes the list again; what it changes goes into CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import peakcast
from peakcast import api

LIST = Path(__file__).parent / "public_api.txt"
WIDTH = 120


def _function(name: str, function: Any) -> Iterator[str]:
    signature = str(inspect.signature(function)).replace("'", "")
    if len(name + signature) <= WIDTH:
        yield name + signature
        return
    *_, result = signature.rpartition(" -> ")
    yield f"{name}("
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY is not kind:
            yield "    *,"
        kind = parameter.kind
        yield f"    {parameter},".replace("'", "")
    yield f") -> {result}"


def _class(name: str, kind: type) -> Iterator[str]:
    yield f"{name}({', '.join(base.__name__ for base in kind.__bases__)})"
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        default = "" if field.default is dataclasses.MISSING else f" = {_shown(field.default)}"
        made = "" if field.default_factory is dataclasses.MISSING else f" = {_shown(field.default_factory())}"
        yield f"    {field.name}: {field.type}{default}{made}"
    for member, value in sorted(vars(kind).items()):
        value = getattr(value, "__func__", value)
        if member.startswith("_"):
            continue
        if isinstance(value, (property, cached_property)):
            computed = value.fget if isinstance(value, property) else value.func
            yield f"    {member} -> {inspect.signature(computed or len).return_annotation}"
        elif inspect.isfunction(value):
            yield f"    {member}{inspect.signature(value)}".replace("'", "")


def _shown(value: object) -> str:
    """A default; of a value of ours its class, whose own fields are listed."""
    return f"{type(value).__name__}()" if dataclasses.is_dataclass(value) else repr(value)


def _named(kind: type) -> Iterator[type]:
    """The dataclasses of ours that the fields of `kind` are of."""
    known = vars(sys.modules[kind.__module__])
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        for word in re.findall(r"\w+", str(field.type)):
            found = known.get(word)
            if isinstance(found, type) and dataclasses.is_dataclass(found):
                yield found


def public_api() -> str:
    """Every exported name with its signature or fields, and the classes that fields are of."""
    exported = {name: getattr(peakcast, name) for name in sorted(peakcast.__all__) if not name.startswith("__")}
    lines: list[str] = [f"peakcast.__all__ = {' '.join(peakcast.__all__)}", ""]
    waiting = {value: f"peakcast.{name}" for name, value in exported.items() if isinstance(value, type)}
    done: dict[str, list[str]] = {}
    while waiting:
        kind, name = waiting.popitem()
        done[name] = [*_class(name, kind), ""]
        for inner in _named(kind):
            if (inside := f"{inner.__module__}.{inner.__qualname__}") not in done and inner not in exported.values():
                waiting[inner] = inside
    functions = {f"peakcast.{name}": value for name, value in exported.items() if not isinstance(value, type)}
    functions |= {f"peakcast.api.{name}": getattr(api, name) for name in api.__all__ if name not in exported}
    for name, function in sorted(functions.items()):
        done[name] = [*(_class if isinstance(function, type) else _function)(name, function), ""]
    lines += [line for name in sorted(done, key=lambda name: (name.count("."), name)) for line in done[name]]
    text = "\n".join(lines).rstrip().replace(sys.executable, "sys.executable") + "\n"  # a default, and where it is
    return text.replace(repr(print), "<built-in function print>")  # ray replaces it in a process that has used it


def test_the_public_names_are_those_that_are_listed() -> None:
    assert public_api() == LIST.read_text(encoding="utf-8"), "python -P tests/test_public_api.py lists them again"


def test_every_exported_name_is_typed_for_checkers() -> None:
    source = Path(peakcast.__file__).read_text(encoding="utf-8")
    declared = re.findall(r"^    from \S+ import (\w+) as \1$", source, re.MULTILINE)
    assert ["__version__", *sorted(declared)] == peakcast.__all__


if __name__ == "__main__":
    LIST.write_text(public_api(), encoding="utf-8")
