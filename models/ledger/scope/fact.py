"""`Fact`: a named statement about a job, true or false. Facts are combined to the conditions of the tables of this folder.

`asked & other`: both hold; `asked | other`: at least one does; `~asked`: it does not. Most facts are a setting with one of
some values, which `setting`, `option` and `trait` make; what needs more than that is a function in `facts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.networks.families import family_of


class Fact:
    """A statement about a job that is true or false. `name`: the statement in words."""

    __slots__ = ("holds", "name")

    def __init__(self, holds: Callable[[TrainingJob], object], name: str) -> None:
        self.holds, self.name = holds, name

    def __call__(self, job: TrainingJob) -> bool:
        """Whether the statement is true of `job`."""
        return bool(self.holds(job))

    def __and__(self, other: Fact) -> Fact:
        if self is always or other is always:
            return other if self is always else self
        one, two = self.holds, other.holds
        return Fact(lambda job: one(job) and two(job), f"{self._within('|')} & {other._within('|')}")

    def __or__(self, other: Fact) -> Fact:
        one, two = self.holds, other.holds
        return Fact(lambda job: one(job) or two(job), f"{self._within('&')} | {other._within('&')}")

    def __invert__(self) -> Fact:
        holds = self.holds
        return Fact(lambda job: not holds(job), f"not {self._within('&', '|')}")

    def __repr__(self) -> str:
        return self.name

    def _within(self, *operators: str) -> str:
        """The name, in brackets if it joins facts by one of `operators`."""
        return f"({self.name})" if any(f" {operator} " in self.name for operator in operators) else self.name


def fact(holds: Callable[[TrainingJob], object]) -> Fact:
    """The fact that a function of a job computes, named as the function is."""
    return Fact(holds, holds.__name__.replace("_", " "))


def setting(path: str, *values: object) -> Fact:
    """Whether the setting at `path` of a job (`"finetuning.method"`) is one of `values`; without values, whether it is set
    to anything but false, zero or nothing."""
    return _of(attrgetter(path), path, values)


def option(name: str, *values: object) -> Fact:
    """Whether the convention `name`, which a framework's release or `framework_options` decides, is one of `values`;
    without values, whether it is set. A convention that the framework does not have is nothing."""
    return _of(lambda job: conventions(job).get(name), name, values)


def trait(path: str, *values: object) -> Fact:
    """Whether the trait at `path` of the network's family (`"attention.flash"`, `catalog/families/`) is one of `values`;
    without values, whether it has it."""
    value = attrgetter(path)
    return _of(lambda job: value(family_of(job.architecture)), path, values)


def differs(where: str) -> Fact:
    """Whether traces of the family are known to differ from the ledger there (`TraceTraits.differ`)."""
    return Fact(lambda job: where in family_of(job.architecture).traces.differ, where)


def above(path: str, most: int) -> Fact:
    """Whether the number at `path` of a job is above `most`."""
    value = attrgetter(path)
    return Fact(lambda job: value(job) > most, f"{path}>{most}")


def _of(value: Callable[[TrainingJob], Any], name: str, values: tuple[object, ...]) -> Fact:
    if not values:
        return Fact(value, name)
    return Fact(lambda job: value(job) in values, f"{name}={'/'.join(map(str, values))}")


always = Fact(lambda job: True, "always")
