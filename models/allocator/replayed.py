"""Compares the simulated allocator with PyTorch's own on the same calls: `python -P -m peakcast.models.allocator.replayed
FILE FOLDER`.

FILE is what `peakcast.collectors.measure.replaying` measured on a GPU for the timelines in FOLDER. Equal means equal to
the byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peakcast.jobs.allocator_settings import Allocator
from peakcast.models.allocator.replay import replay
from peakcast.timelines.files import read_timelines


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayComparison:
    """One timeline under one setting: the peaks in bytes of PyTorch's allocator and of the simulated one, as pairs."""

    timeline: str
    expandable_segments: bool
    allocated_bytes: tuple[int, int]
    reserved_bytes: tuple[int, int]

    @property
    def equal(self) -> bool:
        """Whether both peaks are equal to the byte."""
        return self.allocated_bytes[0] == self.allocated_bytes[1] and self.reserved_bytes[0] == self.reserved_bytes[1]


def compared(replays: Iterable[Mapping[str, Any]], folder: Path) -> list[ReplayComparison]:
    """Each measured replay with the simulation of its calls. One that gave memory back, or ran out of it, is left out,
    because the GPU's free memory decided it."""
    found = []
    for measured in replays:
        if measured.get("reason") or measured["num_alloc_retries"]:
            continue
        timeline = read_timelines(folder / measured["timeline"])[measured["step"]]
        expandable = bool(measured["expandable_segments"])
        simulated = replay(timeline, Allocator(expandable_segments=expandable))
        found.append(
            ReplayComparison(
                timeline=measured["timeline"],
                expandable_segments=expandable,
                allocated_bytes=(measured["peak_allocated_bytes"], simulated.peak_allocated_bytes),
                reserved_bytes=(measured["peak_reserved_bytes"], simulated.peak_reserved_bytes),
            )
        )
    return found


def main(arguments: list[str]) -> int:
    """Prints a line for each replay; exit code 0 when all are equal to the byte."""
    file, folder = map(Path, arguments)
    replays = json.loads(file.read_text(encoding="utf-8"))["replays"]
    lines = compared(replays, folder)
    for each in lines:
        segments = "expandable" if each.expandable_segments else "native"
        off = [mine - theirs for theirs, mine in (each.allocated_bytes, each.reserved_bytes)]
        said = "equal" if each.equal else f"allocated {off[0]:+,} bytes, reserved {off[1]:+,} bytes"
        print(f"{each.timeline}  {segments:<10}  {said}")
    print(f"{sum(each.equal for each in lines)} of {len(lines)} equal to the byte; {len(replays) - len(lines)} left out.")
    return 0 if lines and all(each.equal for each in lines) else 1


if __name__ == "__main__":
    sys.exit(
        main(sys.argv[1:]) if len(sys.argv) == 3 else "usage: python -P -m peakcast.models.allocator.replayed FILE FOLDER"
    )
