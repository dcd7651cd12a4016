"""Reads `torch.cuda.memory._snapshot()` as `_dump_snapshot` pickles it: the allocator's state at the end, and its latest
actions. The state before the first of these is reconstructed by undoing them from the end.

The format is that of torch 2.13 `torch/csrc/cuda/memory_snapshot.cpp` and `torch/cuda/memory.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from peakcast.core.errors import RecordError
from peakcast.core.units import MIB
from peakcast.histories.categories import category_of
from peakcast.histories.history import LARGEST_SLACK_BYTES, Action, Event, HandedOut, History, Segment, block_bytes
from peakcast.jobs.allocator_settings import Allocator

ACTIONS = {
    "alloc": Action.ALLOC,
    "free_requested": Action.LET_GO,
    "free_completed": Action.FREE_LATER,
    "segment_alloc": Action.SEGMENT_ALLOC,
    "segment_map": Action.SEGMENT_ALLOC,
    "segment_free": Action.SEGMENT_FREE,
    "segment_unmap": Action.SEGMENT_FREE,
    "oom": Action.OUT_OF_MEMORY,
}
"""PyTorch's names of actions; others, such as "snapshot", are marks."""
LIMIT = 1 << 63
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_PAGE_BYTES = 20 * MIB


def histories_of(snapshot: object, name: str) -> list[History]:
    """The history of each GPU of which a snapshot has any data. Raises: RecordError."""
    if not isinstance(snapshot, Mapping) or not {"segments", "device_traces"} <= set(snapshot):
        raise RecordError(
            f"{name} is no memory snapshot: a mapping with segments and device_traces is expected, as "
            "torch.cuda.memory._dump_snapshot writes it after _record_memory_history()."
        )
    try:
        traces, segments = snapshot["device_traces"], snapshot["segments"]
        marks = snapshot.get("external_annotations") or []
        settings = snapshot.get("allocator_settings") or {}
        found = [
            _history(name, device, trace, [each for each in segments if each.get("device", 0) == device], settings, marks)
            for device, trace in enumerate(traces)
            if trace
        ]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RecordError(f"{name} is damaged: its snapshot lacks something or has it wrong ({error!r}).") from error
    if not found:
        raise RecordError(
            f"{name} has no history: call torch.cuda.memory._record_memory_history() before what is to be recorded, and "
            "_dump_snapshot after it."
        )
    return found


def _history(
    name: str,
    device: int,
    trace: Sequence[Mapping[str, Any]],
    segments: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    marks: Sequence[Mapping[str, Any]],
) -> History:
    streams: dict[int, int] = {0: 0}
    categories: dict[str, int] = {}
    events = _events(trace, streams, categories, [mark for mark in marks if mark.get("device", device) in (device, -1)])
    expandable = any(each.get("is_expandable") for each in segments) or any(
        each["action"] in ("segment_map", "segment_unmap") for each in trace
    )
    state = _State(segments, streams, expandable=expandable)
    state.undo(events)
    return History(
        name=name if device == 0 else f"{name} (GPU {device})",
        device=device,
        settings=_settings(settings, expandable=expandable),
        segments=state.segments(),
        blocks=state.blocks(),
        events=tuple(_joined(events)),
        categories=tuple(categories),
        peak_reserved_bytes=_peak(state.segments(), events),
    )


def _peak(segments: Sequence[Segment], events: Sequence[Event]) -> int:
    """The largest sum of segments."""
    reserved = most = sum(segment.num_bytes for segment in segments)
    for event in events:
        if event.action is Action.SEGMENT_ALLOC:
            reserved += event.num_bytes
            most = max(most, reserved)
        elif event.action is Action.SEGMENT_FREE:
            reserved -= event.num_bytes
    return most


def _settings(found: Mapping[str, Any], *, expandable: bool) -> Allocator:
    """The snapshot's settings that decide where blocks are placed; for torch, 0, -1 and very large values mean "not
    set"."""
    split, threshold = found.get("max_split_size", -1), found.get("garbage_collection_threshold", 0.0)
    megabytes = _whole(split) >> 20 if isinstance(split, int) and 0 < split < 1 << 50 else None
    divisions = found.get("roundup_power2_divisions")
    text = None
    if isinstance(divisions, Mapping) and any(divisions.values()):
        text = "[" + ",".join(f"{key}:{value}" for key, value in divisions.items() if value) + "]"
    return Allocator(
        expandable_segments=expandable,
        max_split_size_mb=megabytes if megabytes and megabytes >= 20 else None,
        garbage_collection_threshold=threshold if isinstance(threshold, float) and 0 < threshold < 1 else None,
        roundup_power2_divisions=text,
    )


def _events(
    trace: Sequence[Mapping[str, Any]],
    streams: dict[int, int],
    categories: dict[str, int],
    marks: Sequence[Mapping[str, Any]],
) -> list[Event]:
    """The actions as events, with the program's marks inserted by time. Several actions often share one stack object."""
    found: list[Event] = []
    known: dict[int, int] = {}
    waiting = sorted(
        ((_whole(mark["time_us"]), str(mark.get("stage")), str(mark.get("name"))) for mark in marks), reverse=True
    )
    for entry in trace:
        action = ACTIONS.get(entry["action"], Action.MARK)
        while waiting and waiting[-1][0] <= entry.get("time_us", 0):
            _, stage, text = waiting.pop()
            text = f"{stage.lower()} {text}"
            found.append(Event(Action.MARK, category=categories.setdefault(text, len(categories))))
        if action is Action.MARK:
            found.append(Event(action))
            continue
        address = _whole(entry.get("addr", entry.get("device_free", 0)))
        stream = streams.setdefault(_whole(entry.get("stream", 0)), len(streams))
        category = -1
        if action is Action.ALLOC:
            frames = entry.get("frames") or ()
            if id(frames) not in known:
                known[id(frames)] = categories.setdefault(category_of(frames), len(categories))
            category = known[id(frames)]
        found.append(Event(action, address, _whole(entry["size"]), stream, category))
    return found


def _joined(events: Sequence[Event]) -> list[Event]:
    """The events, with one free instead of two for a block that can be reused as soon as it is freed."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if (
            event.action is Action.FREE_LATER
            and last is not None
            and last.action is Action.LET_GO
            and last.address == event.address
        ):
            found[-1] = last._replace(action=Action.FREE)
        else:
            found.append(event)
    return found


def _whole(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 2 * LIMIT:
        raise ValueError(f"{str(value)[:40]!r} is no number of bytes")
    return int(value)


class _State:
    """Segments and allocated blocks at the end of a recording; its actions are undone from there."""

    def __init__(self, segments: Sequence[Mapping[str, Any]], streams: dict[int, int], *, expandable: bool) -> None:
        self._expandable = expandable
        self._segments: dict[int, Segment] = {}
        self._sizes: dict[int, tuple[int | None, int]] = {}
        """Address -> (size, requested bytes) of each block; the size is None for a block that was freed before the end."""
        for each in segments:
            small = each.get("segment_type") == "small"
            address = _whole(each["address"])
            stream = streams.setdefault(_whole(each.get("stream", 0)), len(streams))
            self._segments[address] = Segment(address, _whole(each["total_size"]), stream, small)
            at = address
            for block in each["blocks"]:
                at = _whole(block.get("address", at))
                size = _whole(block["size"])
                if block["state"] != "inactive":
                    self._sizes[at] = size, _whole(block.get("requested_size", size))
                at += size

    def undo(self, events: Sequence[Event]) -> None:
        """Go back to the state before the first event."""
        for event in reversed(events):
            if event.action is Action.ALLOC:
                self._sizes.pop(event.address, None)
            elif event.action is Action.FREE_LATER:
                self._sizes[event.address] = None, event.num_bytes
            elif event.action is Action.LET_GO and event.address not in self._sizes:
                self._sizes[event.address] = None, event.num_bytes  # not yet reusable when the recording ends
            elif event.action is Action.SEGMENT_ALLOC:
                self._take(event)
            elif event.action is Action.SEGMENT_FREE:
                page = SMALL_SEGMENT_BYTES if event.num_bytes % LARGE_PAGE_BYTES else LARGE_PAGE_BYTES
                small = page == SMALL_SEGMENT_BYTES if self._expandable else event.num_bytes == SMALL_SEGMENT_BYTES
                self._give(Segment(event.address, event.num_bytes, event.stream, small))

    def _give(self, segment: Segment) -> None:
        """Put back a segment, or pages of an expandable one."""
        if self._expandable:
            for other in list(self._segments.values()):
                if other.stream == segment.stream and other.address + other.num_bytes == segment.address:
                    segment = other._replace(num_bytes=other.num_bytes + segment.num_bytes)
            after = self._segments.get(segment.address + segment.num_bytes)
            if after is not None and after.stream == segment.stream:
                del self._segments[after.address]
                segment = segment._replace(num_bytes=segment.num_bytes + after.num_bytes, small=after.small)
        self._segments[segment.address] = segment

    def _take(self, event: Event) -> None:
        """Remove a segment, or pages at either end of a run or within it."""
        begins, end = event.address, event.address + event.num_bytes
        for segment in list(self._segments.values()) if begins not in self._segments else [self._segments[begins]]:
            last = segment.address + segment.num_bytes
            if segment.address <= begins and end <= last:
                del self._segments[segment.address]
                for start, stop in ((segment.address, begins), (end, last)):
                    if stop > start:
                        self._segments[start] = segment._replace(address=start, num_bytes=stop - start)
                return

    def segments(self) -> tuple[Segment, ...]:
        return tuple(sorted(self._segments.values()))

    def blocks(self) -> tuple[HandedOut, ...]:
        """Each block with its size. For a block that was freed since, a snapshot has only the requested size; a large block
        may have kept a rest that was too small to be split off."""
        ordered, segments = sorted(self._sizes), self.segments()
        begins = [segment.address for segment in segments]
        found = []
        for address, after in pairwise([*ordered, LIMIT]):
            size, requested = self._sizes[address]
            if size is None:
                size = block_bytes(requested)
                at = bisect_left(begins, address + 1) - 1
                if at >= 0 and not segments[at].small and not self._expandable:
                    gap = min(after, begins[at] + segments[at].num_bytes) - address - size
                    size += gap if 0 < gap <= LARGEST_SLACK_BYTES else 0
            found.append(HandedOut(address, size, requested))
        return tuple(found)
