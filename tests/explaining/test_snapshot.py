"""The snapshot opens in PyTorch's own memory viewer, and says what the timeline says."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from peakcast.api import explain
from peakcast.explaining.snapshot import snapshot, write_snapshot
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.spec import TrainingJob
from peakcast.models.allocator.replay import replay
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Timeline

NAMES = ["full", "long_lora", "checkpointed", "megatron"]


@pytest.fixture(params=NAMES)
def timeline(request: pytest.FixtureRequest, jobs: dict[str, TrainingJob]) -> Timeline:
    return ledger(jobs[request.param])


def alive(trace: list[dict[str, Any]]) -> Iterator[tuple[int, dict[int, dict[str, Any]]]]:
    """Bytes alive after each event, and what lives at which address, as the viewer counts them."""
    blocks: dict[int, dict[str, Any]] = {}
    total = 0
    for event in trace:
        if event["action"] == "alloc":
            assert event["addr"] not in blocks
            blocks[event["addr"]] = event
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= blocks.pop(event["addr"])["size"]
        yield total, blocks


def test_replayed_event_by_event_its_peak_is_the_timelines(timeline: Timeline) -> None:
    (trace,) = snapshot(timeline)["device_traces"]
    assert max(total for total, _ in alive(trace)) == timeline.peak().num_bytes


def test_what_lives_at_the_end_is_what_its_segments_hold(timeline: Timeline) -> None:
    made = snapshot(timeline)
    *_, (total, blocks) = alive(made["device_traces"][0])
    held = [b for segment in made["segments"] for b in segment["blocks"] if b["state"] == "active_allocated"]
    assert {block["address"] for block in held} == set(blocks)
    assert sum(block["requested_size"] for block in held) == total == timeline.totals[-1]


def test_segments_are_those_of_the_simulated_allocator(timeline: Timeline) -> None:
    made = snapshot(timeline)
    assert sum(segment["total_size"] for segment in made["segments"]) == replay(timeline).reserved_bytes
    asked = [event for event in made["device_traces"][0] if event["action"] == "segment_alloc"]
    assert sum(event["size"] for event in asked) == replay(timeline).peak_reserved_bytes
    for segment in made["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]


def test_pytorchs_viewer_takes_the_file(tmp_path: Path, jobs: dict[str, TrainingJob]) -> None:
    timeline = ledger(jobs["full"])
    path = tmp_path / "step.pickle"
    write_snapshot(timeline, path)
    with path.open("rb") as file:
        read = pickle.load(file)
    assert "<html>" in _memory_viz.trace_plot(read).lower() or "<script" in _memory_viz.trace_plot(read)
    assert "<script" in _memory_viz.segment_plot(read)
    (trace,) = read["device_traces"]
    assert f"{len(trace)} entries" in _memory_viz.trace(read)
    summary = _memory_viz.segsum(read)
    assert f"segments: {len(read['segments'])}" in summary
    assert len(_memory_viz.memory(read, format_flamegraph=lambda lines: lines).splitlines()) > 0


def test_frames_name_the_tensor_its_module_and_its_category(jobs: dict[str, TrainingJob]) -> None:
    (trace,) = snapshot(ledger(jobs["full"]))["device_traces"]
    frames = {tuple((frame["name"], frame["filename"]) for frame in event["frames"][:2]) for event in trace}
    assert (("mlp.gate_proj.weight.grad", "gradients"), ("layers.3", "module")) in frames


def test_expandable_segments_are_one_per_pool(jobs: dict[str, TrainingJob]) -> None:
    made = snapshot(ledger(jobs["full"]), Allocator(expandable_segments=True))
    assert {segment["is_expandable"] for segment in made["segments"]} == {True}
    assert len(made["segments"]) == replay(ledger(jobs["full"]), Allocator(expandable_segments=True)).num_segments


def test_the_segments_at_any_event_hold_the_blocks_that_live_then(jobs: dict[str, TrainingJob]) -> None:
    """As the viewer goes back from the end: what a segment was given later is taken off its end."""
    made = snapshot(ledger(jobs["full"]), Allocator(expandable_segments=True))
    (trace,) = made["device_traces"]
    final = {segment["address"]: segment["total_size"] for segment in made["segments"]}
    grown = dict.fromkeys(final, 0)
    for event in trace:
        home = max(address for address in final if address <= event["addr"])
        if event["action"] == "segment_map":
            assert event["addr"] == home + grown[home]
            grown[home] += event["size"]
        elif event["action"] == "alloc":
            assert event["addr"] + event["size"] <= home + grown[home]
    assert grown == final


def test_the_door_writes_it_under_the_jobs_own_allocator(tmp_path: Path) -> None:
    job = {"architecture": "distilgpt2", "sequence_length": 512, "allocator": {"expandable_segments": True}}
    explain(job, snapshot=tmp_path / "step.pickle")
    read = pickle.loads((tmp_path / "step.pickle").read_bytes())
    assert {segment["is_expandable"] for segment in read["segments"]} == {True}
