"""Settings of PyTorch's caching allocator that decide where tensors are placed: those of `PYTORCH_CUDA_ALLOC_CONF` (or
`PYTORCH_ALLOC_CONF`), under the same names.

Rules are those of torch 2.13 `c10/core/AllocatorConfig.h` and `.cpp`, `c10/cuda/CUDAAllocatorConfig.h`. Settings that do
not change the placement (locks, pinned host memory, IPC handles, error messages) are accepted and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from peakcast.core.errors import SpecError, near_misses
from peakcast.core.fields import require_positive

NUM_INTERVALS = 16
"""kRoundUpPowerOfTwoIntervals: one interval for sizes below 2 MiB, then one for each power of two; the last is from 32 GiB
on."""
MOVES_NOTHING = (
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)
"""Settings without effect on the placement; all that begin with `pinned_` have none either, as they concern host memory."""


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """Settings of PyTorch's CUDA caching allocator; null means PyTorch's default."""

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    """Blocks of at least this size are never split, and are used only for requests of at least this size."""
    max_non_split_rounding_mb: int | None = None
    """A block of that kind is used for a request only if it is larger by less than this; null for
    `large_segment_size_mb`."""
    roundup_power2_divisions: str | None = None
    """Requests are rounded up to one of this many steps between powers of two: "4", or a list of MiB and divisions as
    PyTorch writes it, "[256:1,512:2,1024:4,>:8]"."""
    garbage_collection_threshold: float | None = None
    """Fraction of the allowed memory above which old unsplit cached blocks are freed before a new segment is requested. It
    only has an effect with `per_process_memory_fraction`."""
    per_process_memory_fraction: float | None = None
    """Fraction of the GPU's memory that the allocator may reserve; null for all (torch 2.11, or
    `torch.cuda.set_per_process_memory_fraction`)."""
    large_segment_size_mb: int | None = None
    """Size of the segment that is requested from the driver for requests of 1 to 10 MiB, and size of pages of large
    expandable segments: 20 by default (torch 2.11)."""

    def __post_init__(self) -> None:
        require_positive(
            self, "max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb", where="allocator."
        )
        segment = self.large_segment_size_mb or 20
        if segment <= 10:
            raise _refused("large_segment_size_mb", segment, "more than 10: larger requests get their own segment")
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            value = getattr(self, name)
            if value is not None and value < segment:
                raise _refused(name, value, f"at least {segment}, the size of a large segment")
        threshold, fraction = self.garbage_collection_threshold, self.per_process_memory_fraction
        if threshold is not None and not 0 < threshold < 1:
            raise _refused("garbage_collection_threshold", threshold, "between 0 and 1, ends excluded")
        if fraction is not None and not 0 < fraction <= 1:
            raise _refused("per_process_memory_fraction", fraction, "above 0 and at most 1")
        _ = self.divisions

    @cached_property
    def divisions(self) -> tuple[int, ...]:
        """Divisions of each of the 16 intervals; 0 means that requests are rounded to 512 bytes."""
        return parse_divisions(self.roundup_power2_divisions) if self.roundup_power2_divisions else (0,) * NUM_INTERVALS


def _refused(name: str, value: object, rule: str) -> SpecError:
    return SpecError(f"allocator.{name}={value!r} must be {rule}.", parameter=f"allocator.{name}", value=value)


@lru_cache(maxsize=256)
def parse_divisions(text: str) -> tuple[int, ...]:
    """The divisions of each interval that `roundup_power2_divisions:text` sets (`parseRoundUpPower2Divisions`).

    Intervals below the first one listed get its value; intervals that a list skips stay 0; ">" stands for all after the
    last.
    Raises: SpecError.
    """
    name = "roundup_power2_divisions"
    text = "".join(text.split())
    if re.fullmatch(r"\d+", text):
        return (_power_of_two(name, text, int(text)),) * NUM_INTERVALS
    if not re.fullmatch(r"\[((\d+|>):\d+,)*(\d+|>):\d+,?\]", text):
        raise _refused(name, text, 'a power of two ("4") or a list of MiB and divisions ("[256:1,512:2,>:8]")')
    divisions, last, first = [0] * NUM_INTERVALS, 0, True
    for item in text[1:-1].strip(",").split(","):
        boundary, _, value_text = item.partition(":")
        value = int(value_text) and _power_of_two(name, text, int(value_text))
        if boundary == ">":
            divisions[last + 1 :] = [value] * (NUM_INTERVALS - 1 - last)
            continue
        last = min(_power_of_two(name, text, int(boundary)).bit_length(), NUM_INTERVALS) - 1
        if first:
            divisions[:last] = [value] * last
            first = False
        divisions[last] = value
    return tuple(divisions)


def _power_of_two(name: str, text: str, value: int) -> int:
    if value & (value - 1) or not value:
        raise _refused(name, text, f"made of powers of two, and {value} is none")
    return value


_READERS: dict[str, Callable[[str], Any]] = {
    "expandable_segments": lambda text: {"True": True, "False": False}[text],
    "max_split_size_mb": int,
    "max_non_split_rounding_mb": int,
    "roundup_power2_divisions": str,
    "garbage_collection_threshold": float,
    "per_process_memory_fraction": float,
    "large_segment_size_mb": int,
}


def moves_nothing(item: str) -> bool:
    """Whether a setting ("pinned_num_register_threads:8") has no effect on where tensors are placed."""
    name = item.partition(":")[0]
    return name in MOVES_NOTHING or name.startswith("pinned_")


def parse_allocator(text: str) -> Allocator:
    """The settings that an environment variable's value gives: "expandable_segments:True,max_split_size_mb:128".

    Raises: SpecError for a setting that PyTorch does not know, a value it refuses, and `backend:cudaMallocAsync`, which is
    another allocator.
    """
    settings: dict[str, Any] = {}
    for item in re.split(r",(?![^\[]*\])", "".join(text.split())):
        name, _, value = item.partition(":")
        if not item or moves_nothing(item) or item == "backend:native":
            continue
        if name == "backend":
            raise _refused(name, value, "native: the driver's own pools are not modelled")
        if name not in _READERS:
            known = (*_READERS, *MOVES_NOTHING)
            hint = near_misses(name, known) or "; known: " + ", ".join(known)
            raise SpecError(f"allocator.{name} is not a setting{hint}", parameter=f"allocator.{name}", value=value)
        try:
            settings[name] = _READERS[name](value)
        except (ValueError, KeyError) as error:
            raise _refused(name, value, "a value that PyTorch reads (True or False, or a number)") from error
    return Allocator(**settings)
