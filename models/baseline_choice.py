"""Where the timelines of an answer come from: the ledger's own blocks, recipes recorded from the library, or a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

from peakcast.errors import SpecError
from peakcast.spec import TrainingJob
from peakcast.timeline import Timeline

BaselineName = Literal["auto", "ledger", "recipe", "trace"]
"""`auto`: the ledger, and recipes for networks of families that it does not know."""
Trace = Callable[[TrainingJob, int, str | None], dict[str, Timeline]]
"""A job, a rank and a GPU type, whose kernels run -> the timelines of its "first" and "steady" step."""
_CHOSEN: ContextVar[tuple[BaselineName, Trace | None]] = ContextVar("baseline", default=("auto", None))


@contextmanager
def baseline_from(name: str, trace: Trace | None = None) -> Iterator[None]:
    """In here answers come from `name`; `trace` is who traces. Raises: SpecError for another name."""
    if name not in get_args(BaselineName):
        raise SpecError(
            f"baseline={name!r} must be one of {', '.join(get_args(BaselineName))}.", parameter="baseline", value=name
        )
    token = _CHOSEN.set((name, trace))  # type: ignore[arg-type]
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def chosen() -> BaselineName:
    """Where answers come from."""
    return _CHOSEN.get()[0]


def tracer() -> Trace | None:
    """Who traces, where answers come from traces."""
    return _CHOSEN.get()[1]
