"""How many processor cores this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Number of cores on which this process may run; fewer than the machine has if it is bound to some (`taskset`, a
    container's cpuset)."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
