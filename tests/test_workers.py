"""Processes that answer questions: what takes too long, too much memory, or a process down, costs its own answer alone."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from peakcast.core.deadline import TimeIsUp, limited
from peakcast.core.errors import SpecError
from peakcast.core.units import MIB
from peakcast.core.workers import LostError, QuestionLimits, Workers, check_processes


def work(question):
    """Twice the number; "spin", "die", "fill" and "fault" do what they say."""
    if question == "spin":
        while True:
            pass
    if question == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if question == "fill":
        return len(bytearray(600 * MIB))
    if question == "fault":
        raise SpecError("this cannot be.", parameter="question", value=question)
    return 2 * question


def test_what_goes_wrong_costs_its_own_answer():
    questions = [*range(40), "die", *range(100, 140), "spin", "fault", "fill", *range(200, 240)]
    with Workers(work, 2, QuestionLimits(1.0, 300 * MIB)) as workers:
        answers = dict(workers.answers(questions))
    assert {question: answer for question, answer in answers.items() if isinstance(question, int)} == {
        question: 2 * question for question in questions if isinstance(question, int)
    }
    assert "was ended by SIGKILL" in answers["die"].message
    assert "no answer within 1 s" in answers["spin"].message
    assert "needs more memory" in answers["fill"].message
    assert (answers["fault"].parameter, answers["fault"].value) == ("question", "fault")


def test_threads_ask_at_once_and_a_lost_process_is_replaced():
    found = {}

    def ask(workers, question):
        try:
            found[question] = workers.ask(question)
        except (LostError, SpecError) as error:
            found[question] = error.message

    with Workers(work, 2, QuestionLimits(2.0)) as workers:
        threads = [threading.Thread(target=ask, args=(workers, q)) for q in (1, "die", "spin", "fault", 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (found[1], found[2], found[3], found["fault"]) == (2, 4, 6, "this cannot be.")
    assert "SIGKILL" in found["die"]
    assert "no answer within" in found["spin"]


@pytest.mark.parametrize("processes", [0, -1, 100_000])
def test_a_number_of_processes_that_no_machine_has_is_refused(processes):
    with pytest.raises(SpecError, match=f"processes={processes:,} must be from 1 to"):
        check_processes(processes)


def test_a_thread_is_interrupted_when_its_time_is_up_and_no_other():
    spun = []

    def spin():
        try:
            with limited(0.3):
                work("spin")
        except TimeIsUp:
            spun.append(True)

    thread = threading.Thread(target=spin)
    thread.start()
    begun = time.monotonic()
    with limited(60):
        thread.join(20)
    assert spun == [True]
    assert time.monotonic() - begun < 10
    for _ in range(1000):  # what is in time is never interrupted, not even just after its end
        with limited(0.001):
            pass
