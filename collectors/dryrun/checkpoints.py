"""Checkpoints that a script or its library opens itself. Of those in safetensors large tensors are read as shapes, from
the header of the file, so that a checkpoint of any size takes no memory; those that `torch.save` has written may be of a
network that was made on the device "meta", whose files have no values either.

Source of the format: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import functools
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from peakcast.collectors.machine.imports import when_imported

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "F8_E8M0": torch.float8_e8m0fnu},
}
LARGEST_HEADER_BYTES = 2**27
REAL_BYTES = 2**16
"""Tensors up to this size are read with their values."""


def header_of(file: Any) -> Mapping[str, Any]:
    """The header of an open file: name of a tensor -> its dtype, shape and place; {} if it has none."""
    (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
    read: Mapping[str, Any] = json.loads(file.read(size)) if 0 < size <= LARGEST_HEADER_BYTES else {}
    return read


def install() -> None:
    """Replace `safetensors.safe_open`, once it is imported, and `torch.load`."""
    when_imported("safetensors", _replace)
    torch.load = _with_memory(torch.load)


def _with_memory(load: Callable[..., Any]) -> Callable[..., Any]:
    """Make tensors without values that a file has lie where a run would load them."""

    @functools.wraps(load)
    def loaded(file: Any, map_location: Any = None, *arguments: Any, **keywords: Any) -> Any:
        found = load(file, map_location, *arguments, **keywords)
        if not any(isinstance(one, torch.Tensor) and one.is_meta for one in tree_leaves(found)):
            return found
        place = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
        return tree_map_only(torch.Tensor, lambda one: torch.empty_like(one, device=place) if one.is_meta else one, found)

    return loaded


def _replace(module: Any) -> None:
    own = module.safe_open

    def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **keywords: Any) -> Any:
        readable = framework in ("pt", "torch", "pytorch") and not keywords
        return OpenCheckpoint(filename, device) if readable else own(filename, framework, device, **keywords)

    module.safe_open = safe_open


class OpenCheckpoint:
    """An open checkpoint with the interface of safetensors' `safe_open`."""

    def __init__(self, filename: Any, device: Any) -> None:
        self._name, self._device = os.fspath(filename), device
        with open(filename, "rb") as file:
            self._entries = dict(header_of(file))
            self._start = file.tell()
        self._metadata: dict[str, str] | None = self._entries.pop("__metadata__", None)

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        """Nothing is held open."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def keys(self) -> list[str]:
        """Names of its tensors."""
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        """Names of its tensors, in the order in which they lie in the file."""
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"])

    def metadata(self) -> dict[str, str] | None:
        """What the file says about itself."""
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """The tensor called `name`, with its values if it is small."""
        entry = self._entries[name]
        shape, dtype, (begin, end) = entry["shape"], DTYPES[entry["dtype"]], entry["data_offsets"]
        if end - begin > REAL_BYTES or not end - begin:
            return torch.empty(shape, dtype=dtype, device=self._device)
        with open(self._name, "rb") as file:
            file.seek(self._start + begin)
            values = bytearray(file.read(end - begin))
        return torch.frombuffer(values, dtype=torch.uint8).view(dtype).reshape(shape).to(self._device)

    def get_slice(self, name: str) -> _Slice:
        """The tensor called `name`, of which parts are read."""
        return _Slice(self, name, self._entries[name])


class _Slice:
    def __init__(self, checkpoint: OpenCheckpoint, name: str, entry: Mapping[str, Any]) -> None:
        self._checkpoint, self._name, self._entry = checkpoint, name, entry

    def get_shape(self) -> list[int]:
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        return str(self._entry["dtype"])

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self._checkpoint.get_tensor(self._name)[part]
