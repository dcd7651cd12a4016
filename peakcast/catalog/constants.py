"""What a GPU holds outside PyTorch's allocator, as `peakcast collect constants` read it on a machine. It is kept in a small
JSON file for each GPU type in the user's own folder, and predictions for that type then use it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peakcast.core.bounded import file_bytes, json_value
from peakcast.core.durable import replace_file
from peakcast.core.errors import RecordError
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import MIB

SCHEMA = 1
MAX_FILE_BYTES = MIB
MOST_BYTES = 2**40
"""No GPU has more memory than this."""
MOST_RANKS_DIGITS = 6
KEYS = ("schema_version", "gpu", "observed", "context_bytes", "first_uses_bytes", "communicator_bytes", "versions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Readings of one machine's GPU: bytes outside PyTorch's allocator."""

    gpu: str
    """Catalog name of the GPU type."""
    context_bytes: int
    first_uses_bytes: Mapping[str, int] = field(default_factory=FrozenMapping)
    """Step of `collectors/measure/first_uses.py` → bytes that it added when it first ran."""
    communicator_bytes: Mapping[str, int] = field(default_factory=FrozenMapping)
    """Number of ranks of one NCCL communicator, as text → bytes that it added after NCCL was loaded (the first use
    "nccl")."""
    versions: Mapping[str, str] = field(default_factory=FrozenMapping)
    """Versions of torch, CUDA and the driver with which they were read."""
    observed: str = ""
    """Date of the reading, in ISO form."""
    path: str = field(default="", compare=False)
    """The file in which they are; "" before they are saved."""

    def to_mapping(self) -> dict[str, Any]:
        """The mapping that the file contains."""
        found = {name: getattr(self, name) for name in KEYS if name != "schema_version"}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}
        return {"schema_version": SCHEMA, **plain}

    @classmethod
    def from_mapping(cls, mapping: object) -> Constants:
        """The constants in a mapping made by `to_mapping`. Raises: ValueError saying which entry is wrong."""
        if not isinstance(mapping, dict) or mapping.get("schema_version") != SCHEMA:
            raise ValueError(f"schema_version must be {SCHEMA}")
        if wrong := sorted(set(KEYS) ^ set(mapping)):
            raise ValueError(f"{wrong[0]} is {'missing' if wrong[0] in KEYS else 'not known'}")
        texts = ("gpu", "observed")
        if not all(isinstance(mapping[name], str) for name in texts) or not mapping["gpu"]:
            raise ValueError("gpu must be the name of a GPU type, and observed a date")
        versions = _mapping(mapping["versions"], "versions")
        if not all(isinstance(value, str) for value in versions.values()):
            raise ValueError("versions must map packages to texts")
        communicators = _sizes(mapping["communicator_bytes"], "communicator_bytes")
        for ranks in communicators:
            if not (ranks.isascii() and ranks.isdigit() and len(ranks) <= MOST_RANKS_DIGITS and int(ranks) > 1):
                raise ValueError(f"communicator_bytes[{ranks!r}] must be of a number of ranks above 1")
        return cls(
            gpu=mapping["gpu"],
            context_bytes=_size(mapping["context_bytes"], "context_bytes"),
            first_uses_bytes=_sizes(mapping["first_uses_bytes"], "first_uses_bytes"),
            communicator_bytes=communicators,
            versions=versions,
            observed=mapping["observed"],
        )

    def to_bytes(self) -> bytes:
        """The file's content."""
        return json.dumps(self.to_mapping(), indent=1, sort_keys=True).encode() + b"\n"


def constants_folder() -> Path:
    """The folder for files of constants: the environment's PEAKCAST_CONSTANTS, else the user's data folder."""
    named = os.environ.get("PEAKCAST_CONSTANTS")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "peakcast" / "constants"


def constants_path(gpu: str) -> Path:
    """The file of the GPU type `gpu`, a catalog name."""
    return constants_folder() / f"{gpu}.json"


def constants_state() -> tuple[str, int]:
    """(folder, time of its last change; 0 if it does not exist): a value that changes when a file of constants is written
    or deleted."""
    folder = constants_folder()
    try:
        return str(folder), folder.stat().st_mtime_ns
    except OSError:
        return str(folder), 0


def own_constants(gpu: str) -> Constants | None:
    """The readings on this machine for the GPU type `gpu`, a catalog name; None if there are none.

    Raises: RecordError if the file is damaged; it is never ignored silently.
    """
    path = constants_path(gpu)
    if not path.exists():
        return None
    found = load_constants(path)
    if found.gpu != gpu:
        raise _damaged(path, f"it is of gpu={found.gpu!r}")
    return found


def load_constants(path: Path) -> Constants:
    """The constants in the JSON file at `path`. Raises: RecordError naming the file, the fault and the way out."""
    from dataclasses import replace

    try:
        mapping = json_value(file_bytes(path, MAX_FILE_BYTES).decode("utf-8"), strict=True)
        return replace(Constants.from_mapping(mapping), path=str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def save_constants(constants: Constants) -> Path:
    """Write the file of that GPU type and return its path. Raises: RecordError when it cannot be written."""
    path = constants_path(constants.gpu)
    replace_file(path, constants.to_bytes())
    return path


def _damaged(path: Path, fault: str) -> RecordError:
    return RecordError(
        f"{path} is not what `peakcast collect constants` writes ({fault}); run it again, or delete the file.",
        parameter="constants",
        value=str(path),
    )


def _mapping(value: object, name: str) -> FrozenMapping:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a mapping")
    return FrozenMapping(value)


def _sizes(value: object, name: str) -> FrozenMapping:
    return FrozenMapping({key: _size(size, f"{name}[{key!r}]") for key, size in _mapping(value, name).items()})


def _size(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_BYTES:
        raise ValueError(f"{name}={value!r} must be a whole number of bytes, not negative")
    return value
