"""Processes that answer questions, each question within a time limit and, if given, a memory limit.

If a question takes too long, or its process is killed, only its own answer is lost: its process is replaced.
"""

from __future__ import annotations

import gc
import multiprocessing
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from peakcast.core.cores import available_cores
from peakcast.core.errors import PeakcastError, SpecError

GARBAGE_THRESHOLD = 100_000
"""Allocations after which a worker searches for cycles among its objects. Answers make none; Python's default is 700."""
CHUNK = 16
"""Number of questions that are sent to a process together."""
LEAST_MOST_PROCESSES = 32
PROCESSES_PER_CORE = 4
"""More processes than this for each core, and more than the number above, would only wait for each other."""
WAITING_SECONDS = 30.0
"""How long a question waits for a free process before it is refused."""


class LostError(PeakcastError):
    """The process of a question took too long, ran out of its memory, or was ended from outside."""


def check_processes(processes: int) -> int:
    """`processes`, if a machine like this one can use as many. Raises: SpecError."""
    most = max(LEAST_MOST_PROCESSES, PROCESSES_PER_CORE * available_cores())
    if not 1 <= processes <= most:
        raise SpecError(
            f"processes={processes:,} must be from 1 to {most}; this machine has {available_cores()} cores.",
            parameter="processes",
            value=processes,
        )
    return processes


@dataclass(frozen=True, slots=True)
class QuestionLimits:
    """Limits of one question."""

    seconds: float
    memory_bytes: int | None = None
    """Memory beyond what its process has when the question begins; None: no limit."""
    way_out: str = "give it more time, or ask about a smaller job"
    """What to do about an answer that took longer, in words."""


class Workers:
    """`size` processes that answer questions by `answer`, a function of a module.

    `method` is how processes start: "fork" inherits everything that this process has loaded; "forkserver" is for a process
    with threads. Use it as a context manager, or `close` it.
    """

    def __init__(self, answer: Callable[[Any], Any], size: int, limits: QuestionLimits, *, method: str = "fork") -> None:
        known = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context(method if method in known else "spawn")
        if method in known and method == "forkserver":
            self._context.set_forkserver_preload([answer.__module__])
        self._answer, self._limits = answer, limits
        self._places = [_Place() for _ in range(size)]
        self._free: queue.Queue[_Place] = queue.Queue()
        self._beginning = threading.Lock()
        """Only one process starts at a time: a forked process inherits all open pipes, and an inherited copy of another
        worker's pipe would keep that worker from seeing its end."""
        for place in self._places:
            self._free.put(place)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, including busy ones."""
        for place in self._places:
            place.end()

    def ask(self, question: Any) -> Any:
        """The answer to one question; any thread may ask. Raises: LostError, or what `answer` raises."""
        try:
            place = self._free.get(timeout=WAITING_SECONDS)
        except queue.Empty:
            raise LostError(f"{len(self._places)} other questions are being answered; ask again in a minute.") from None
        try:
            self._send(place, [question])
            while not place.overdue(self._limits.seconds):
                if place.connection.poll(min(1.0, self._limits.seconds)):
                    break
            answer = self._receive(place)
        finally:
            self._free.put(place)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def answers(self, questions: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Each question with its answer, or with an exception instead, as they come."""
        waiting = deque(questions)
        while True:
            for place in self._places:
                if not place.asked and waiting:
                    self._send(place, [waiting.popleft() for _ in range(min(CHUNK, len(waiting)))])
            busy = [place for place in self._places if place.asked]
            if not busy:
                return
            ready = wait([place.connection for place in busy], timeout=1.0)
            for place in busy:
                if place.connection in ready or place.overdue(self._limits.seconds):
                    yield place.asked[0], self._receive(place)
                    if place.process is None:  # the questions after it have not begun
                        waiting.extendleft(reversed(place.asked))
                        place.asked.clear()

    def _send(self, place: _Place, questions: list[Any]) -> None:
        if place.process is None or not place.process.is_alive():
            with self._beginning:
                others = [other.connection for other in self._places if other.process is not None and other is not place]
                place.begin(self._context, self._answer, self._limits, others)
        place.asked.extend(questions)
        place.since = time.monotonic()
        with suppress(OSError):  # it has died, as `_receive` will find
            place.connection.send(questions)

    def _receive(self, place: _Place) -> Any:
        """The answer to the oldest question of `place`, or a `LostError`, after which its process is gone."""
        place.asked.popleft()
        if place.overdue(self._limits.seconds) and not place.connection.poll():
            place.end()
            return LostError(f"no answer within {self._limits.seconds:g} s; {self._limits.way_out}.")
        try:
            answer = place.connection.recv()
        except (EOFError, OSError):
            how = place.end()
            return LostError(f"the process that answered it {how}; it may have needed more memory than there was.")
        place.since = time.monotonic()
        return answer


class _Place:
    """One process at a time, with the questions that it has not answered yet."""

    def __init__(self) -> None:
        self.process: Any = None
        self.connection: Connection
        self.asked: deque[Any] = deque()
        self.since = 0.0

    def begin(self, context: Any, answer: Callable[[Any], Any], limits: QuestionLimits, others: list[Connection]) -> None:
        """Start the process. `others`: connections of this process that a forked one must close."""
        self.end()
        ours, theirs = context.Pipe()
        inherited = [*others, ours] if context.get_start_method() == "fork" else []
        self.process = context.Process(target=_work, args=(theirs, answer, limits, inherited), daemon=True)
        try:
            self.process.start()
        except OSError as error:
            self.process = None
            raise LostError(f"no process can be started: {error.strerror}; ask for fewer processes.") from error
        theirs.close()
        self.connection = ours

    def overdue(self, seconds: float) -> bool:
        """Whether the current question has taken longer than `seconds`."""
        return time.monotonic() - self.since > seconds

    def end(self) -> str:
        """Kill the process. Returns how it had ended by itself, if it had."""
        if self.process is None:
            return "had ended"
        self.process.join(0.2)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self.process.close()
        self.process = None
        self.connection.close()
        if code is None:
            return "had to be ended"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _work(questions: Connection, answer: Callable[[Any], Any], limits: QuestionLimits, inherited: list[Connection]) -> None:
    """The main function of a worker: it receives lists of questions and sends their answers one by one, until the other
    side closes."""
    for connection in inherited:
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    gc.set_threshold(GARBAGE_THRESHOLD)
    _limit_memory(limits.memory_bytes)
    with suppress(EOFError, OSError):
        while True:
            for question in questions.recv():
                questions.send(_answered(answer, question))


def _answered(answer: Callable[[Any], Any], question: Any) -> Any:
    try:
        return answer(question)
    except MemoryError:
        return LostError("it needs more memory than a question gets here; ask about a smaller job.")
    except Exception as error:
        return error


def _limit_memory(more_bytes: int | None) -> None:
    """Limit this process's private memory to what it has now plus `more_bytes`."""
    if more_bytes is None:
        return
    with suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        data_kib = int(status.partition("VmData:")[2].split()[0])
        most = data_kib * 1024 + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
