"""Dry runs of functions, each in a forked copy of a process that has only imported the libraries.

A copy of the asking process itself would abort or hang if that process has trained, because its libraries' threads are not
copied.

`python -P -m peakcast.collectors.dryrun.warm` reads the path of a question on each line, and answers with two lines: the
number of the process that runs it, and its exit code when it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

FAILED = 10
"""Exit code of a script that raised an error."""
SHARED = ("transformers", "accelerate", "peft")
"""Packages whose modules are imported before copies are made, if the asking process has imported them."""

MAIN = "peakcast.collectors.dryrun.__main__"
TRACING = tuple(f"peakcast.collectors.tracing.{name}" for name in ("tracer", "patches", "inductor"))
"""Modules that every session imports, beside those of its own package."""


class Copy:
    """A copy of a warm process that answers the question in the file `path`; has the interface of `subprocess.Popen`."""

    def __init__(self, path: Path) -> None:
        self.returncode: int | None = None
        free = _free.pop() if _free else None
        self._warm = free if free is not None and free.is_there() else _Warm()
        self.pid = int(self._warm.ask(f"{path}\n") or 0)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code once it has ended. Raises: TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("function", timeout or 0.0)
        return code

    def terminate(self) -> None:
        """End it; the warm process ends what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and (line := self._warm.line(timeout)) is not None:
            self.returncode = int(line or self._warm.process.wait())  # no line: the warm process has ended
            _free.append(self._warm)
        return self.returncode


class _Warm:
    """The process from which copies are made. It ends with the process that started it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["OMP_NUM_THREADS"] = "1"  # a copy of a copy (`walked.py`) has no threads
        command = [sys.executable, "-P", "-m", __name__]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True, bufsize=0
        )
        self._owner = os.getpid()
        self._read = b""
        atexit.register(self.end)

    def end(self) -> None:
        """Stop it, if this process has started it."""
        if self._owner == os.getpid():
            self.process.kill()
            self.process.communicate()

    def is_there(self) -> bool:
        """Whether it can be asked; a forked copy of the process that started it cannot ask."""
        return self._owner == os.getpid() and self.process.poll() is None

    def ask(self, text: str) -> str | None:
        """The first line of the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        return self.line(None)

    def line(self, timeout: float | None) -> str | None:
        """The next line of an answer; None if it does not come within `timeout` seconds, "" if there will be none."""
        assert self.process.stdout is not None
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.process.stdout], [], [], timeout)
            if not ready:
                return None
            part = self.process.stdout.read(4096)
            if not part:
                return ""
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()


_free: list[_Warm] = []


def shared_modules() -> list[str]:
    """Modules of this process that a warm one should also have, in the order in which they were imported."""
    return [name for name in list(sys.modules) if name.partition(".")[0] in SHARED]


def main() -> None:
    """Answer questions until standard input ends."""
    from peakcast import catalog
    from peakcast.collectors import dryrun
    from peakcast.collectors.dryrun import programs
    from peakcast.collectors.dryrun.keeper import stop_in_order
    from peakcast.collectors.dryrun.script import TORCH_MODULES
    from peakcast.collectors.machine.packages import import_for_good
    from peakcast.collectors.processes.descendants import adopt_orphans, end_descendants
    from peakcast.jobs import conventions

    adopt_orphans()
    answers = os.dup(1)
    os.dup2(2, 1)
    own = [module.name for module in pkgutil.iter_modules(dryrun.__path__, f"{dryrun.__name__}.") if module.name != MAIN]
    import_for_good((*TORCH_MODULES, *own, *TRACING))
    catalog.read_ahead()
    conventions.read_ahead()
    programs.console_scripts()
    for path in sys.stdin:
        question = json.loads(Path(path.rstrip("\n")).read_text(encoding="utf-8"))
        import_for_good(name for name in question["modules"] if name not in sys.modules)
        stop_in_order(Path(question["folder"]))
        child = os.fork()
        if child == 0:
            os.close(answers)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _answer(question)
        os.setpgid(child, child)
        os.write(answers, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        end_descendants()
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _answer(question: Mapping[str, Any]) -> NoReturn:
    """In the copy: take over the asking process's state, and run its function."""
    try:
        _become(question)
        from peakcast.collectors.dryrun.script import main as run

        run(question)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(FAILED)


def _become(question: Mapping[str, Any]) -> None:
    """Take over the environment of the asking process, read nothing from standard input, and print into a file."""
    from peakcast.collectors.processes.warm_parent import die_with_parent

    die_with_parent()
    written = os.open(question["output"], os.O_WRONLY)
    for stream, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, written), (2, written)):
        os.dup2(descriptor, stream)
    # these are its own for good; lines are written at once, as a script's are: it may be ended at any time
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", 1), open(2, "w", 1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(question["environment"])
    time.tzset()
    tempfile.tempdir = question["folder"]
    os.chdir(question["working_folder"])
    sys.path[:], sys.argv[:] = question["path"], question["words"]


if __name__ == "__main__":
    main()
