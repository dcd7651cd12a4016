"""How the cells of a grid are run: one value, which the command, the function of the same name and the runner share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peakcast.collectors.processes.engines import find_engine
from peakcast.core.cores import available_cores
from peakcast.core.errors import CollectorError
from peakcast.core.workers import check_processes

MOST_TRACES_AT_ONCE = 4
"""A warm parent takes about 0.6 GB and a trace of a 7B model as much again: with more than four, memory runs short before
cores do."""
TRACED_GPU = "A100-80GB"
"""The GPU type that a trace represents if none is named."""
RANKS = ("auto", "real", "one")
"""Words that `ranks` may have; it may also list numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectSettings:
    """How cells are run. Raises: CollectorError naming the first setting that is wrong, CatalogError for an unknown GPU."""

    trace: bool = False
    """Trace on fake tensors instead of measuring on a GPU."""
    budget_minutes: float | None = None
    """No cell starts after this long."""
    timeout_seconds: float = 600
    """The longest that one cell may take."""
    gpu: str | None = None
    """The GPU type; None: what CUDA reports or, for a trace, TRACED_GPU."""
    processes: int | None = None
    """How many cells the engine "local" runs at a time; None: one or, for traces, one per core, at most four."""
    engine: str = "local"
    """Where cells run; "ray" and "slurm" use more than one machine."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of these engines."""
    history: bool = False
    """Whether each run's timelines are stored too."""
    ranks: str = "auto"
    """A job of several ranks runs with all of them if there are enough GPUs, else as one that represents the others
    ("auto"); always with all ("real", which traces with gloo on the CPU); or never ("one": one rank, or in a pipeline one
    of each kind of stage). Numbers ("0,3") are the ranks to represent, one at a time."""
    repeats: int = 1
    """How often each cell is run."""

    def __post_init__(self) -> None:
        for name in ("budget_minutes", "timeout_seconds", "processes", "repeats"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise CollectorError(f"{name}={value} must be above 0 and finite.", parameter=name, value=value)
        if self.processes is not None:
            check_processes(self.processes)
        if isinstance(given := self.engine_options.get("processes"), int):
            check_processes(given)
        self.numbers_of_ranks()
        find_engine(self.engine)
        if self.gpu is not None:
            from peakcast import catalog

            catalog.gpu(self.gpu)

    @property
    def gpu_type(self) -> str | None:
        """The catalog's name of the GPU type of rows; None: what CUDA reports."""
        if self.gpu is None:
            return TRACED_GPU if self.trace else None
        from peakcast import catalog

        return catalog.gpu(self.gpu).name

    def numbers_of_ranks(self) -> list[int]:
        """The numbers that `ranks` lists; none if it is a word. Raises: CollectorError for anything else."""
        if self.ranks in RANKS:
            return []
        try:
            numbers = sorted({int(number) for number in self.ranks.split(",")})
        except ValueError:
            numbers = [-1]
        if numbers[0] < 0:
            raise CollectorError(
                f"ranks={self.ranks!r} must be one of {', '.join(RANKS)}, or numbers of ranks such as 0,3.",
                parameter="ranks",
                value=self.ranks,
            )
        return numbers

    def options_of_engine(self) -> dict[str, Any]:
        """The engine's options: those given, and how many cells run at a time."""
        options = dict(self.engine_options)
        if self.engine == "local" and "gpus" not in options:
            options.setdefault("processes", self.processes or (traces_at_once() if self.trace else 1))
        if self.engine == "ray" and self.trace:
            options.setdefault("num_gpus", 0)
        return options


def traces_at_once() -> int:
    """How many processes with torch fit the cores and the memory of this machine."""
    return min(available_cores(), MOST_TRACES_AT_ONCE)
