"""Finds the counters of a script's own loop, and leads them to its last steps.

What a script changes with the number of the step (the length of its sequences, a window, which layers train) is not seen
in its first steps. A counter is a whole number of the script's that has grown by the same amount with each of the last
steps: a variable of a function that is running, of the module, or a field of an object of the script's own class.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from peakcast.collectors.dryrun.counter_uses import CounterUses, is_plain, targets_at, uses_of
from peakcast.collectors.dryrun.noted import is_of_script, short_path

LEFT = 3
"""The steps before the loop's end that are left to follow: two that are whole, and what scripts do with the last one."""
UNBOUNDED = 10_000
"""So many steps a counter is led on where the script does not say how far it counts."""
OF_LIBRARIES = ("global_step", "global_steps")
"""Fields in which Trainers and engines of libraries count steps."""
FEWEST = 2
"""Steps to skip for which nothing is led on."""


@dataclass(frozen=True)
class Counter:
    """A number that grows by `by` with each step."""

    owner: int
    """The identity of what has it: a frame, a module's variables, an object."""
    name: str
    value: int
    by: int
    uses: CounterUses
    place: str
    """The first place where something follows from it; "" if nothing does."""


@dataclass(frozen=True)
class Lead:
    """How far a loop was led on."""

    skipped: int
    """Steps that are left out."""
    name: str
    number: int
    """The counter that decides something, and its value when it was led on."""
    place: str
    """Where the script uses it."""


class Counters:
    """The counters of the script that runs in this process."""

    def __init__(self) -> None:
        self._seen: list[dict[tuple[int, str], int]] = []
        self._moved: dict[CodeType, dict[str, tuple[int, int]]] = {}
        """Function -> name of a variable -> (values below this one are the loop's own, what is added to them)."""

    def end_step(self) -> None:
        """Note the script's numbers at the end of a step."""
        seen = {(owner, name): value for owner, name, value in _numbers()}
        self._seen = [*self._seen[-2:], seen]

    def lead(self) -> Lead | None:
        """Lead the loop on to its last steps; None if nothing but reports and learning rates follows from its counters."""
        found = [one for one in self._found() if not one.uses.cuts]
        deciding = next((one for one in found if one.uses.lines), None)
        if deciding is None or sys.gettrace() is not None:
            return None
        skipped = _to_skip(found)
        if skipped < FEWEST:
            return None
        self._move({(one.owner, one.name): skipped * one.by for one in found})
        number = deciding.value + skipped * deciding.by
        return Lead(skipped, deciding.name, number, deciding.place)

    def unmoved(self) -> list[tuple[str, str]]:
        """(name, a place that asks for it) of the variables of outer loops that have had one value, such as epochs, and of
        a library's own counters."""
        moved = {name for counted in self._moved.values() for name in counted} | {one.name for one in self._found()}
        found = []
        for file, at in _lines().items():
            for name in dict.fromkeys(targets_at(_tree(file), at)):
                values = {now.get((owner, name)) for now in self._seen for owner, key in now if key == name}
                turns = uses_of(name, _tree(file), at).turns
                if name not in moved and turns and len(values) == 1 and values != {None}:
                    found.append((name, f"{short_path(file)}:{turns[0]}"))
            for name in sorted(set(OF_LIBRARIES) - moved):
                lines = uses_of(name, _tree(file), at, is_field=True).lines
                found += [(name, f"{short_path(file)}:{lines[0]}")] if lines else []
        return found

    def _found(self) -> list[Counter]:
        if len(self._seen) < 3:
            return []
        first, second, last = self._seen
        grown = {key: value - second[key] for key, value in last.items() if key in second and key in first}
        steady = {key: by for key, by in grown.items() if by > 0 and by == second[key] - first[key]}
        variables = {id(each) for frame in _own_frames() for each in (frame, frame.f_globals)}
        uses = {key: _uses(key[1], is_field=key[0] not in variables) for key in steady}
        return [Counter(*key, last[key], by, *uses[key]) for key, by in steady.items()]

    def _move(self, added: Mapping[tuple[int, str], int]) -> None:
        """Add to each number, by its owner and name: to fields at once, to variables whenever the loop has given them a new
        value."""
        for frame in _own_frames():
            for key in (id(frame), id(frame.f_globals)) if _is_module(frame) else (id(frame),):
                now = {name: more for (owner, name), more in added.items() if owner == key}
                if now:
                    held = _variables(frame)
                    self._moved[frame.f_code] = {name: (held[name] + more // 2, more) for name, more in now.items()}
                    frame.f_trace = self._line
        running = {id(frame.f_globals) for frame in _own_frames() if _is_module(frame)}
        for owner, fields in _fields():
            for name in [name for one, name in added if one == owner and owner not in running]:
                fields[name] += added[owner, name]
        sys.settrace(lambda *_: None)  # Python looks at `f_trace` only while something traces

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        """Python calls this before each line of a function with counters."""
        held = frame.f_locals
        for name, (below, more) in self._moved[frame.f_code].items():
            value = held.get(name)
            if type(value) is int and value < below:
                held[name] = value + more
        return self._line


def _to_skip(found: list[Counter]) -> int:
    """The steps to skip, by what the counters are compared with."""
    ends = [(end - one.value) // one.by for one in found for end in _values(one.uses.ends) if end > one.value]
    if ends:
        return int(min(ends)) - LEFT
    beyond = [(to - one.value) // one.by for one in found for to in _values(one.uses.thresholds) if to > one.value]
    return max(UNBOUNDED, *(int(2 * steps) for steps in beyond), 0)


def _values(expressions: list[ast.expr]) -> Iterator[int]:
    """The values of expressions in the functions that run, those that have one."""
    for expression in filter(is_plain, expressions):
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<limit>", "eval")
        for frame in _own_frames():
            try:
                value = eval(code, frame.f_globals, dict(_variables(frame)))  # names, fields and sums of the script
                yield int(value)
            except Exception:
                continue
            break


def _numbers() -> Iterator[tuple[int, str, int]]:
    """(identity of the owner, name, value) of the script's own whole numbers."""
    for frame in _own_frames():
        if not _is_module(frame):
            yield from ((id(frame), name, value) for name, value in _variables(frame).items() if type(value) is int)
    for owner, fields in _fields():
        yield from (
            (owner, name, value) for name, value in list(fields.items()) if type(value) is int and type(name) is str
        )


def _fields() -> Iterator[tuple[int, MutableMapping[str, Any]]]:
    """(identity of the owner, its fields) of the modules that run and of the objects and mappings in their variables."""
    known: set[int] = set()
    for frame in _own_frames():
        held = [] if _is_module(frame) else [*_variables(frame).values()]
        for one in (frame.f_globals, *held, *frame.f_globals.values()):
            fields = one if type(one) is dict else vars(one) if _is_of_script(one) else None
            if fields is not None and id(fields) not in known:
                known.add(id(fields))
                yield id(fields), fields


def _is_of_script(one: object) -> bool:
    """Whether an object is of a class of the script's own, with fields."""
    kind = type(one)
    if isinstance(one, type) or not hasattr(one, "__dict__"):
        return False
    module = getattr(sys.modules.get(kind.__module__), "__file__", None)  # None in a copy of a function's process
    methods = (method.__code__.co_filename for method in vars(kind).values() if inspect.isfunction(method))
    return is_of_script(module or next(methods, "<unknown>"))


def _own_frames() -> Iterator[FrameType]:
    """The frames of the script's own functions that run, the innermost first. One that has asked for `locals()` is left
    out, which are the same mapping as `f_locals`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_script(frame.f_code.co_filename) and (_is_module(frame) or "locals" not in frame.f_code.co_names):
            yield frame
        frame = frame.f_back


def _is_module(frame: FrameType) -> bool:
    return not frame.f_code.co_flags & inspect.CO_OPTIMIZED


def _variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame; a copy, since before Python 3.13 `f_locals` would keep tensors in memory."""
    held = frame.f_locals
    copied = dict(held)
    if not _is_module(frame) and type(held) is dict:
        held.clear()
    return copied


def _lines() -> dict[str, list[int]]:
    """The script's own files that run -> the lines that their functions are at."""
    lines: dict[str, list[int]] = {}
    for frame in _own_frames():
        lines.setdefault(frame.f_code.co_filename, []).append(frame.f_lineno)
    return lines


def _uses(name: str, *, is_field: bool) -> tuple[CounterUses, str]:
    """The uses of `name` in all own files that run, and the place of the first one."""
    found, place = CounterUses(), ""
    for file, at in _lines().items():
        there = uses_of(name, _tree(file), at, is_field=is_field)
        place = place or (f"{short_path(file)}:{there.lines[0]}" if there.lines else "")
        found.lines += there.lines
        found.ends += there.ends
        found.thresholds += there.thresholds
        found.cuts = found.cuts or there.cuts
    return found, place


@cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])
