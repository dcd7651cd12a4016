"""A timeline as a memory snapshot in PyTorch's own format, for its memory viewer (pytorch.org/memory_viz).

The format is that of `torch.cuda.memory._snapshot()`: a mapping with `segments` and, per device, a trace of allocations and
frees, pickled. Source: torch 2.13 `torch/cuda/_memory_viz.py`, `torch/csrc/cuda/memory_snapshot.cpp`. Nothing of torch is
needed to write it. Addresses come from the simulated caching allocator, so the segments are those that it would ask for.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from peakcast.jobs.allocator_settings import Allocator
from peakcast.models.allocator.caching_allocator import Block, CachingAllocator
from peakcast.timelines.timeline import Category, Phase, Timeline

FREED = ("free_requested", "free_completed")
BASE_ADDRESS = 0x7F0000000000
"""First address; any would do except 0, which the viewer treats as none."""
PLAIN = Allocator()


def snapshot(timeline: Timeline, settings: Allocator = PLAIN) -> dict[str, Any]:
    """`timeline` as the mapping that the viewer reads, with the segments of an allocator of these `settings`. The frames of
    an allocation name the tensor, its module, its category and the operation that made it."""
    allocator = CachingAllocator(settings)
    trace: list[dict[str, Any]] = []
    blocks: dict[int, Block] = {}
    for index, instant in _events(timeline):
        if index < 0:
            index = ~index
            block = blocks.pop(index)
            trace += [_entry(timeline, index, action, block, instant) for action in FREED]
            allocator.release(block)
        else:
            reserved = allocator.reserved_bytes
            block = allocator.allocate(int(timeline.num_bytes[index]), _stream(timeline, index))
            blocks[index] = block
            if new_bytes := allocator.reserved_bytes - reserved:  # new pages are at the block, or at its segment's end
                action = "segment_map" if settings.expandable_segments else "segment_alloc"
                begins = _mapped_end(block) - new_bytes if settings.expandable_segments else block.address
                asked = _entry(timeline, index, action, block, instant)
                trace.append({**asked, "addr": BASE_ADDRESS + begins, "size": new_bytes})
            trace.append(_entry(timeline, index, "alloc", block, instant))
    return {
        "segments": _segments(timeline, allocator, blocks),
        "device_traces": [trace],
        "allocator_settings": {"expandable_segments": settings.expandable_segments},
        "external_annotations": [],
    }


def write_snapshot(timeline: Timeline, path: Path, settings: Allocator = PLAIN) -> None:
    """Write `snapshot(timeline, settings)` to `path`."""
    path.write_bytes(pickle.dumps(snapshot(timeline, settings), protocol=4))


def _mapped_end(block: Block) -> int:
    """Address at which the mapped pages of the block's expandable segment end. Without a memory limit, no pages in between
    are unmapped."""
    while block.next is not None and block.next.mapped:
        block = block.next
    return block.address + block.size


def _events(timeline: Timeline) -> list[tuple[int, int]]:
    """(entry, instant) in order of time. A free has the complement (~) of the entry, and comes before the allocations of
    its instant."""
    end = len(timeline.phases)
    born, dies = np.maximum(timeline.born, 0), np.minimum(timeline.dies, end)
    lives = np.flatnonzero((timeline.num_bytes > 0) & (born < dies)).tolist()
    moments = [(2 * int(born[i]) + 1, i) for i in lives] + [(2 * int(dies[i]), ~i) for i in lives if dies[i] < end]
    return [(index, moment // 2) for moment, index in sorted(moments, key=lambda item: item[0])]


def _stream(timeline: Timeline, index: int) -> int:
    return int(timeline.streams[index]) if timeline.streams is not None else 0


def _entry(timeline: Timeline, index: int, action: str, block: Block, instant: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": BASE_ADDRESS + block.address,
        "size": int(timeline.num_bytes[index]),
        "stream": _stream(timeline, index),
        "time_us": instant,
        "frames": _frames(timeline, index),
    }


def _frames(timeline: Timeline, index: int) -> list[dict[str, Any]]:
    """The stack of an allocation, innermost frame first, as the viewer shows it: tensor, module, operation, phase."""
    born = min(max(int(timeline.born[index]), 0), len(timeline.phases) - 1)
    label = str(timeline.labels[born]) if len(timeline.labels) and timeline.born[index] > 0 else "before the step"
    phase = Phase(int(timeline.phases[born])).name.lower() if timeline.born[index] > 0 else "init"
    category = Category(int(timeline.categories[index])).name.lower()
    lines = (
        (timeline.names[index], category),
        (timeline.modules[index] or "step", "module"),
        (label, "operation"),
        (phase, "phase"),
    )
    return [{"name": name, "filename": kind, "line": 0} for name, kind in lines]


def _segments(timeline: Timeline, allocator: CachingAllocator, alive: dict[int, Block]) -> list[dict[str, Any]]:
    """The segments at the end of the step, each with its blocks by address."""
    owner = {block.address: index for index, block in alive.items()}
    every = sorted([*alive.values(), *allocator.free_blocks()], key=lambda block: block.address)
    segments: list[dict[str, Any]] = []
    for block in every:
        if block.previous is None:
            segments.append(_segment(block, allocator.settings.expandable_segments, len(segments)))
        segment, index = segments[-1], owner.get(block.address)
        used = 0 if index is None else block.size
        requested = 0 if index is None else int(timeline.num_bytes[index])
        segment["blocks"].append(
            {
                "address": BASE_ADDRESS + block.address,
                "size": block.size,
                "requested_size": requested,
                "state": "inactive" if index is None else "active_allocated",
                "frames": [] if index is None else _frames(timeline, index),
            }
        )
        if index is not None:
            segment["stream"] = _stream(timeline, index)
        segment["total_size"] += block.size
        for key in ("allocated_size", "active_size"):
            segment[key] += used
        segment["requested_size"] += requested
    return segments


def _segment(block: Block, expandable: bool, number: int) -> dict[str, Any]:
    return {
        "device": 0,
        "address": BASE_ADDRESS + block.address,
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": 0,
        "segment_type": "small" if block.pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "frames": [],
        "blocks": [],
    }
