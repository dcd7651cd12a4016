"""Engines: where cells run. An engine fetches a question whenever it has a free place, and yields each answer once, as it
comes.

An engine is a function `(questions, timeout_seconds, work=..., **options) -> iterator of (question, answer)`; an answer is
`{"row": ...}` or `{"reason": ...}`. It fetches the next question only when it has a free place, so the caller can stop at
any time. Engines do not resume: the caller does not ask again for what the shard has.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from peakcast.core.errors import CollectorError, near_misses

WORK = "peakcast.collectors.measure.worker:run"
"""`module:function` that makes a `Measurement` of a question."""
ENGINES = {
    "local": ("peakcast.collectors.processes.engines.local", "local"),
    "ray": ("peakcast.collectors.processes.engines.ray", "peakcast[ray]"),
    "slurm": ("peakcast.collectors.processes.engines.slurm", "peakcast[slurm]"),
}
"""Name -> module with a function `run`, and the package that it needs."""

CellQuestion = Mapping[str, Any]
CellAnswer = dict[str, Any]


class Engine(Protocol):
    """Runs cells somewhere."""

    def __call__(
        self, questions: Iterable[CellQuestion], timeout_seconds: float, *, work: str = WORK, **options: Any
    ) -> Iterator[tuple[CellQuestion, CellAnswer]]:
        """Yields each question with its answer, as answers come."""


def find_engine(name: str) -> Engine:
    """The engine called `name`. Raises: CollectorError when there is none, or its package is missing."""
    if name not in ENGINES:
        hint = near_misses(name, ENGINES) or "."
        raise CollectorError(
            f"engine={name!r} is not known{hint} Known: {', '.join(ENGINES)}.", parameter="engine", value=name
        )
    module, package = ENGINES[name]
    try:
        found: Engine = importlib.import_module(module).run
    except ImportError as error:
        raise CollectorError(
            f"engine={name!r} needs a package that is not installed ({error}); install it with: pip install '{package}'.",
            parameter="engine",
            value=name,
        ) from error
    return found
