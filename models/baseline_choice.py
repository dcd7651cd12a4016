"""Where the timelines of an answer come from: the ledger's own blocks, recipes recorded from the library, or a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

from peakcast.errors import SpecError
from peakcast.spec import TrainingJob
from peakcast.timeline import Timeline

BaselineName = Literal["auto", "ledger", "recipe", "trace"]
"""`auto`: the ledger, and recipes for networks of families that it does not know."""
Trace = Callable[[TrainingJob, int, str | None], dict[str, Timeline]]
"""A job, a rank and a GPU type, whose kernels run -> the timelines of its "first" and "steady" step."""
_CHOSEN: ContextVar[tuple[BaselineName, Trace | None]] = ContextVar("baseline", default=("auto", None))


@dataclass(frozen=True, slots=True)
class SeenRun:
    """A run that was seen from its beginning on."""

    timeline: Timeline
    compiled: bool
    """Whether code that `torch.compile` wrote was part of it: its order of requests is that of one release on one GPU."""


_RUN: ContextVar[SeenRun | None] = ContextVar("run", default=None)


@contextmanager
def baseline_from(name: str, trace: Trace | None = None, run: SeenRun | None = None) -> Iterator[None]:
    """In here answers come from `name`; `trace` is who traces, `run` what reserves, where the whole was seen.
    Raises: SpecError for another name."""
    if name not in get_args(BaselineName):
        raise SpecError(
            f"baseline={name!r} must be one of {', '.join(get_args(BaselineName))}.", parameter="baseline", value=name
        )
    token, run_token = _CHOSEN.set((name, trace)), _RUN.set(run)  # type: ignore[arg-type]
    try:
        yield
    finally:
        _CHOSEN.reset(token)
        _RUN.reset(run_token)


def chosen() -> BaselineName:
    """Where answers come from."""
    return _CHOSEN.get()[0]


def tracer() -> Trace | None:
    """Who traces, where answers come from traces."""
    return _CHOSEN.get()[1]


def seen_run() -> SeenRun | None:
    """The run, where the whole was seen."""
    return _RUN.get()
