"""Readings that only sampling gives: the largest memory of the GPU as the driver counts it, the largest memory of the host,
and other processes on the GPU. Neither peak can be reset, or read afterwards."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

from peakcast.collectors.machine import probes
from peakcast.collectors.machine.nvml import Nvml

LISTED_EVERY = 20
"""Samples of memory for each list of processes, which takes longer to read."""


class SampledMemory:
    """What sampling saw. `peak`: the largest memory in use on the GPU, in bytes; `pageable_peak`: the largest host memory
    of this process (`probes.pageable_bytes`); `processes`: all that were ever on the GPU."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self.pageable_peak: int | None = None
        self.processes: set[int] = set()

    def add(self, nvml: Nvml, *, processes: bool = True) -> None:
        """Take one more sample."""
        self.peak = _larger(self.peak, nvml.used_bytes())
        self.pageable_peak = _larger(self.pageable_peak, probes.pageable_bytes())
        if processes:
            self.processes |= nvml.processes() or frozenset()

    @property
    def others(self) -> int:
        """Number of processes besides ours: all but one, as our number on the host may differ from the one that we know."""
        return max(len(self.processes) - 1, 0)


@contextlib.contextmanager
def sampling(nvml: Nvml, interval_seconds: float = 0.005) -> Iterator[SampledMemory]:
    """A context in which a thread takes samples; one is also taken at its beginning and end."""
    seen, stop = SampledMemory(), threading.Event()
    seen.add(nvml)

    def sample() -> None:
        for number in itertools.count():
            if stop.wait(interval_seconds):
                return
            seen.add(nvml, processes=number % LISTED_EVERY == 0)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
        seen.add(nvml)


def _larger(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)
