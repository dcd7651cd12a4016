"""Runs a command's script in a separate process, within limits of time and memory, and reads the result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peakcast import collectors
from peakcast.collectors.dryrun import sent_functions, warm
from peakcast.collectors.dryrun.children import ASKED
from peakcast.collectors.dryrun.command import TrainingCommand
from peakcast.collectors.dryrun.missing import hint
from peakcast.collectors.dryrun.tools import console_module
from peakcast.collectors.machine.environments import environment_for
from peakcast.collectors.processes.warm_parent import ENDING_SECONDS
from peakcast.core.errors import CollectorError, ScriptError
from peakcast.core.findings import Finding
from peakcast.core.units import format_gib
from peakcast.timelines.files import timeline_from_mapping
from peakcast.timelines.timeline import Timeline

CRASHED, NEVER_STEPPED, INTERRUPTED = 10, 11, 130
"""Exit codes of the process (`collectors/dryrun/session.py`): the script raised, no optimizer stepped, Ctrl-C."""
NOT_LOADED = 127
"""Exit code of a process that the dynamic linker ends (ld.so(8)), as it does when there is no memory for a library."""
MOST_LINES = 12
"""Number of last lines of the script's output that are shown when it failed."""
LAST_BYTES = 2**16
"""Number of last bytes of the log in which these lines are searched."""
POLL_SECONDS = 0.05
STOPS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to stop."""
LOG, ANSWER = "output.txt", "answer.json"
"""Files in a dry run's folder: the script's output, and the result."""


class Process(Protocol):
    """A process with the interface of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code once it has ended. Raises: TimeoutExpired."""

    def terminate(self) -> None:
        """Ask it to end, with all that it has started."""


@dataclass(frozen=True, kw_only=True)
class DryRunLimits:
    """Time and memory that a dry run may use."""

    seconds: float = 600.0
    memory_bytes: int = 32 * 2**30


@dataclass(frozen=True, kw_only=True)
class DryRunQuestion:
    """What a dry run is to find out: what `rank` of a command allocates on `gpu`."""

    gpu: str
    rank: int = 0
    limits: DryRunLimits = DryRunLimits()
    lengths: tuple[int, int] | None = None
    """Tokens of the shortest and of the longest synthetic row; None: as many as the script asks for."""
    skip_evaluation: bool = False
    """Whether evaluation does not count."""
    torch: str | None = None
    """The release whose allocations are followed; None: the installed one's."""
    walks: tuple[int, int] | None = None
    """Number and length of the sequences of the script's own micro-batch, if its steps are to be walked with others."""

    def to_mapping(self) -> dict[str, Any]:
        """The question as the process reads it that runs the script (`session.py`). If the lengths of rows differ, it
        follows steps until the longest has occurred; a walk is of one step."""
        changes = self.lengths is not None and self.lengths[0] < self.lengths[1]
        own = {name: getattr(self, name) for name in ("rank", "gpu", "lengths", "skip_evaluation", "torch", "walks")}
        limits = {"memory_bytes": self.limits.memory_bytes, "seconds": self.limits.seconds}
        return {**own, **limits, "lengths_change": changes and self.walks is None}


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What a dry run saw of one rank."""

    timelines: Mapping[str, Timeline]
    """The timelines of the "first" step, of a "steady" one (if steps differ, the one with most bytes), of the whole "run",
    and, if NCCL keeps tensors for a time that is not known, of the run in which they are "let_go" at once."""
    job: Mapping[str, Any]
    """The job that the script turned out to run."""
    findings: tuple[Finding, ...]
    unsaid: tuple[str, ...]
    """What the job cannot say of the script, in words."""
    assumptions: tuple[str, ...]
    compiled: bool
    """Whether kernels written by `torch.compile` have run."""
    evaluated: bool
    """Whether they include an evaluation."""
    steps: int
    seconds: float


def run(command: TrainingCommand, question: DryRunQuestion, output: Callable[[str], None] | None = None) -> RankReport:
    """The answer to `question` of `command`. `output` is called with what the script prints.

    Raises: ScriptError when the script fails, never steps, or needs more than the question's limits.
    """
    start, limits = time.monotonic(), question.limits
    ends = start + limits.seconds
    with tempfile.TemporaryDirectory(prefix="peakcast-dryrun-") as name:
        folder = Path(name)
        with started(command, question, folder, ends) as process:
            code = _wait(process, ends, folder / LOG, folder / ANSWER, output)
        return _answer(code, folder, command, limits, time.monotonic() - start)


@contextmanager
def started(
    command: TrainingCommand, question: DryRunQuestion, folder: Path, ends: float | None = None
) -> Iterator[Process]:
    """A context with a process that runs `command` and writes its answer to `question` to the file `ANSWER` of `folder`. At
    the end of the context, the process and everything that it has started are ended. `ends`: the time (`time.monotonic`)
    at which it will be ended; shortly before, it says where the script is."""
    log, path = folder / LOG, folder / "question.json"
    own = {field: getattr(command, field) for field in ASKED}
    asked: dict[str, Any] = {**own, **question.to_mapping(), "folder": str(folder), "answer": str(folder / ANSWER)}
    if ends is not None:
        asked["until"] = ends
    if command.function is not None:
        asked |= _for_a_copy(command.function, folder) | {"output": str(log)}
    log.touch()
    path.write_text(json.dumps(asked), encoding="utf-8")
    with ExitStack() as around:
        around.enter_context(_stopped_in_order())
        process: Process
        if command.function is not None:
            process = warm.Copy(path)
        else:
            environment = {**around.enter_context(environment_for(command.python)), "PYTHONUNBUFFERED": "1"}
            environment |= {"TMPDIR": str(folder)} | _own_variables(command, environment)
            process = _start([command.python, "-P", "-m", "peakcast.collectors.dryrun", str(path)], environment, log)
        around.enter_context(_ended(process))
        yield process


def _own_variables(command: TrainingCommand, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that `command` sets. Its PYTHONPATH comes after that of `environment`, which has peakcast."""
    variables = dict(variable.split("=", 1) for variable in command.environment)
    if variables.get("PYTHONPATH") and environment.get("PYTHONPATH"):
        variables["PYTHONPATH"] = os.pathsep.join((environment["PYTHONPATH"], variables["PYTHONPATH"]))
    return variables


def _for_a_copy(function: Callable[[], object], folder: Path) -> dict[str, Any]:
    """What a copy of a warm process needs to run `function` as this process would."""
    packed = folder / "function.pickle"
    sent_functions.pack(function, packed)
    return {
        "function": str(packed),
        "environment": {**os.environ, "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        "working_folder": os.getcwd(),
        "path": sys.path,
        "words": sys.argv,
        "modules": warm.shared_modules(),
    }


def _start(words: list[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start a process that leads a session."""
    with log.open("wb") as file:
        try:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        except OSError as error:
            raise CollectorError(f"{words[0]!r} cannot be started: {error.strerror}.", parameter="command") from error


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    """A context in which a request to stop (`timeout`, a batch system, a closed terminal) ends this process as Ctrl-C
    would: with all that it has started, and without its temporary folder. A handler of the caller's own stays."""
    in_main = threading.current_thread() is threading.main_thread()
    own = [one for one in STOPS if in_main and signal.getsignal(one) == signal.SIG_DFL]

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for one in own:
        signal.signal(one, stop)
    try:
        yield
    finally:
        for one in own:
            signal.signal(one, signal.SIG_DFL)


@contextmanager
def _ended(process: Process) -> Iterator[None]:
    """A context at whose end everything that the process has started is ended."""
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: Process, deadline: float, log: Path, answer: Path, output: Callable[[str], None] | None) -> int | None:
    """The exit code of the process; 0 as soon as there is an answer, from it or from a process that it started; None if the
    time was up."""
    with log.open("rb") as printed:
        while True:
            code = process.poll()
            if output is not None and (text := printed.read()):
                output(text.decode(errors="replace"))
            if code is not None or answer.is_file():
                return 0 if answer.is_file() else code  # a script that only starts others ends without a step of its own
            if time.monotonic() > deadline:
                return None
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)


def _answer(code: int | None, folder: Path, command: TrainingCommand, limits: DryRunLimits, seconds: float) -> RankReport:
    if code != 0:
        lines = _last_lines(folder / LOG)
        dumped = (number for number, line in enumerate(lines) if line.startswith("Timeout (0:"))
        shown = lines[: next(dumped, len(lines))]
        raise ScriptError(_why(code, command, limits, lines), command.script, shown[-MOST_LINES:])
    answer = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    return RankReport(
        timelines={step: timeline_from_mapping(mapping) for step, mapping in answer["timelines"].items()},
        job=answer["job"],
        findings=tuple(Finding(**finding) for finding in answer["findings"]),
        unsaid=tuple(answer["unsaid"]),
        assumptions=tuple(answer["assumptions"]),
        evaluated=answer["evaluated"],
        compiled=answer["compiled"],
        steps=answer["steps"],
        seconds=seconds,
    )


def _last_lines(log: Path) -> list[str]:
    """The last lines of the script's output; only the end of the log is read, because it may be long."""
    with log.open("rb") as printed:
        printed.seek(max(0, log.stat().st_size - LAST_BYTES))
        return _without_launcher(printed.read().decode(errors="replace").rstrip().splitlines())


LAUNCHED = re.compile(rf"(subprocess\.)?CalledProcessError: Command .* returned non-zero exit status {CRASHED}\.$")
TRACEBACK = "Traceback (most recent call last):"


def _without_launcher(lines: list[str]) -> list[str]:
    """`lines` without the traceback in which a launcher (accelerate's `simple_launcher`) only says that the script which it
    started has failed: the script's own error stands before it."""
    while lines and LAUNCHED.match(lines[-1]) and TRACEBACK in lines:
        before = lines[: len(lines) - 1 - lines[::-1].index(TRACEBACK)]
        if TRACEBACK not in before:
            break
        lines = before
    return lines


DUMPED = re.compile(r'  File "(?P<file>[^"<]+)", line (?P<line>\d+) in ')
"""A line of what faulthandler prints (`collectors/dryrun/session.py`), of the main thread last and the innermost first."""


def _line_at_the_end(lines: list[str]) -> str:
    """The script's own line that the main thread was at when the time was nearly up; "" if it is not known."""
    threads = [number for number, line in enumerate(lines) if line.endswith("(most recent call first):")]
    frames = filter(None, map(DUMPED.match, lines[max(threads, default=len(lines)) :]))
    own = (found for found in frames if not any(part in found["file"] for part in (*LIBRARIES, _OURS)))
    return next((f"{found['file']}:{found['line']}" for found in own), "")


_OURS = os.path.join(os.path.dirname(os.path.abspath(collectors.__file__)), "")
FRAME = re.compile(r'  File "(?P<file>[^"<]+)", line (?P<line>\d+), in ')
LIBRARIES = ("site-packages", "dist-packages", os.path.join("lib", "python"))


def _own_line(lines: list[str]) -> str:
    """The script's line that failed, in a sentence, if it is in the traceback and not among the lines that are shown."""
    frames = [(number, found) for number, line in enumerate(lines) if (found := FRAME.match(line)) is not None]
    own = [(number, found) for number, found in frames if not any(part in found["file"] for part in LIBRARIES)]
    own = [(number, found) for number, found in own if not console_module(found["file"])]  # which no user has written
    if not own or own[-1][0] >= len(lines) - MOST_LINES:
        return ""
    return f"Its own line there is {own[-1][1]['file']}:{own[-1][1]['line']}."


def _why(code: int | None, command: TrainingCommand, limits: DryRunLimits, lines: list[str]) -> str:
    script = command.script
    if code is None:
        at = f", and was at {line}" if (line := _line_at_the_end(lines)) else ""
        return (
            f"{script} had not ended its third optimizer step after {limits.seconds:g} s{at}; give it more time "
            "(--timeout-seconds), or a smaller step."
        )
    if code == NEVER_STEPPED:
        return (
            f"{script} ended before any optimizer had stepped (torch.optim.Optimizer.step); give the arguments with which "
            "it trains. Weights that a script updates by itself (torch.func) are not followed."
        )
    if code == CRASHED and lines and lines[-1].partition(":")[0].endswith("MemoryError"):  # NumPy has one of its own
        return (
            f"{script} needs more host memory than the {format_gib(limits.memory_bytes)} that it may use; give it more "
            "(--memory-gib)."
        )
    if code == CRASHED:
        why = f"{script} failed before its third optimizer step had ended; its last lines say why."
        return " ".join(filter(None, (why, _own_line(lines), hint(lines))))
    if code == NOT_LOADED:
        return (
            f"{script} could not begin, because a shared library could not be loaded: most likely "
            f"{format_gib(limits.memory_bytes)} of host memory are too few (--memory-gib)."
        )
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{script} {how} before its third optimizer step had ended."
