"""A function of this process, run in a copy of it: what it closes over comes along, and what is changed stays there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.02
FAILED = 10
"""As a script that raised."""


class Forked:
    """A copy of this process that runs `function` and answers `question`, its output in the file `log`."""

    def __init__(self, function: Callable[[], object], question: Mapping[str, Any], log: Path) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become(question, log)
                from peakcast.collectors.dryrun.script import main

                main(question, function)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(FAILED)

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same, once it has ended. Raises: TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("function", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code


def _become(question: Mapping[str, Any], log: Path) -> None:
    """A process that leads a session, reads nothing and prints into `log`."""
    from peakcast.collectors.nursery import die_with_parent

    os.setsid()
    die_with_parent()
    written = os.open(log, os.O_WRONLY)
    for stream, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, written), (2, written)):
        os.dup2(descriptor, stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115  # this process's own are captured
    os.environ["TMPDIR"] = tempfile.tempdir = str(question["folder"])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
