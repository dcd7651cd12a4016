"""Replays timelines through PyTorch's own caching allocator, on a GPU: `python -P -m peakcast.collectors.measure.replaying
FOLDER FILE`. FOLDER has timelines as a collection keeps them (`--history`); FILE gets, as JSON, what the allocator
reserved for each, with and without expandable segments.

Compared with what the simulated allocator reserves for the same calls (`peakcast.models.allocator.replayed`), this tests
the simulation byte by byte, without anything else that a training run does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peakcast.timelines.files import read_timelines
from peakcast.timelines.timeline import Timeline

STEP = "steady"


def calls(timeline: Timeline) -> Iterator[tuple[int, bool]]:
    """(entry, true if allocated, false if freed) in the order in which a step calls the allocator: at each instant first
    the frees, then the allocations, both in the order of entries, as in `peakcast.models.allocator.replay`."""
    last = len(timeline.phases)
    columns = zip(timeline.born.tolist(), timeline.dies.tolist(), timeline.num_bytes.tolist(), strict=True)
    lives = [(entry, born, dies) for entry, (born, dies, size) in enumerate(columns) if size and min(dies, last) > born]
    events = [(born, True, entry) for entry, born, _ in lives]
    events += [(dies, False, entry) for entry, _, dies in lives if dies < last]
    for _, allocated, entry in sorted(events):
        yield entry, allocated


def replayed(timeline: Timeline, *, expandable_segments: bool) -> dict[str, Any]:
    """Peaks that PyTorch's allocator reports for the calls of `timeline`, starting with an empty cache."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable_segments}")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    numbers = [0] * len(timeline.num_bytes) if timeline.streams is None else timeline.streams.tolist()
    streams = {number: torch.cuda.Stream() if number else torch.cuda.current_stream() for number in set(numbers)}
    alive: dict[int, int] = {}
    answer: dict[str, Any] = {"expandable_segments": expandable_segments}
    try:
        for entry, allocated in calls(timeline):
            if allocated:
                size, stream = int(timeline.num_bytes[entry]), streams[numbers[entry]]
                alive[entry] = torch.cuda.caching_allocator_alloc(size, stream=stream)
            else:
                torch.cuda.caching_allocator_delete(alive.pop(entry))
    except torch.cuda.OutOfMemoryError as error:
        answer["reason"] = str(error).splitlines()[0]
    stats = torch.cuda.memory_stats()
    for name in ("allocated", "reserved", "requested"):
        key = f"{name}_bytes.all"
        answer[f"peak_{name}_bytes"] = int(stats[f"{key}.peak"]) - int(before[f"{key}.current"])
    answer["num_alloc_retries"] = int(stats["num_alloc_retries"]) - int(before["num_alloc_retries"])
    for address in alive.values():
        torch.cuda.caching_allocator_delete(address)
    return answer


def replay_folder(folder: Path) -> list[dict[str, Any]]:
    """The replays of every file of timelines in `folder`, in alphabetical order."""
    found = []
    for path in sorted(folder.glob("*.json.gz")):
        timeline = read_timelines(path)[STEP]
        both = (replayed(timeline, expandable_segments=expandable) for expandable in (False, True))
        found += [{"timeline": path.name, "step": STEP, **one} for one in both]
    return found


def main(arguments: list[str]) -> int:
    """Returns exit code 0; the file is complete once it exists. Raises: CollectorError without a GPU."""
    from peakcast.collectors.machine import probes
    from peakcast.core.durable import replace_file

    probes.require_gpu()
    folder, file = map(Path, arguments)
    answer = {**probes.cuda_environment(), "versions": probes.versions(), "replays": replay_folder(folder)}
    replace_file(file, json.dumps(answer, indent=1).encode())
    return 0


if __name__ == "__main__":
    from peakcast.core.errors import PeakcastError

    try:
        usage = "usage: python -P -m peakcast.collectors.measure.replaying FOLDER FILE.json"
        sys.exit(main(sys.argv[1:]) if len(sys.argv) == 3 else usage)
    except PeakcastError as error:
        sys.exit(f"peakcast: {error}")
