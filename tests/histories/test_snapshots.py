"""Snapshots as PyTorch pickles them: made from published histories, read again, and replayed."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest

from peakcast import api
from peakcast.core.errors import RecordError
from peakcast.explaining.snapshot import write_snapshot
from peakcast.histories.files import read_histories
from peakcast.histories.history import Action, History
from peakcast.models.allocator.caching_allocator import CachingAllocator
from peakcast.models.allocator.history_replay import replay_history, start

FOLDER = Path(__file__).resolve().parents[2] / "datasets" / "published" / "histories"
CHOSEN = (
    "jaspersolt-snapshot-6720",  # begins with memory in use
    "niuhuangxiaozi-forward-snap-150-f1c4",  # begins empty
    "maphsge4-snapshot-ec5b",  # ten streams, frees that wait for them
    "kkaitlyn111-memory-ctx256-fullstep-cd7e",  # segments go back
    "constructor-sun-snap-gpu1-b5ef",  # expandable segments whose pages go back
)
NAMES = {
    Action.ALLOC: ("alloc",),
    Action.FREE: ("free_requested", "free_completed"),
    Action.LET_GO: ("free_requested",),
    Action.FREE_LATER: ("free_completed",),
    Action.SEGMENT_ALLOC: ("segment_alloc",),
    Action.SEGMENT_FREE: ("segment_free",),
    Action.OUT_OF_MEMORY: ("oom",),
}
PAGES = {"segment_alloc": "segment_map", "segment_free": "segment_unmap"}
SHIFT = 0x7F0000000000


def as_snapshot(history: History) -> dict[str, Any]:
    """The snapshot that PyTorch would have taken at the end of `history`: its segments, blocks and trace."""
    expandable = history.settings.expandable_segments
    allocator = CachingAllocator(history.settings)
    sizes = {address: (block.size, block.size) for address, block in start(history, allocator).items()}
    sizes |= {block.address: (block.num_bytes, block.requested_bytes) for block in history.blocks}
    spans: dict[int, Any] = {segment.address: segment for segment in history.segments}
    trace = []
    waiting: set[int] = set()
    for event in history.events:
        for name in NAMES.get(event.action, ()):
            action = PAGES.get(name, name) if expandable else name
            place = {"device_free": event.address} if name == "oom" else {"addr": event.address + SHIFT}
            trace.append({"action": action, **place, "size": event.num_bytes, "stream": event.stream, "frames": []})
        if event.action is Action.SEGMENT_ALLOC:
            spans[event.address] = (event.address, event.num_bytes, event.stream, event.num_bytes == 2 << 20)
        elif event.action is Action.SEGMENT_FREE and not expandable:
            del spans[event.address]
        elif event.action is Action.ALLOC:
            sizes[event.address] = (-(-max(event.num_bytes, 1) // 512) * 512, event.num_bytes)
        elif event.action is Action.LET_GO:
            waiting.add(event.address)
        elif event.action in (Action.FREE, Action.FREE_LATER):
            del sizes[event.address]
            waiting.discard(event.address)
    if expandable:
        spans = mapped_at_the_end(history)
    segments = []
    for begins, size, stream, small in sorted(map(tuple, spans.values())):
        inside = sorted(address for address in sizes if begins <= address < begins + size)
        blocks = [
            {
                "address": address + SHIFT,
                "size": sizes[address][0],
                "requested_size": sizes[address][1],
                "state": "active_pending_free" if address in waiting else "active_allocated",
            }
            for address in inside
        ]
        kind = "small" if small else "large"
        segments.append(
            {
                "device": 1, "address": begins + SHIFT, "total_size": size, "stream": stream, "segment_type": kind,
                "segment_pool_id": (0, 0), "is_expandable": expandable, "blocks": blocks,
            }
        )  # fmt: skip
    return {"segments": segments, "device_traces": [[], trace], "allocator_settings": {}}


def mapped_at_the_end(history: History) -> dict[int, tuple[int, int, int, bool]]:
    """Runs of pages that are mapped when an expandable recording ends."""
    pages: dict[int, tuple[int, bool]] = {}
    for event in history.events:
        small = bool(event.num_bytes % (20 << 20))
        step = 2 << 20
        for address in range(event.address, event.address + event.num_bytes, step):
            if event.action is Action.SEGMENT_ALLOC:
                pages[address] = (event.stream, small)
            elif event.action is Action.SEGMENT_FREE:
                del pages[address]
    runs: dict[int, tuple[int, int, int, bool]] = {}
    last = None
    for address, (stream, small) in sorted(pages.items()):
        if last is not None and last + (2 << 20) == address:
            begins = max(runs)
            runs[begins] = (begins, runs[begins][1] + (2 << 20), stream, small)
        else:
            runs[address] = (address, 2 << 20, stream, small)
        last = address
    return runs


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("cut", [0.0, 0.4], ids=["whole", "the last of it"])
def test_a_snapshot_replays_as_the_history_it_was_made_of(tmp_path, name, cut):
    """PyTorch keeps the last so many actions: what came before them is worked out from the end."""
    (history,) = read_histories(FOLDER / f"{name}.jsonl.gz")
    snapshot = as_snapshot(history)
    trace = snapshot["device_traces"][1]
    del trace[: int(cut * len(trace))]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    (read,) = read_histories(path)
    found = replay_history(read)
    assert found.allocations == sum(entry["action"] == "alloc" for entry in trace)
    assert found.same_place == found.allocations
    assert found.agrees
    if not cut:
        assert found.recorded_peak_reserved_bytes == history.peak_reserved_bytes
        assert read.first_reserved_bytes == history.first_reserved_bytes


@pytest.mark.parametrize("expandable", [False, True])
def test_what_explain_writes_is_read_again(tmp_path, expandable):
    found = api.explain({"architecture": "llama-3.2-1b", "sequence_length": 256}, "H100-80GB")
    from peakcast.jobs.allocator_settings import Allocator

    settings = Allocator(expandable_segments=expandable)
    write_snapshot(found.timeline, tmp_path / "step.pickle", settings)
    replayed = api.replay(tmp_path / "step.pickle")
    assert replayed.agrees
    assert replayed.gpus[0].peak_allocated_bytes >= found.timeline.peak().num_bytes


def test_the_categories_of_a_stack(tmp_path):
    frames = {
        "tensor": [
            {
                "name": "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(int)",
                "filename": "??",
                "line": 0,
            },
            {"name": "at::detail::empty_generic(c10::ArrayRef<long>)", "filename": "??", "line": 0},
            {"name": "at::_ops::mm::call(at::Tensor const&)", "filename": "??", "line": 0},
            {"name": "at::_ops::linear::call(at::Tensor const&)", "filename": "??", "line": 0},
            {"name": "forward", "filename": "/usr/lib/torch/nn/modules/linear.py", "line": 1},
            {"name": "forward", "filename": "/home/me/model.py", "line": 2},
        ],
        "workspace": [
            {"name": "at::native::gpu_reduce_kernel<float, 4>(at::TensorIterator&)", "filename": "??", "line": 0},
            {"name": "at::_ops::sum_dim_IntList::call(at::Tensor const&)", "filename": "??", "line": 0},
            {"name": "torch::autograd::generated::MulBackward0::apply(std::vector)", "filename": "??", "line": 0},
            {"name": "torch::autograd::Engine::evaluate_function(std::shared_ptr)", "filename": "??", "line": 0},
        ],
    }
    trace: list[dict[str, Any]] = [{"action": "segment_alloc", "addr": SHIFT, "size": 2 << 20, "stream": 0}]
    trace += [
        {"action": "alloc", "addr": SHIFT + 512 * number, "size": 512, "stream": 0, "frames": stack}
        for number, stack in enumerate((*frames.values(), []))
    ]
    path = tmp_path / "snapshot.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps({"segments": [], "device_traces": [trace]})))
    (history,) = read_histories(path)
    assert history.categories == (
        "mm<linear py:torch:linear.forward<forward",
        "sum_dim_IntList raw:at::native::gpu_reduce_kernel grad:MulBackward0",
        "no frames",
    )
    assert replay_history(history).agrees


# -- what is no snapshot ------------------------------------------------------------------------------------------------

EMPTY: dict[str, Any] = {"segments": [], "device_traces": [[]]}
FOREIGN = {
    "a list": [1, 2],
    "a checkpoint": {"state_dict": {"weight": [0.0]}},
    "nothing recorded": EMPTY,
    "an action without an address": {"segments": [], "device_traces": [[{"action": "alloc"}]]},
    "a negative size": {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": -5, "stream": 0}]]},
    "a size of 2**70": {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": 2**70, "stream": 0}]]},
    "a trace of texts": {"segments": [], "device_traces": ["abc"]},
    "segments that are a number": {"segments": 5, "device_traces": [[{"action": "oom"}]]},
    "a block in no segment": {
        "segments": [],
        "device_traces": [[{"action": "free_completed", "addr": 512, "size": 512, "stream": 0}]],
    },
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_pickle_is_one_sentence(tmp_path, kind):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(FOREIGN[kind]))
    with pytest.raises(RecordError) as refused:
        api.replay(path)
    assert "\n" not in refused.value.message
    assert refused.value.message.endswith(".")
