"""The CUDA allocator's own history of a run as timelines: the purpose of every byte, and which bytes belong to no tensor.

The history is `torch.cuda.memory._snapshot()["device_traces"]`: a mapping for each action of the allocator, in order. While
it is recorded, every operator stamps the actions of its thread with its number (`_set_memory_metadata`, torch 2.10 or
newer): "17" while it runs, "17+" after it. An allocation is *visible* if, while it lived, the storage of a tensor that an
operator took or returned was at its address; any other is *hidden*: a workspace of a kernel or a library. Nothing here
imports torch, so recorded histories can be read anywhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peakcast.core.units import ALLOCATION_UNIT_BYTES, round_up
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

MOST_STREAMS = 127
"""The most streams that a timeline's column can tell apart."""
BEFORE = -1
"""The operator number of actions before any operator ran."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator that ran: its name, and the phase and module it ran in."""

    name: str
    phase: Phase
    module: str = ""


@dataclass(frozen=True, slots=True)
class ReportedStorage:
    """A tensor's memory as the operators reported it. `operator`: the first operator that used it."""

    operator: int
    address: int
    name: str
    category: Category
    module: str = ""


@dataclass(slots=True)
class Allocation:
    """One allocation, requested while operator `operator` ran (or after it, if `between`). Instants count allocations."""

    operator: int
    between: bool
    address: int
    num_bytes: int
    stream: int
    born: int
    dies: int | None = None


def allocations(trace: Sequence[Mapping[str, Any]]) -> list[Allocation]:
    """The allocations of an allocator's trace, in order. Each ends when the program frees it, even if its block waits for
    another stream: it is then no longer `allocated`."""
    made: list[Allocation] = []
    alive: dict[int, Allocation] = {}
    streams: dict[int, int] = {}
    for entry in trace:
        action, address = entry["action"], int(entry.get("addr", 0))
        stamp = str(entry.get("user_metadata") or "")
        operator = int(stamp.removesuffix("+")) if stamp else BEFORE
        if action == "alloc":
            size = max(ALLOCATION_UNIT_BYTES, round_up(int(entry["size"]), ALLOCATION_UNIT_BYTES))
            stream = min(streams.setdefault(int(entry.get("stream", 0)), len(streams)), MOST_STREAMS)
            made.append(Allocation(operator, not stamp or stamp.endswith("+"), address, size, stream, born=len(made)))
            alive[address] = made[-1]
        elif action == "free_requested" and (freed := alive.pop(address, None)) is not None:
            freed.dies = len(made)
    return made


def storage_of_each(made: Sequence[Allocation], storages: Sequence[ReportedStorage]) -> list[ReportedStorage | None]:
    """For each allocation the storage in it, None for a hidden one. A storage belongs to the last allocation at its address
    that was made before the operator that returned the storage ended."""
    at: dict[int, list[Allocation]] = {}
    for allocation in made:
        at.setdefault(allocation.address, []).append(allocation)
    found: list[ReportedStorage | None] = [None] * len(made)
    for storage in storages:
        group = at.get(storage.address, [])
        index = bisect.bisect_right(group, (storage.operator, False), key=lambda each: (each.operator, each.between))
        if index and found[group[index - 1].born] is None:
            found[group[index - 1].born] = storage
    return found


def timeline(
    made: Sequence[Allocation], storages: Sequence[ReportedStorage], operators: Sequence[Operator], start: int, stop: int
) -> Timeline:
    """The allocations from operator `start` to `stop` (exclusive). Its instants are the allocations made in that range."""
    inside = [index for index, each in enumerate(made) if start <= each.operator < stop]
    if not inside:
        return Timeline.from_entries([], [])
    first, last = inside[0], inside[-1] + 1
    entries = []
    for allocation, storage in zip(made, storage_of_each(made, storages), strict=True):
        dies = last if allocation.dies is None else min(allocation.dies, last)
        if allocation.born >= last or dies <= max(first, allocation.born):
            continue
        by = _operator(operators, allocation.operator)
        name, category, module = (
            (storage.name, storage.category, storage.module)
            if storage is not None
            else (f"hidden: {_label(allocation, operators)}", Category.WORKSPACES, by.module)
        )
        born = max(allocation.born, first) - first
        entries.append(Entry(name, category, allocation.num_bytes, born, dies - first, module, allocation.stream))
    within = made[first:last]
    phases = [_operator(operators, each.operator).phase for each in within]
    return Timeline.from_entries(entries, phases, [_label(each, operators) for each in within])


def hidden(
    made: Sequence[Allocation], storages: Sequence[ReportedStorage], operators: Sequence[Operator]
) -> list[dict[str, Any]]:
    """The hidden allocations by operator and phase, those with most bytes at once first: their number, the largest, and how
    many of their bytes lived at the run's peak."""
    change = [0] * (len(made) + 1)
    for each in made:
        change[each.born] += each.num_bytes
        if each.dies is not None:
            change[each.dies] -= each.num_bytes
    total, largest, peak = 0, -1, 0
    for instant, size in enumerate(change[:-1]):
        total += size
        if total > largest:
            largest, peak = total, instant
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for allocation, storage in zip(made, storage_of_each(made, storages), strict=True):
        if storage is not None:
            continue
        phase = _operator(operators, allocation.operator).phase.name.lower()
        key = (_label(allocation, operators), phase)
        empty = {"operator": key[0], "phase": phase, "count": 0, "largest_bytes": 0, "bytes_at_peak": 0}
        group = groups.setdefault(key, empty)
        group["count"] += 1
        group["largest_bytes"] = max(group["largest_bytes"], allocation.num_bytes)
        if allocation.born <= peak and (allocation.dies is None or allocation.dies > peak):
            group["bytes_at_peak"] += allocation.num_bytes
    return sorted(groups.values(), key=lambda group: (-group["bytes_at_peak"], -group["largest_bytes"], group["operator"]))


def _operator(operators: Sequence[Operator], number: int) -> Operator:
    return operators[number] if 0 <= number < len(operators) else Operator("before the first operator", Phase.INIT)


def _label(allocation: Allocation, operators: Sequence[Operator]) -> str:
    name = _operator(operators, allocation.operator).name
    return f"after {name}" if allocation.between and allocation.operator != BEFORE else name
