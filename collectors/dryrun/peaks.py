"""Answers a script that asks how much it has allocated, and keeps which peak a log shows after a reset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from peakcast.collectors.dryrun.noted import where
from peakcast.collectors.tracing.tracer import Tracer
from peakcast.core.units import format_gib
from peakcast.timelines.timeline import EMPTIED

NOW = ("memory_allocated", "memory_reserved", "memory_cached")
MOST = ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")
RESETS = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")
"""Of these families of functions each name asks the same here, where reserved is what is allocated."""
APART = 0.01
"""A peak that a reset has hidden is told if it is higher by this share."""


class Peaks:
    """What is allocated, and the peak since the script's last reset, as `torch.cuda` and `torch.accelerator` tell them."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._resets: list[tuple[str, int]] = []
        """(place in the script, operation) of each reset."""

    def install(self) -> None:
        """Answer in place of torch's own functions."""
        answers: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(NOW, self.now),
            **dict.fromkeys(MOST, self.most),
            **dict.fromkeys(RESETS, self.reset),
            "memory_stats": lambda: _Statistics(self),
            "empty_cache": self.empty,
        }
        for module in (torch.cuda, torch.cuda.memory, torch.accelerator):
            for name in answers.keys() & vars(module).keys():
                setattr(module, name, lambda *_, answer=answers[name], **__: answer())

    def now(self) -> int:
        """Bytes that the script has on the GPU now."""
        return sum(one.num_bytes for one in self._tracer._entries.values() if one.dies is None)

    def most(self) -> int:
        """The most bytes that the script has had on the GPU since its last reset."""
        return self._between(self._resets[-1][1] if self._resets else 0, self._tracer.now)

    def reset(self) -> None:
        """Count the peak anew."""
        self._resets.append((where(), self._tracer.now))

    def empty(self) -> None:
        """The allocator's cache is given back."""
        self._tracer.launched(EMPTIED, ())

    def said(self, end: int) -> tuple[str, ...]:
        """For each place that resets the peak, which one holds from there to the next reset, if the whole run's, up to the
        operation `end`, is higher."""
        whole = self._between(0, end)
        ends = [*(at for _, at in self._resets[1:]), end]
        highest: dict[str, int] = {}
        for (place, start), stop in zip(self._resets, ends, strict=False):
            highest[place] = max(highest.get(place, 0), self._between(start, min(stop, end)))
        return tuple(
            f"{place} resets torch's peak: what is printed after it is {format_gib(peak)} allocated, of the whole run "
            f"{format_gib(whole)}."
            for place, peak in highest.items()
            if whole > (1 + APART) * peak
        )

    def _between(self, start: int, stop: int) -> int:
        return self._tracer.timeline(start, stop).peak().num_bytes if stop > start else self.now()


class _Statistics(dict[str, int]):
    """`torch.cuda.memory_stats()`: allocated bytes for every count of bytes, 0 for other counts."""

    def __init__(self, peaks: Peaks) -> None:
        super().__init__()
        self._peaks = peaks

    def __missing__(self, name: str) -> int:
        if "bytes" not in name:
            return 0
        return self._peaks.most() if "peak" in name else self._peaks.now()

    def get(self, name: str, default: Any = None) -> Any:
        """The same as `[]`."""
        return self[name]
