"""Timelines in files: compressed JSON of limited size. It is pure data; reading it runs nothing.

A file contains the first and a steady step of one run, and the allocations that belong to no tensor of the framework:
`{"first": {...}, "steady": {...}, "hidden": [{"operator", "phase", "count", "largest_bytes", "bytes_at_peak"}, ...]}`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from peakcast.core.bounded import file_bytes
from peakcast.core.errors import RecordError
from peakcast.core.units import MIB
from peakcast.jobs.spec import canonical_json
from peakcast.timelines.timeline import Timeline

STEPS = ("first", "steady")
MAX_PACKED_BYTES = 4 * MIB
"""A run with larger timelines is stored without them. A step of a network with seven billion parameters takes 0.1 MB."""
MAX_UNPACKED_BYTES = 256 * MIB
"""No more than this is unpacked: a small file can be made so that it expands without end."""
COLUMNS: dict[str, Any] = {
    "categories": np.int8,
    "num_bytes": np.int64,
    "born": np.int64,
    "dies": np.int64,
    "phases": np.int8,
    "streams": np.int8,
    "reusable": np.int64,
}


def timeline_to_mapping(timeline: Timeline) -> dict[str, Any]:
    """A timeline as JSON-able columns."""
    numbers = {name: getattr(timeline, name) for name in COLUMNS}
    return {
        "names": list(timeline.names),
        "modules": list(timeline.modules),
        "labels": list(timeline.labels),
        **{name: None if column is None else column.tolist() for name, column in numbers.items()},
    }


def timeline_from_mapping(mapping: Mapping[str, Any]) -> Timeline:
    """The timeline in a mapping made by `timeline_to_mapping`. Raises: KeyError, ValueError or TypeError for any other
    mapping."""
    numbers = {name: mapping.get(name) for name in COLUMNS}
    columns = {name: None if column is None else np.array(column, COLUMNS[name]) for name, column in numbers.items()}
    lengths = {len(mapping[name]) for name in ("names", "modules", "num_bytes", "born", "dies", "categories")}
    if len(lengths) != 1 or columns["phases"] is None:
        raise ValueError("its columns are not of one length")
    texts = {name: [str(text) for text in mapping[name]] for name in ("names", "modules", "labels")}
    return Timeline(**texts, **columns)  # type: ignore[arg-type]


def pack(content: Mapping[str, Any]) -> bytes | None:
    """`content` as a file's bytes; None if they would be more than `MAX_PACKED_BYTES`."""
    packed = gzip.compress(canonical_json(content).encode(), 6, mtime=0)
    return packed if len(packed) <= MAX_PACKED_BYTES else None


def unpack(data: bytes) -> dict[str, Any]:
    """The content from which `pack` made `data`. Raises: ValueError for anything else."""
    if len(data) > MAX_PACKED_BYTES:
        raise ValueError(f"it has {len(data):,} bytes; at most {MAX_PACKED_BYTES:,} are read")
    stream = zlib.decompressobj(wbits=31)  # gzip's frame
    try:
        text = stream.decompress(data, MAX_UNPACKED_BYTES)
        if not stream.eof:
            raise ValueError(f"it is cut off, or holds more than {MAX_UNPACKED_BYTES:,} bytes")
        content = json.loads(text)
    except (zlib.error, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(content, dict):
        raise ValueError("it must hold a mapping")
    return content


def read_timelines(path: Path) -> dict[str, Timeline]:
    """The timelines of the file at `path`, by step. Raises: RecordError when it cannot be read."""
    content = read_content(path)
    try:
        return {step: timeline_from_mapping(content[step]) for step in STEPS}
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise RecordError(f"{path} holds no timelines: {error!r}; record it again with --history.") from error


def read_content(path: Path) -> dict[str, Any]:
    """The whole content of the file at `path`. Raises: RecordError when it cannot be read."""
    try:
        return unpack(file_bytes(Path(path), MAX_PACKED_BYTES))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecordError(f"{path} cannot be read: {why}; record it again with --history.") from error
