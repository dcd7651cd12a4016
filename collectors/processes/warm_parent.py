"""The warm parent of cells: imports the libraries once, then forks a process for every question.

`python -P -m peakcast.collectors.processes.warm_parent MODULE:FUNCTION` reads one JSON request a line, `{"question": {...},
"timeout_seconds": 600}`, and answers one JSON object a line: `{"row": {...}}` or `{"reason": "..."}`. In the forked
process, `FUNCTION` makes a `Measurement` of a question, or a measurement and a file's bytes (base64 under "history"), or a
list of these, one for each rank ("others" has all but the first). The parent imports `LIBRARIES` of its module, and calls
the module's `read_ahead` if there is one. Each process has a group of its own: when its time is up or it has ended,
everything that it started is killed. A forked process cannot use CUDA if its parent has touched it. If a library touches
CUDA on import, the cell is started as a program of its own, which is slower and otherwise the same. The parent leads a
session; when it is ended from outside, it ends the whole session.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import json
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from peakcast.collectors.machine.packages import import_for_good
from peakcast.collectors.machine.probes import forget_allocator_settings
from peakcast.core.errors import PeakcastError
from peakcast.measurements.records import Measurement

POLL_SECONDS = 0.005
ENDING_SECONDS = 5.0
"""How long to wait for a killed process. It is gone much sooner, unless its driver hangs."""
AFRESH = "--cell"

ChildRow = Measurement | tuple[Measurement, bytes | None]
Work = Callable[[Mapping[str, Any]], Any]
"""Makes a `Made` of a question, or a list of them."""


def main(arguments: list[str]) -> int:
    """Answer requests until standard input ends; with `AFRESH`, the one question given."""
    if arguments[0] == AFRESH:
        _, name, writer, question = arguments
        _cell(name, json.loads(question), int(writer))
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _end)
    (name,) = arguments
    forget_allocator_settings()
    module = importlib.import_module(load(name).__module__)
    # torch then asks NVML, not CUDA, whether there is a GPU: asking CUDA would spoil it for the forked processes
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import_for_good(getattr(module, "LIBRARIES", ()))
    read_ahead = getattr(module, "read_ahead", None)
    if read_ahead is not None:
        read_ahead()
    # answers get a descriptor of their own, so that whatever a cell prints does not mix with them
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = ask(name, request["question"], float(request["timeout_seconds"]))
        print(json.dumps(answer, allow_nan=False), file=answers, flush=True)
    return 0


def load(name: str) -> Work:
    """The function called `name` ("module:function")."""
    module, function = name.split(":")
    work: Work = getattr(importlib.import_module(module), function)
    return work


def ask(name: str, question: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """The answer to `question` from the function called `name`, run in a forked process: `{"row": ...}` or `{"reason":
    ...}`."""
    started = time.monotonic()
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _cell(name, question, writer)
    os.close(writer)
    with contextlib.suppress(OSError):  # the child does it too; whichever is first
        os.setpgid(child, child)
    deadline = time.monotonic() + timeout_seconds
    written, status, ended = b"", 0, False
    os.set_blocking(reader, False)
    while not ended:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended = pid == child
        with contextlib.suppress(BlockingIOError):  # a long answer fills the pipe: read it while the cell writes
            while part := os.read(reader, 1 << 16):
                written += part
        if not ended:
            if time.monotonic() > deadline:
                _kill(child)
                os.waitpid(child, 0)
                os.close(reader)
                return {"reason": f"no answer within {timeout_seconds:g} s; it was killed."}
            time.sleep(POLL_SECONDS)
    _kill(child)  # whatever it has started
    os.close(reader)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return {"reason": f"killed by {signal.Signals(-code).name}."}
    try:
        answer: dict[str, Any] = {**json.loads(written), "seconds": round(time.monotonic() - started, 3)}
    except ValueError as error:
        return {"reason": f"it ended with exit code {code} and its answer cannot be read: {error}"}
    return answer


def _cell(name: str, question: Mapping[str, Any], writer: int) -> NoReturn:
    """Run in the forked process: write the answer, and exit without the exit handlers that the parent has registered."""
    code = 0
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent()
        if _cuda_is_spoilt():
            os.set_inheritable(writer, True)
            command = [sys.executable, "-P", "-m", __spec__.name, AFRESH, name, str(writer), json.dumps(question)]
            os.execv(sys.executable, command)
        made = load(name)(question)
        first, *others = map(_answer, made if isinstance(made, list) else [made])
        text = json.dumps({**first, "others": others} if others else first, allow_nan=False)
    except PeakcastError as error:
        text, code = json.dumps({"reason": error.message}), 2
    except BaseException as error:
        traceback.print_exc()
        text, code = json.dumps({"reason": f"{type(error).__name__}: {error}"[:500]}), 1
    with os.fdopen(writer, "w", encoding="utf-8") as file:
        file.write(text)
    os._exit(code)


def _answer(made: ChildRow) -> dict[str, Any]:
    from peakcast.measurements.rows import to_row

    row, history = made if isinstance(made, tuple) else (made, None)
    packed = {} if history is None else {"history": base64.b64encode(history).decode()}
    return {"row": to_row(row), **packed}


def _cuda_is_spoilt() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda._is_in_bad_fork())


def _kill(group: int) -> None:
    """Kill every process of a group and wait until none is left: memory that one still held would spoil the next cell."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
        deadline = time.monotonic() + ENDING_SECONDS
        while time.monotonic() < deadline and any(one.group == group and one.state not in "ZX" for one in processes()):
            time.sleep(POLL_SECONDS)


class ListedProcess(NamedTuple):
    """A process that Linux lists."""

    number: int
    state: str
    parent: int
    group: int
    session: int


def processes() -> Iterator[ListedProcess]:
    """The processes that Linux lists now."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            after_name = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            state, parent, group, session = after_name[:4]  # proc(5)
            yield ListedProcess(int(folder.name), state, int(parent), int(group), int(session))


def die_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to end this process when its parent ends: an orphan on the GPU would spoil the next cell."""
    with contextlib.suppress(OSError, AttributeError):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, how)


def _end(*_: object) -> None:
    end_session(os.getpid())  # a session has its leader's number; a parent started by hand leads none
    os._exit(1)


def end_session(session: int) -> None:
    """Kill every process of a warm parent's session, this process last; it includes all that cells have started, in any
    group."""
    for one in processes():
        if one.session == session != one.number:
            with contextlib.suppress(OSError):
                os.kill(one.number, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
