"""A process around a dry run's script: once the script has ended, or nobody waits for its answer any more, it ends
everything that the script has started, also what has begun a session of its own."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import NoReturn

from peakcast.collectors.processes.descendants import adopt_orphans, end_descendants
from peakcast.collectors.processes.warm_parent import die_with_parent


def keep(folder: Path) -> None:
    """Continue in a forked process. This process waits for it and exits as it does. It stops earlier when it is asked to
    (SIGTERM), or when the process that started it ends, even by SIGKILL; then it also removes `folder`."""
    adopt_orphans()
    asked_by = os.getppid()
    script = os.fork()
    if script == 0:
        die_with_parent()
        return
    stop_in_order(folder)
    if os.getppid() != asked_by:  # it ended before this process had asked to be told
        os.kill(os.getpid(), signal.SIGTERM)
    _, status = os.waitpid(script, 0)
    end_descendants()
    _exit_as(os.waitstatus_to_exitcode(status))


def stop_in_order(folder: Path) -> None:
    """When this process is asked to stop, or the process that started it ends: end all descendants, and if nobody else can
    do it any more, remove `folder`."""
    asked_by = os.getppid()

    def stop(*_: object) -> NoReturn:
        end_descendants()
        if os.getppid() != asked_by:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    die_with_parent(signal.SIGTERM)


def _exit_as(code: int) -> NoReturn:
    """Exit with a code of `waitstatus_to_exitcode`, which is negative after a signal."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
