"""Cells on this machine, forked from warm parents."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from peakcast.collectors.processes.engines import WORK, CellAnswer, CellQuestion
from peakcast.collectors.processes.warm_parent import end_session

GRACE_SECONDS = 60
"""How long after a cell's time limit its warm parent, which ends the cell, may stay silent before it counts as hung
itself."""


def run(
    questions: Iterable[CellQuestion], timeout_seconds: float, *, work: str = WORK, processes: int = 1, gpus: str = ""
) -> Iterator[tuple[CellQuestion, CellAnswer]]:
    """Run cells on this machine, `processes` at a time; or, with `gpus` ("0,1,5"), one at a time on each of those GPUs."""
    waiting = iter(questions)
    places = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus.split(",")] if gpus else [{}] * int(processes)
    parents = [_Parent(place, work) for place in places]
    free = list(parents)
    with selectors.DefaultSelector() as answers:
        try:
            while True:
                while free and (question := next(waiting, None)) is not None:
                    parent = free.pop(0)
                    parent.send(question, timeout_seconds)
                    answers.register(parent.output, selectors.EVENT_READ, parent)
                if not answers.get_map():
                    return
                ready = answers.select(timeout_seconds + GRACE_SECONDS)
                late = [] if ready else [key.data for key in answers.get_map().values()]
                for parent in [key.data for key, _ in ready] + late:
                    answers.unregister(parent.output)
                    free.append(parent)
                    yield parent.question, parent.receive(hung=parent in late)
        finally:
            for parent in parents:
                parent.end()


_kept: dict[str, _Parent] = {}


def one(question: CellQuestion, timeout_seconds: float, work: str = WORK) -> CellAnswer:
    """The answer to one question, from a warm parent that is kept for the next one. Workers of other engines call this."""
    parent = _kept.setdefault(work, _Parent({}, work))
    parent.send(question, timeout_seconds)
    with selectors.DefaultSelector() as answers:
        answers.register(parent.output, selectors.EVENT_READ)
        ready = answers.select(timeout_seconds + GRACE_SECONDS)
    return parent.receive(hung=not ready)


class _Parent:
    """A warm parent in a process of its own, started when it is first needed and again after it was lost."""

    def __init__(self, place: Mapping[str, str], work: str) -> None:
        # PYTHONSAFEPATH: the checkout's `datasets/` folder must not shadow Hugging Face's `datasets`
        self._environment = {**os.environ, **place, "PYTHONSAFEPATH": "1"}
        self._command = [sys.executable, "-P", "-m", "peakcast.collectors.processes.warm_parent", work]
        self._process: subprocess.Popen[str] | None = None
        self.question: CellQuestion = {}

    @property
    def output(self) -> Any:
        """The pipe from which its answers are read."""
        assert self._process is not None
        return self._process.stdout

    def send(self, question: CellQuestion, timeout_seconds: float) -> None:
        self.question = question
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        request = json.dumps({"question": question, "timeout_seconds": timeout_seconds})
        with contextlib.suppress(BrokenPipeError):  # it has died; the missing answer tells
            print(request, file=self._process.stdin, flush=True)

    def receive(self, *, hung: bool) -> CellAnswer:
        if hung:
            self.end()
            return {"reason": "the process that starts the cells did not answer; it was killed."}
        line = self.output.readline()
        if not line:
            assert self._process is not None
            code = self._process.wait()
            self.end()
            return {"reason": f"the process that starts the cells ended with exit code {code}."}
        answer: CellAnswer = json.loads(line)
        return answer

    def end(self) -> None:
        if self._process is None:
            return
        end_session(self._process.pid)
        self._process.communicate()  # reaps it and closes its pipes
        self._process = None
