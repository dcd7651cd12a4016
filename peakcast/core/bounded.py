"""Limits on input from outside (files, lines, and JSON, YAML and TOML texts), checked before anything is built from it.

Every reader of a file or a text that this package did not write itself uses this module. A file is read as a whole only if
it is a regular file, and never beyond its limit, whatever size it claims; a text is checked before it is parsed.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from peakcast.core.units import MIB

MAX_DEPTH = 100
"""Depth of mappings and lists inside one another. The deepest configuration of a real project has 9."""
MAX_VALUES = 200_000
"""Values in one text, where each alias counts as everything that it stands for."""
MAX_KEYS = 20_000
"""Keys, parts of keys and brackets of a TOML text. For a key of n parts, its parser needs n² steps and as many bytes: a key
of 90,000 took 23 GB."""
MAX_DIGITS = 100
"""Digits of a whole number. Longer numbers do not occur in configurations, and do not fit into a float."""
_TOO_DEEP = f"it is nested too deeply, more than {MAX_DEPTH} mappings and lists inside one another"
MAX_UNSAID_BYTES = 64 * MIB
"""How much longer than its stated size a file may be: some of the system's files state 0, and a shard grows while it is
read."""
PIPE_SECONDS = 10.0
"""How long to wait for everything from a pipe that is read like a file (`<(command)`)."""


def is_file(path: str | Path) -> bool:
    """Whether `path` is a regular file that can be examined. Works for names of any length and content."""
    return _looked_at(path, stat.S_ISREG)


def is_folder(path: str | Path) -> bool:
    """Whether `path` is a folder that can be examined."""
    return _looked_at(path, stat.S_ISDIR)


def exists(path: str | Path) -> bool:
    """Whether there is anything at `path` that can be examined."""
    return _looked_at(path, lambda mode: True)


def _looked_at(path: str | Path, rule: Callable[[int], bool]) -> bool:
    try:
        return rule(os.stat(path).st_mode)
    except (OSError, ValueError):  # a name with a null byte or half a character is a ValueError
        return False


def file_bytes(path: Path, most_bytes: int) -> bytes:
    """The bytes of the file at `path`, or of a pipe that delivers them soon.

    Raises: OSError whose `strerror` gives the reason: larger than `most_bytes`, a device or a folder, or the system's
    reason.
    """
    descriptor = _opened(path)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISFIFO(status.st_mode):
            content = _piped(descriptor, most_bytes)
        else:
            _check_file(status.st_mode)
            if status.st_size > most_bytes:
                raise _too_large(most_bytes)
            most_bytes = min(most_bytes, status.st_size + MAX_UNSAID_BYTES)
            content = _read(lambda: os.read(descriptor, MIB), most_bytes)
    finally:
        os.close(descriptor)
    if len(content) > most_bytes:
        raise _too_large(most_bytes)
    return content


def _too_large(most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes")


def file_stream(path: Path) -> IO[bytes]:
    """The file at `path`, opened for reading in parts; opening never blocks. Raises: OSError, as `file_bytes`."""
    descriptor = _opened(path)
    try:
        _check_file(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def first_bytes(path: Path, count: int) -> bytes:
    """The first `count` bytes of the file at `path`, whatever its size; no bytes if it is not a regular file. Raises:
    OSError."""
    if not is_file(path):
        return b""
    descriptor = _opened(path)
    try:
        return os.read(descriptor, count)
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except ValueError as error:
        raise OSError(errno.EINVAL, "it cannot be the name of a file") from error


def _check_file(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device"
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")


def _read(part: Callable[[], bytes], most_bytes: int) -> bytes:
    content = bytearray()
    while len(content) <= most_bytes and (more := part()):
        content += more
    return bytes(content)


def _piped(descriptor: int, most_bytes: int) -> bytes:
    until = time.monotonic() + PIPE_SECONDS

    def part() -> bytes:
        if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
            raise OSError(errno.ETIMEDOUT, f"it is a pipe that was not closed within {PIPE_SECONDS:g} s")
        return os.read(descriptor, 2**16)

    return _read(part, most_bytes)


def lines_of(stream: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    """The lines of `stream` as they come. If a line is longer than `most_bytes`, its first `most_bytes` + 1 bytes; the rest
    of it is dropped."""
    while line := stream.readline(most_bytes + 1):
        end = line
        while len(end) > most_bytes and not end.endswith(b"\n"):
            end = stream.readline(most_bytes + 1)
        yield line


# -- texts ----------------------------------------------------------------------------------------------------------------


def json_value(text: str, *, strict: bool = False) -> Any:
    """The plain value of a JSON text. `strict`: NaN, infinities and repeated keys are refused.

    Raises: ValueError saying what is wrong with it.
    """
    weight = sum(map(text.count, ",[{"))
    if weight > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    rules: dict[str, Any] = {}
    if strict:
        rules = {"parse_constant": _no_constant, "parse_float": _finite, "object_pairs_hook": _unique}
    try:
        return checked_json(json.loads(text, **rules))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is too large for a number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return mapping


def toml_value(text: str) -> Any:
    """The plain value of a TOML text. Raises: ValueError saying what is wrong with it."""
    import tomllib

    if sum(map(text.count, ".=[{")) > MAX_KEYS:
        raise ValueError(f"it has more than {MAX_KEYS:,} keys and parts of keys")
    # blanks are allowed around the dots of a key; two dots in a row occur in no key
    for piece in re.split(r"[=\[\]{},\n]", text.replace(" ", "").replace("\t", "")):
        if piece.count(".") > MAX_DEPTH and len(re.findall(r"(?<!\.)\.(?!\.)", piece)) > MAX_DEPTH:
            raise ValueError(f"a key has more than {MAX_DEPTH} parts")
    try:
        return checked_json(tomllib.loads(text))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def yaml_value(text: str) -> Any:
    """The plain value of a YAML text, parsed safely: nothing in it can run. Raises: ValueError saying what is wrong."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _weigh(yaml.parse(text, Loader=loader))
        return checked_json(yaml.load(text, Loader=loader))
    except yaml.YAMLError as error:
        # libyaml's scanner has a limit of its own since PyYAML 6.0.4, 1,000 levels, and gives up first
        raise ValueError(_TOO_DEEP if "nesting depth" in str(error) else error) from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except (OverflowError, AttributeError, TypeError, KeyError, IndexError) as error:  # its parsers of dates and numbers
        raise ValueError(f"a value cannot be read ({error})") from error


def _weigh(events: Iterable[Any]) -> None:
    """Refuse a YAML document that is too deep, too long or contains itself. It is checked as a flat stream of events,
    before anything is built from it, because aliases make large values out of small texts. Raises: ValueError or
    RecursionError."""
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = [(None, 0)]  # anchor and values so far of each collection that is not closed yet
    total = 0
    for event in events:
        name = type(event).__name__
        size = 0
        if name in ("MappingStartEvent", "SequenceStartEvent"):
            open_.append((event.anchor, 1))
            total += 1
        elif name in ("MappingEndEvent", "SequenceEndEvent"):
            anchor, size = open_.pop()
            sizes[anchor or ""] = size
        elif name == "ScalarEvent":
            size = 1
            total += 1
            if event.style is None and len(event.value) > MAX_DIGITS and event.value[0] in "0123456789+-.":
                _check_digits(event.value)
        elif name == "AliasEvent":
            if any(anchor == event.anchor for anchor, _ in open_):
                raise RecursionError
            size = sizes.get(event.anchor, 1)
            total += size
        open_[-1] = (open_[-1][0], open_[-1][1] + size)
        if len(open_) > MAX_DEPTH:
            raise RecursionError
        if total > MAX_VALUES:
            raise ValueError(f"it stands for more than {MAX_VALUES:,} values")


def _check_digits(text: str) -> None:
    """Refuse a bare word that is a number with very many digits, also in base 60 (1:30:00) or with underscores."""
    if not set(text) - set("0123456789abcdefABCDEFx+-._:"):
        raise ValueError(f"it has a number of more than {MAX_DIGITS} digits")


_TOO_LONG = 10**MAX_DIGITS


def checked_json(value: Any, depth: int = 0) -> Any:
    """`value` as JSON values: keys and dates become texts. Raises: ValueError if it is too deep or a number is too long."""
    if depth > MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, dict):
        return {_key(key): checked_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [checked_json(item, depth + 1) for item in value]
    if isinstance(value, str):
        return _whole_characters(value)
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        if not -_TOO_LONG < value < _TOO_LONG:
            raise ValueError(f"it has a number of more than {MAX_DIGITS} digits")
        return value
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    raise ValueError(f"it holds a value of the kind {type(value).__name__}, which no configuration has")


def _key(key: object) -> str:
    if isinstance(key, str):
        return _whole_characters(key)
    if isinstance(key, (tuple, frozenset, bytes)):
        raise ValueError("it has a key that is no text")
    return str(checked_json(key))


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has half a character (a surrogate without the other one)") from error
    return text
