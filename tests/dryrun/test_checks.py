"""A check of the script's on a value that only a run knows holds, whichever way it is written."""

from __future__ import annotations

import sys

import pytest

from peakcast.collectors.dryrun.checks import expected, expected_to_contain


class Asked:
    """As a condition it takes the value with which nothing is raised, and else False."""

    def __bool__(self):
        self.answer = expected(sys._getframe(1))
        return bool(self.answer)


CHECKS = {
    "if not asked: raise ValueError(f'{asked} is not finite')": True,
    "if asked: raise ValueError('it is not a number')": False,
    "assert asked, 'it must hold'": True,
    "assert not asked": False,
    "if asked or asked: raise ValueError": False,
    "1 if asked else 2": None,
    "asked.known = not asked": None,
    "while asked: break": None,
}
"""Statement -> the value that lets it go on; None if it raises in no case."""


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_holds(check):
    asked = Asked()
    exec(f"def check(asked):\n    {check}\n", made := {})  # as a string, whose asserts pytest leaves alone
    made["check"](asked)
    assert asked.answer is CHECKS[check]


def test_where_both_ways_raise_nothing_is_expected():
    asked = Asked()
    with pytest.raises(TypeError):
        raises_either_way(asked)
    assert asked.answer is None


def raises_either_way(asked):
    if asked:
        raise ValueError
    raise TypeError


@pytest.mark.parametrize(
    ("check", "contains"),
    [
        ("if 'a' not in columns: raise ValueError('no a')", True),
        ("if 'a' in columns: raise ValueError('an a')", False),
        ("assert 'a' in columns", True),
        ("first = 'a' if 'a' in columns else columns[0]", False),
        ("asked = 'a' in columns", False),
    ],
)
def test_what_a_script_asks_for_is_there_where_its_absence_is_an_error(check, contains):
    seen = []

    class Columns(list):
        def __contains__(self, name):
            seen.append(expected_to_contain(sys._getframe(1)))
            return seen[-1]

    exec(f"def check(columns):\n    {check}\n", made := {})
    made["check"](Columns(["b"]))
    assert seen == [contains]
