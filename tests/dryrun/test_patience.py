"""How far a script is followed once enough steps have ended."""

from __future__ import annotations

import pytest

from peakcast.collectors.dryrun import patience
from peakcast.collectors.dryrun.lengths import NUM_STEPS


@pytest.fixture
def follow(monkeypatch):
    """A function that tells after how many steps following ends, given each step's seconds and graphs compiled."""
    clock = {"seconds": 0.0, "graphs": 0}
    monkeypatch.setattr(patience.time, "process_time", lambda: clock["seconds"])
    monkeypatch.setattr(patience.time, "monotonic", lambda: clock["seconds"])
    monkeypatch.setattr(patience, "_num_graphs", lambda: clock["graphs"])

    def followed(steps, *, evaluates_later=False, limit=10_000.0):
        watched = followed.watched = patience.Patience(limit)
        for number, (seconds, graphs) in enumerate(steps, 1):
            clock["seconds"] += seconds
            clock["graphs"] += graphs
            watched.end_step()
            if number >= NUM_STEPS and not watched.goes_on(evaluates_later=evaluates_later):
                return number
        return None

    return followed


QUICK, COMPILES = (0.1, 0), (20.0, 3)


def test_what_compiles_nothing_ends_with_the_required_steps(follow):
    assert follow([QUICK] * 10) == NUM_STEPS


def test_stages_of_a_warm_up_are_followed_until_nothing_new_is_compiled(follow):
    stages = [COMPILES, QUICK, QUICK, QUICK, COMPILES, QUICK, QUICK, COMPILES]  # a batch size for some steps each
    assert follow([*stages, *[QUICK] * 20]) == len(stages) + patience.QUIET_STEPS


def test_an_evaluation_is_waited_for_while_steps_are_quick(follow):
    assert follow([COMPILES, *[QUICK] * 99], evaluates_later=True) == NUM_STEPS + patience.MOST_STEPS
    slow = (5.0, 0)
    assert follow([slow] * 99, evaluates_later=True) == NUM_STEPS


def test_a_share_of_the_time_limit_ends_it_in_any_case(follow):
    assert follow([COMPILES] * 99, limit=160.0) == 5  # of 20 s each; 0.6 of the limit are 96 s


def test_seconds_of_compiling_are_no_seconds_of_waiting(follow):
    stages = [COMPILES, *[QUICK] * 9] * 5  # batch sizes for ten steps each, as the records of modded-nanogpt warm up
    assert follow(stages, evaluates_later=True) is None


def test_what_the_time_limit_cuts_off_is_said(follow):
    follow([COMPILES] * 99, limit=160.0)
    assert follow.watched.interrupted == "torch.compile was still compiling when 60% of --timeout-seconds had passed"
    follow([COMPILES, *[QUICK] * 99])
    assert not follow.watched.interrupted
    follow([COMPILES, *[QUICK] * 99], limit=30.0)  # what it needs to begin with
    assert not follow.watched.interrupted
