"""Conditions on values that only a run knows: those that a script checks are taken to hold, so that nothing is raised."""

from __future__ import annotations

import dis
from types import FrameType

MOST_INSTRUCTIONS = 40
"""An error is made within so many instructions after a condition."""


def expected(frame: FrameType | None) -> bool | None:
    """The truth value with which the condition that `frame` is at does not go on to raise an error; None if it is at no
    condition, or if no way from it raises, or both do."""
    if frame is None:
        return None
    steps = list(dis.get_instructions(frame.f_code))
    at = sum(step.offset <= frame.f_lasti for step in steps) - 1  # in a call of Python's, behind it, in its caches
    jump = next((number for number in range(at, min(at + 2, len(steps))) if _is_condition(steps[number])), None)
    if jump is None:
        return None
    target = next((number for number, step in enumerate(steps) if step.offset == steps[jump].argval), len(steps))
    goes_on, jumps = _raises(steps[jump + 1 :]), _raises(steps[target:])
    if goes_on == jumps:
        return None
    return ("IF_TRUE" in steps[jump].opname) == goes_on


def expected_to_contain(frame: FrameType | None) -> bool:
    """Whether the condition that `frame` is at, `x in y` or `x not in y`, raises an error unless `y` has `x`."""
    holds = expected(frame)
    if frame is None or holds is None:
        return False
    steps = (step for step in dis.get_instructions(frame.f_code) if step.offset == frame.f_lasti)
    inverts = next((step.arg == 1 for step in steps if step.opname == "CONTAINS_OP"), False)
    return holds != inverts


def _is_condition(step: dis.Instruction) -> bool:
    return "JUMP" in step.opname and ("IF_TRUE" in step.opname or "IF_FALSE" in step.opname)


def _raises(steps: list[dis.Instruction]) -> bool:
    """Whether `steps` raise an error before they branch or return."""
    for step in steps[:MOST_INSTRUCTIONS]:
        if step.opname in ("RAISE_VARARGS", "LOAD_ASSERTION_ERROR"):
            return True
        if "JUMP" in step.opname or step.opname.startswith(("RETURN", "FOR_ITER", "SEND", "YIELD")):
            return False
    return False
