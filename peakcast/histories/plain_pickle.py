"""Reads a pickle of plain values: mappings, lists, tuples, texts, numbers, None. Nothing in it can run.

Python's own unpickler calls things that its input names. Even with every global refused, a file can make it reserve
gigabytes (an index of 2**32 in its memo, a length of 2**60) or overflow its stack (a key nested a million deep). This
module reads the same opcodes (protocol 2 to 5, Python 3.11 `Lib/pickle.py`), accepts only those that make plain values and
only texts and whole numbers as keys, and counts what it makes.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from typing import IO, Any

MAX_VALUES = 30_000_000
"""A recording of a million events with stacks has about half as many."""
MAX_BYTES = 1 << 29
"""A recording of 100,000 events with stacks of 40 frames has 25 MB."""
MAX_TEXT_BYTES = 1 << 18
"""The longest names in a snapshot are those of C++ templates, some ten thousand letters."""
MAX_WAITING = 200_000
"""Values that are not yet in a container; Python writes at most 1,000 at a time for each open container."""
MAX_NUMBER_BYTES = 9
"""Bytes of a 64-bit number in two's complement, with room for its sign."""
CHUNK_BYTES = 1 << 20

_SMALL: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
_NUMBERS = {
    ord("K"): (1, struct.Struct("<B")),
    ord("M"): (2, struct.Struct("<H")),
    ord("J"): (4, struct.Struct("<i")),
    ord("G"): (8, struct.Struct(">d")),
}
_EMPTY: dict[int, Callable[[], Any]] = {ord("}"): dict, ord("]"): list}
_SKIPPED = {0x95: 8, 0x80: 1}
"""Opcode -> bytes of its argument, which is not needed: FRAME's number of bytes that belong together, PROTO's version."""
_PUTS = {ord("q"): 1, ord("r"): 4}
_REFUSED = {
    ord("c"): "a global", 0x93: "a global", ord("i"): "a global", ord("R"): "a call", ord("o"): "a call",
    0x81: "a class", 0x92: "a class", ord("b"): "an object's state", ord("P"): "a persistent id",
    ord("Q"): "a persistent id", 0x82: "a registered class", 0x83: "a registered class", 0x84: "a registered class",
}  # fmt: skip


class RefusedPickleError(ValueError):
    """The file is not a pickle of plain values; the message says what was found instead."""


class _Bytes:
    """The content of a file, a chunk at a time."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.data = file.read(CHUNK_BYTES)
        self.seen = 0
        self.ended = False

    def more(self, at: int) -> int:
        """Drop everything before `at` and read on. Returns the new position of the same byte."""
        self.seen += at
        if self.seen > MAX_BYTES:
            raise RefusedPickleError(f"it holds more than {MAX_BYTES:,} bytes")
        read = self.file.read(CHUNK_BYTES)
        self.data = self.data[at:] + read
        self.ended = not read
        return 0


def load(file: IO[bytes]) -> Any:
    """The value that `file` contains. Raises: RefusedPickleError saying what was found and where."""
    collecting = gc.isenabled()
    gc.disable()  # no cycles are made here, and searching for them takes most of the time
    try:
        return _load(_Bytes(file))
    except IndexError:
        raise RefusedPickleError("it is cut off, or its parts are out of order") from None
    except (struct.error, UnicodeDecodeError) as error:
        raise RefusedPickleError(f"it is cut off or damaged ({error})") from None
    finally:
        if collecting:
            gc.enable()


def _check_start(data: bytes) -> None:
    if data[:1] != b"\x80" or len(data) < 2 or not 2 <= data[1] <= 5:
        raise RefusedPickleError("it does not begin as a pickle of protocol 2 to 5 does")


def _refusal(code: int, at: int) -> RefusedPickleError:
    """The error about the opcode at byte `at`."""
    what = _REFUSED.get(code, f"an opcode that no plain value needs ({bytes([code])!r})")
    return RefusedPickleError(f"it holds {what}, at byte {at:,}; such a file is never run")


def _load(source: _Bytes) -> Any:
    data, at = source.data, 0
    _check_start(data)
    values = _PickleStack()
    stack, memo, made = values.stack, values.memo, 0
    while True:
        if len(data) - at < MAX_TEXT_BYTES + 16 and not source.ended:
            at = source.more(at)
            data = source.data
            values.check(made)
        code, at = data[at], at + 1
        if code == 0x6A or code == 0x68:  # LONG_BINGET, BINGET: nearly all of a recording with stacks
            width = 4 if code == 0x6A else 1
            try:
                stack.append(memo[int.from_bytes(data[at : at + width], "little")])
            except KeyError:
                raise RefusedPickleError("it refers to a value that was not given before") from None
            at += width
            continue
        if code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
            continue
        made += 1
        if code in _NUMBERS:
            width, form = _NUMBERS[code]
            stack.append(form.unpack_from(data, at)[0])
            at += width
        elif code in _READERS:
            value, at = _READERS[code](data, at)
            stack.append(value)
        elif code in _PUTS:
            width = _PUTS[code]
            memo[int.from_bytes(data[at : at + width], "little")] = stack[-1]
            at += width
        elif code in _SKIPPED:
            at += _SKIPPED[code]
        elif code == ord("."):
            return values.only()
        elif not values.change(code):
            raise _refusal(code, source.seen + at - 1)


class _PickleStack:
    """The values that are not yet in a container, and those that the file may refer to again."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        """Where in the stack the parts of each open container begin."""
        self.memo: dict[int, Any] = {}

    def check(self, made: int) -> None:
        """Raises: RefusedPickleError if more than `MAX_VALUES` values were made, or too many are in no container."""
        if made > MAX_VALUES:
            raise RefusedPickleError(f"it holds more than {MAX_VALUES:,} values")
        if len(self.stack) + len(self.marks) > MAX_WAITING:
            raise RefusedPickleError("its values are nested too deep, or too many are open at once")

    def only(self) -> Any:
        """The one value that remains. Raises: RefusedPickleError if there are others."""
        if len(self.stack) != 1 or self.marks:
            raise RefusedPickleError("its parts do not make one value")
        return self.stack[0]

    def change(self, code: int) -> bool:
        """Do what an opcode without an argument says. Returns False if it is none that makes plain values."""
        stack = self.stack
        if code in _SMALL:
            stack.append(_SMALL[code])
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code == ord("("):
            self.marks.append(len(stack))
        elif code in (ord("u"), ord("s")):  # SETITEMS, SETITEM
            parts = self._parts(2 if code == ord("s") else None)
            _set_items(stack[-1], parts)
        elif code in (ord("e"), ord("a")):  # APPENDS, APPEND
            parts = self._parts(1 if code == ord("a") else None)
            _list(stack[-1]).extend(parts)
        elif code == ord("t") or 0x85 <= code <= 0x87:  # TUPLE, TUPLE1, TUPLE2, TUPLE3
            stack.append(tuple(self._parts(None if code == ord("t") else code - 0x84)))
        else:
            return False
        return True

    def _parts(self, count: int | None) -> list[Any]:
        """The last `count` values, or all since the last mark, which are removed from the stack."""
        begins = self.marks.pop() if count is None else len(self.stack) - count
        if begins < 0:
            raise IndexError
        parts = self.stack[begins:]
        del self.stack[begins:]
        return parts


def _text(width: int) -> Callable[[bytes, int], tuple[str, int]]:
    """A reader of a text whose length is in `width` bytes. It returns the text and the position after it."""

    def read(data: bytes, at: int) -> tuple[str, int]:
        length = int.from_bytes(data[at : at + width], "little")
        begins = at + width
        if length > MAX_TEXT_BYTES or begins + length > len(data):
            raise RefusedPickleError(f"a text of {length:,} bytes is cut off or longer than any name")
        return data[begins : begins + length].decode("utf-8", "surrogatepass"), begins + length

    return read


def _long_number(data: bytes, at: int) -> tuple[int, int]:
    """A whole number of any length, and the position after it."""
    length = data[at]
    if length > MAX_NUMBER_BYTES:
        raise RefusedPickleError(f"a whole number of {length} bytes")
    return int.from_bytes(data[at + 1 : at + 1 + length], "little", signed=True), at + 1 + length


_READERS: dict[int, Callable[[bytes, int], tuple[Any, int]]] = {
    0x8C: _text(1), ord("X"): _text(4), 0x8D: _text(8), 0x8A: _long_number,
}  # fmt: skip


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise RefusedPickleError("an item is put into something that is no list")
    return value


def _set_items(target: Any, parts: list[Any]) -> None:
    if type(target) is not dict or len(parts) % 2:
        raise RefusedPickleError("an item is put into something that is no mapping")
    for key in parts[::2]:
        if type(key) not in (str, int, bool, type(None)):
            raise RefusedPickleError(
                f"a mapping has a key that is neither a text nor a whole number but {type(key).__name__}"
            )
    target.update(zip(parts[::2], parts[1::2], strict=True))
