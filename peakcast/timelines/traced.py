"""What a trace of a job gives: both of its steps, and what the environment lacked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peakcast.timelines.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The timelines of a job that ran on fake tensors; `traced["first"]` and `traced["steady"]`."""

    first: Timeline
    steady: Timeline
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Function that ran as a library's own code -> the package that has a kernel for it and is not installed."""

    def __getitem__(self, step: str) -> Timeline:
        return {"first": self.first, "steady": self.steady}[step]
