"""Ends everything that a process has started, in whatever group or session it is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

from peakcast.collectors.processes.warm_parent import ENDING_SECONDS, POLL_SECONDS, processes

ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): descendants whose parent has ended become children of this process."""


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that `end_descendants` finds it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)


def end_descendants() -> None:
    """Kill all processes that this one and its descendants have started, and wait until none is left."""
    deadline = time.monotonic() + ENDING_SECONDS
    while (found := _descendants()) and time.monotonic() < deadline:
        for number in found:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_SECONDS)


def _descendants() -> set[int]:
    """The numbers of the processes that have this one as an ancestor."""
    listed, found = list(processes()), {os.getpid()}
    while more := {one.number for one in listed if one.parent in found} - found:
        found |= more
    return found - {os.getpid()}
