"""Reads the histories of `datasets/published/histories`: one JSON value a line, first a header, then the events.

`datasets/published/histories/README.md` describes the format. Files may also come from strangers, so the memory that they
can take is limited, and anything unexpected becomes one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

from peakcast.core.errors import RecordError, SpecError
from peakcast.core.units import MIB
from peakcast.histories.history import Action, Event, HandedOut, History, Segment
from peakcast.jobs.allocator_settings import Allocator, parse_allocator

FORMAT = "allocator history 1"
MAX_LINE_BYTES = 32 * MIB
"""The longest header of the published files has 0.2 MB."""
MAX_EVENTS = 5_000_000
ADDRESS_LIMIT = 1 << 57
"""Larger than any address on a GPU."""
ACTIONS = {
    "a": Action.ALLOC,
    "f": Action.FREE,
    "r": Action.LET_GO,
    "c": Action.FREE_LATER,
    "S": Action.SEGMENT_ALLOC,
    "M": Action.SEGMENT_ALLOC,
    "s": Action.SEGMENT_FREE,
    "m": Action.SEGMENT_FREE,
    "O": Action.OUT_OF_MEMORY,
}


def published_history(file: IO[bytes], name: str) -> History:
    """The history that the lines of `file` hold. Raises: RecordError naming the line."""
    lines = _lines(file, name)
    _, header = next(lines, (1, None))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RecordError(
            f"{name}, line 1: not the header of an allocator history (a mapping with format: {FORMAT!r}); give a snapshot "
            "of torch.cuda.memory._dump_snapshot or a file of datasets/published/histories."
        )
    try:
        unit = _whole(header.get("address_unit", 512))
        begun = _begun(header, name, unit)
    except (KeyError, TypeError, ValueError, SpecError) as error:
        raise RecordError(f"{name}, line 1: the header lacks something or has it wrong ({error!r}).") from error
    events, categories = _events(lines, name, unit, begun.categories)
    made = sum(event.action is Action.ALLOC for event in events)
    if made != header.get("allocations", made):
        raise RecordError(f"{name} is cut off: {made:,} allocations of {header['allocations']!r:.40}.")
    return replace(begun, events=events, categories=categories)


def _begun(header: dict[str, Any], name: str, unit: int) -> History:
    """The history before its first event. `unit`: bytes of one step of an address."""
    return History(
        name=name,
        device=_whole(header.get("device", 0)),
        torch=str(header.get("torch") or ""),
        gpu=str(header.get("gpu") or ""),
        settings=_settings(header),
        segments=tuple(_segment(row, unit) for row in header["initial"]["segments"]),
        blocks=tuple(HandedOut(_whole(a) * unit, _whole(s), _whole(r)) for a, s, r in header["initial"]["blocks"]),
        events=(),
        categories=tuple(str(text) for text in header["categories"]),
        peak_reserved_bytes=_whole(header["real"]["peak_reserved"]),
    )


def _events(
    lines: Iterator[tuple[int, Any]], name: str, unit: int, known: tuple[str, ...]
) -> tuple[tuple[Event, ...], tuple[str, ...]]:
    """The events of `lines`, and all categories: the `known` ones of the header, then those that marks of the program
    name."""
    events: list[Event] = []
    categories, num_categories = list(known), len(known)
    for number, row in lines:
        try:
            event = _event(row, unit, num_categories)
            if row[0] == "!":
                event = event._replace(category=len(categories))
                categories.append(str(row[1]))
            events.append(event)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RecordError(f"{name}, line {number}: not an event of an allocator history ({error!r}).") from error
        if len(events) > MAX_EVENTS:
            raise RecordError(f"{name}: more than {MAX_EVENTS:,} events; give a shorter recording.")
    return tuple(events), tuple(categories)


def _lines(file: IO[bytes], name: str) -> Iterator[tuple[int, Any]]:
    """(number, value) of each line; lines have a limited length. Many are decoded at once, which is three times as fast."""
    first = 1
    while lines := _some(file, name, first):
        try:
            values = json.loads(b"[" + b",".join(lines) + b"]")
            if len(values) != len(lines):
                raise ValueError("a line holds more than one value")
        except (ValueError, RecursionError):
            values = [_value(line, name, number) for number, line in enumerate(lines, first)]
        yield from enumerate(values, first)
        first += len(lines)


def _some(file: IO[bytes], name: str, first: int) -> list[bytes]:
    """The next lines: the header alone, then about a megabyte."""
    found: list[bytes] = []
    size = 0
    while not found or (first > 1 and size < 1_000_000):
        if not (line := file.readline(MAX_LINE_BYTES)):
            break
        size += len(line)
        if len(line) == MAX_LINE_BYTES:
            number = first + len(found)
            raise RecordError(f"{name}, line {number}: longer than {MAX_LINE_BYTES:,} bytes; no history has such lines.")
        found.append(line)
    return found


def _value(line: bytes, name: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{name}, line {number}: not JSON ({error}); the file is damaged or cut off.") from error


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < ADDRESS_LIMIT:
        raise ValueError(f"{str(value)[:40]!r} is no number of bytes")
    return value


def _settings(header: dict[str, Any]) -> Allocator:
    text = header.get("settings") or ""
    if not text and header.get("expandable_segments"):
        text = "expandable_segments:True"
    return parse_allocator(str(text))


def _segment(row: list[Any], unit: int) -> Segment:
    address, size, stream, kind = row
    return Segment(_whole(address) * unit, _whole(size), _whole(stream), kind == "small")


def _event(row: list[Any], unit: int, num_categories: int) -> Event:
    action = ACTIONS.get(row[0])
    if action is None:  # a mark of the program
        return Event(Action.MARK)
    category = -1
    if action is Action.ALLOC:
        category = row[4]
        if type(category) is not int or not 0 <= category < num_categories:
            raise ValueError(f"category {str(category)[:40]} of {num_categories}")
    _, address, size, stream, *_ = row
    for number in (address, size, stream):
        if type(number) is not int or not 0 <= number < ADDRESS_LIMIT:
            raise ValueError(f"{str(number)[:40]!r} is no number of bytes")
    return Event(action, address * unit, size, stream, category)
