"""Mappings (YAML, JSON) to frozen dataclasses and back, strictly: unknown keys and wrong types are refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from peakcast.core.errors import SpecError, near_misses

T = TypeVar("T")
_LARGEST = sys.float_info.max
MOST = 2**40
"""No whole number of a job may be larger than this, or smaller than its negative, so that products of some of them fit into
64 bits."""


@functools.cache
def _readers(cls: Any) -> dict[str, Reader]:
    """Name of each annotated field -> how its values are read."""
    return {name: _reader(hint) for name, hint in typing.get_type_hints(cls).items()}


@functools.cache
def _keys(cls: Any) -> dict[str, bool]:
    """Name of each field that can be given -> whether it is required."""
    unset = dataclasses.MISSING
    return {f.name: f.default is unset and f.default_factory is unset for f in dataclasses.fields(cls) if f.init}


class HashedOnce:
    """Base of a frozen dataclass that is a key of many caches. It computes its hash once; otherwise each look-up would
    visit all its fields. A subclass must say `__hash__ = HashedOnce.__hash__`, because a dataclass defines one of its
    own."""

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        cls: Any = type(self)
        return hash(tuple(map(self.__dict__.__getitem__, _keys(cls))))

    def __getstate__(self) -> dict[str, Any]:
        """The state without the hash, which is only valid in this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}


def build(cls: type[T], mapping: object, where: str = "") -> T:
    """An instance of the dataclass `cls` from `mapping`, whose keys are the field names.

    `where` prefixes the parameter name in messages ("parallelism.").
    Raises: SpecError naming the key, the value, what is allowed and near misses.
    """
    readers: dict[str, Reader] = _readers(cls)  # type: ignore[arg-type]
    if not isinstance(mapping, Mapping):
        raise SpecError(
            f"{where.rstrip('.') or 'the job'}={mapping!r} must be a mapping with the keys {', '.join(readers)}.",
            parameter=where.rstrip(".") or None,
            value=mapping,
        )
    known = _keys(cls)  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            raise SpecError(
                f"{where}{key} is not a known key{near_misses(str(key), known) or '; known: ' + ', '.join(sorted(known))}",
                parameter=f"{where}{key}",
                value=mapping[key],
            )
    values = {key: readers[key](value, where + key) for key, value in mapping.items()}
    missing = [key for key, required in known.items() if required and key not in values]
    if missing:
        raise SpecError(
            f"{where}{missing[0]} is required and missing; add it to the mapping.", parameter=where + missing[0]
        )
    return cls(**values)


def unsaid(default: Any) -> Any:
    """A dataclass field that `to_mapping` leaves out if it has its default. For fields that few jobs use: they would make
    every stored job longer, and change its hash when they are added."""
    return dataclasses.field(default=default, metadata={"unsaid": True})


def to_mapping(value: object) -> Any:
    """The plain JSON-able form of a dataclass built by `build`; `build(type(v), to_mapping(v)) == v`."""
    kind: Any = type(value)
    if kind in _PLAIN:  # most values by far
        return value
    if dataclasses.is_dataclass(value):
        said = {name: getattr(value, name) for name in _keys(kind)}
        left_out = [name for name, default in _unsaid(kind) if said[name] == default]
        for name in left_out:
            del said[name]
        return {name: item if type(item) in _PLAIN else to_mapping(item) for name, item in said.items()}
    if isinstance(value, FrozenMapping):
        return {key: to_mapping(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [to_mapping(item) for item in value]
    return value


_PLAIN = frozenset((str, int, float, bool, type(None)))


@functools.cache
def _unsaid(cls: Any) -> tuple[tuple[str, object], ...]:
    """Name and default of each field that is left out with its default."""
    return tuple((f.name, f.default) for f in dataclasses.fields(cls) if f.init and f.metadata.get("unsaid"))


class FrozenMapping(Mapping[str, Any]):
    """A hashable mapping of names to plain values, in sorted order; for open-ended options of a job."""

    __slots__ = ("_hash", "_items")

    def __init__(self, mapping: Mapping[str, Any] | None = None) -> None:
        self._hash: int | None = None
        self._items = {
            key: tuple(value) if isinstance(value, list) else value for key, value in sorted((mapping or {}).items())
        }

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> typing.Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(tuple(self._items.items()))
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """The value without the hash, which is only valid in this process."""
        return FrozenMapping, (self._items,)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenMapping):
            return self._items == other._items
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __repr__(self) -> str:
        return repr(self._items)


def _refuse(where: str, value: object, rule: str) -> SpecError:
    return SpecError(f"{where}={value!r} must be {rule}.", parameter=where, value=value)


Reader = Callable[[Any, str], Any]
"""The value of a field from what a mapping has there, which messages name by the second argument."""


@functools.cache
def _reader(hint: Any) -> Reader:
    """How values of a field of type `hint` are read. A type is looked at once: thousands of rows have the same ones."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        present = _reader(next(option for option in inner if option is not type(None)))
        return functools.partial(_optional, present) if type(None) in inner else present
    if origin is Literal:
        return functools.partial(_one_of, inner)
    if origin is tuple:
        return functools.partial(_list, _reader(inner[0]))
    if hint is FrozenMapping:
        return _frozen_mapping
    if dataclasses.is_dataclass(hint):
        return functools.partial(_built, typing.cast(type, hint))
    return functools.partial(_scalar, hint)


def _optional(present: Reader, value: Any, where: str) -> Any:
    return None if value is None else present(value, where)


def _list(item_of: Reader, value: Any, where: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise _refuse(where, value, "a list")
    return tuple(item_of(item, f"{where}[{i}]") for i, item in enumerate(value))


def _frozen_mapping(value: Any, where: str) -> FrozenMapping:
    if not isinstance(value, Mapping):
        raise _refuse(where, value, "a mapping")
    for key, item in value.items():
        if not all(map(_is_plain, item if isinstance(item, (list, tuple)) else [item])):
            raise _refuse(f"{where}.{key}", item, "a text, a number, true or false, null, or a list of those")
    return FrozenMapping(value)


def _built(cls: type, value: Any, where: str) -> Any:
    return value if isinstance(value, cls) else build(cls, value, where + ".")


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, bool, float, type(None))) or (isinstance(value, int) and -MOST <= value <= MOST)


def _one_of(allowed: tuple[Any, ...], value: Any, where: str) -> Any:
    if any(value == option and type(value) is type(option) for option in allowed):
        return value
    names = [str(option) for option in allowed]
    raise _refuse(where, value, f"one of {', '.join(names)}{near_misses(str(value), names)}".rstrip("?"))


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise _refuse(where, value, "true or false")
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or int_like(value) is None:
            raise _refuse(where, value, "a whole number")
        if not -MOST <= value <= MOST:
            raise _refuse(where, value, f"at most {MOST:,} and at least as much below 0")
        return int(value)
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_LARGEST <= value <= _LARGEST:
            raise _refuse(where, value, "a finite number")
        return float(value)
    if hint is str:
        if not isinstance(value, str):
            raise _refuse(where, value, "a text")
        return value
    return value


def int_like(value: object) -> int | None:
    """`value` as an int if it is a whole number, else None (also for infinities)."""
    if isinstance(value, int):
        return value
    if not isinstance(value, float):
        return None
    return int(value) if math.isfinite(value) and value.is_integer() else None


def require_positive(owner: object, *names: str, where: str = "") -> None:
    """Refuse those fields of `owner` among `names` that are set and less than 1."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < 1:
            raise SpecError(f"{where}{name}={value} must be at least 1.", parameter=where + name, value=value)


def require_not_negative(owner: object, *names: str, where: str = "") -> None:
    """Refuse those fields of `owner` among `names` that are less than 0."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < 0:
            raise SpecError(f"{where}{name}={value} must not be negative.", parameter=where + name, value=value)


def require_at_most(most: int, owner: object, *names: str, where: str = "") -> None:
    """Refuse those fields of `owner` among `names` that are set and above `most`, a limit far above real values."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value > most:
            raise SpecError(f"{where}{name}={value:,} must be at most {most:,}.", parameter=where + name, value=value)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`values` with the keys of inner mappings joined by dots; empty mappings are left out."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out.update(flat(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value
    return out
