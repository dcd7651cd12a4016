"""A time limit for a computation in the current thread."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

POLL_SECONDS = 0.2


class TimeIsUp(BaseException):
    """Raised inside `limited` when the time is up. Like KeyboardInterrupt it is not an `Exception`, so that no handler of
    errors catches it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A context in which `TimeIsUp` is raised, between two operations of Python, after `seconds`."""
    thread = threading.get_ident()
    _watch.begin(thread, time.monotonic() + seconds)
    try:
        yield
    finally:
        _watch.end(thread)


class _Watch:
    """One thread that watches all deadlines of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[int, float] = {}
        self._raised: set[int] = set()
        self._runs = False

    def begin(self, thread: int, deadline: float) -> None:
        with self._changed:
            self._deadlines[thread] = deadline
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._look, daemon=True, name="peakcast deadlines").start()
            elif len(self._deadlines) == 1:
                self._changed.notify()

    def end(self, thread: int) -> None:
        with self._changed:
            self._deadlines.pop(thread, None)
            if thread in self._raised:
                self._raised.discard(thread)
                _raise_in(thread, None)  # it may still be pending

    def _look(self) -> None:
        while True:
            with self._changed:
                while not self._deadlines:
                    self._changed.wait()
                now = time.monotonic()
                for thread in [thread for thread, deadline in self._deadlines.items() if now > deadline]:
                    del self._deadlines[thread]
                    self._raised.add(thread)
                    _raise_in(thread, TimeIsUp)
            time.sleep(POLL_SECONDS)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Make CPython raise `error` in a thread at its next operation; None cancels one that is still pending."""
    raised = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


_watch = _Watch()


def _begin_anew() -> None:
    global _watch
    _watch = _Watch()  # a forked process has none of its parent's threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
