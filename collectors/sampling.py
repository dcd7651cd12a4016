"""What only looking again and again can tell of a run: the largest memory of the GPU as the driver counts it and of the
host, and who else was on the GPU. Neither peak can be reset, nor asked for afterwards."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

from peakcast.collectors import probes
from peakcast.collectors.nvml import Nvml

LISTED_EVERY = 20
"""Memory is looked at this many times for each list of the processes, which takes longer."""


class Seen:
    """What sampling saw. `peak`: the largest memory in use on the GPU in bytes; `pageable_peak`: the same of this process
    on the host (`probes.pageable_bytes`); `processes`: all that ever were on the GPU."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self.pageable_peak: int | None = None
        self.processes: set[int] = set()

    def add(self, nvml: Nvml, *, processes: bool = True) -> None:
        """Look once more."""
        self.peak = _larger(self.peak, nvml.used_bytes())
        self.pageable_peak = _larger(self.pageable_peak, probes.pageable_bytes())
        if processes:
            self.processes |= nvml.processes() or frozenset()

    @property
    def others(self) -> int:
        """Processes beside ours: all but one, whose number may be the host's and not the one we know."""
        return max(len(self.processes) - 1, 0)


@contextlib.contextmanager
def sampling(nvml: Nvml, interval_seconds: float = 0.005) -> Iterator[Seen]:
    """Samples in a thread, and at both ends."""
    seen, stop = Seen(), threading.Event()
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
