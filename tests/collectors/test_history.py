"""An allocator's history as timelines. The traces are constructed, in the form of `torch.cuda.memory._snapshot()` (torch
2.13, torch/csrc/cuda/memory_snapshot.cpp): no GPU was at hand. The operators of the last test really run, on the CPU.
Histories that torch's own allocator kept are read in `tests/models/test_torchs_allocator.py`."""

import gzip
import json
from functools import partial

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.runner import collect, timelines_folder
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.collectors.tracing import history
from peakcast.collectors.tracing.history import Operator, ReportedStorage
from peakcast.core.errors import RecordError
from peakcast.measurements.store import read_shard
from peakcast.timelines import files as timelines
from peakcast.timelines.timeline import Category, Phase, Timeline

KIB = 1024
MM, RELU, MM_BACKWARD = (
    Operator("mm.default", Phase.FORWARD, "mlp"),
    Operator("relu.default", Phase.FORWARD, "mlp"),
    Operator("mm.default", Phase.BACKWARD),
)
OPERATORS = [Operator("randn.default", Phase.INIT), MM, RELU, MM_BACKWARD]
WEIGHT, OUT = 0x7F0000000000, 0x7F0000200000
WORKSPACE, SCRATCH = 0x7F0000400000, 0x7F0000600000


def alloc(stamp, address, size, stream=0):
    return {"action": "alloc", "addr": address, "size": size, "stream": stream, "user_metadata": stamp, "time_us": 0}


def free(stamp, address, size=0):
    common = {"addr": address, "size": size, "stream": 0, "user_metadata": stamp, "time_us": 0}
    return [{"action": "free_requested", **common}, {"action": "free_completed", **common}]


TRACE = [
    {"action": "segment_alloc", "addr": WEIGHT, "size": 2 << 20, "stream": 0, "user_metadata": "0"},
    alloc("0", WEIGHT, 10_000),
    alloc("1", WORKSPACE, 32 * KIB),  # cuBLAS takes its workspace for good
    alloc("1", OUT, 6_000),
    alloc("2", SCRATCH, 4_000),  # a kernel's scratch,
    *free("2", SCRATCH),
    alloc("2", SCRATCH, 700),  # and what the operator returned, where the scratch was
    *free("2+", OUT),
    alloc("2+", OUT, 100),  # made by no operator and never seen
    *free("2+", OUT),
    alloc("3", OUT, 10_000, stream=7),
]
STORAGES = [
    ReportedStorage(0, WEIGHT, "mlp.weight", Category.PARAMETERS, "mlp"),
    ReportedStorage(1, OUT, "mm.default", Category.TEMPORARIES, "mlp"),
    ReportedStorage(2, SCRATCH, "relu.default", Category.ACTIVATIONS, "mlp"),
    ReportedStorage(3, OUT, "mlp.weight.grad", Category.GRADIENTS, "mlp"),
]


def test_each_allocation_is_of_the_storage_that_lay_in_it_or_hidden():
    made = history.allocations(TRACE)
    names = [found.name if found else None for found in history.storage_of_each(made, STORAGES)]
    assert names == ["mlp.weight", None, "mm.default", None, "relu.default", None, "mlp.weight.grad"]
    assert [(each.born, each.dies) for each in made] == [(0, None), (1, None), (2, 5), (3, 4), (4, None), (5, 6), (6, None)]


def test_hidden_allocations_are_counted_by_operator_with_what_lives_at_the_peak():
    found = history.hidden(history.allocations(TRACE), STORAGES, OPERATORS)
    assert found == [
        {"operator": "mm.default", "phase": "forward", "count": 1, "largest_bytes": 32 * KIB, "bytes_at_peak": 32 * KIB},
        {"operator": "relu.default", "phase": "forward", "count": 1, "largest_bytes": 4096, "bytes_at_peak": 0},
        {"operator": "after relu.default", "phase": "forward", "count": 1, "largest_bytes": 512, "bytes_at_peak": 0},
    ]


def test_the_timeline_is_the_allocators_own_account_by_hand():
    made = history.allocations(TRACE)
    found = history.timeline(made, STORAGES, OPERATORS, 1, 4)
    weight, workspace, out, scratch, kept, stray, gradient = 10_240, 32 * KIB, 6_144, 4_096, 1_024, 512, 10_240
    assert found.totals.tolist() == [
        weight + workspace,
        weight + workspace + out,
        weight + workspace + out + scratch,
        weight + workspace + out + kept,
        weight + workspace + kept + stray,
        weight + workspace + kept + gradient,
    ]
    assert found.peak().num_bytes == 54_272
    assert found.phase_peaks() == {Phase.FORWARD: 53_248, Phase.BACKWARD: 54_272}
    assert found.composition(5) == {
        Category.WORKSPACES: workspace,
        Category.PARAMETERS: weight,
        Category.GRADIENTS: gradient,
        Category.ACTIVATIONS: kept,
    }
    assert found.labels[3:5] == ["relu.default", "after relu.default"]
    assert found.streams.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert "hidden: mm.default" in found.names


def test_what_was_freed_before_the_step_is_not_in_it_and_an_unknown_free_changes_nothing():
    trace = [*free("0", 0xDEAD), *TRACE]
    found = history.timeline(history.allocations(trace), STORAGES, OPERATORS, 3, 4)
    assert found.totals.tolist() == [10_240 + 32 * KIB + 1_024 + 10_240]
    assert history.timeline([], STORAGES, OPERATORS, 0, 4).totals.tolist() == []


def test_memory_that_waits_for_another_stream_is_not_allocated_any_more():
    first, second = free("2+", OUT)
    trace = [alloc("1", OUT, 512), first, alloc("2", SCRATCH, 512), second]
    found = history.timeline(history.allocations(trace), [], OPERATORS, 1, 3)
    assert found.totals.tolist() == [512, 512]


# -- files ---------------------------------------------------------------------------------------------------------------


def test_a_file_gives_back_both_steps(tmp_path):
    made = history.allocations(TRACE)
    first, steady = (history.timeline(made, STORAGES, OPERATORS, *span) for span in ((0, 2), (2, 4)))
    content = {"first": timelines.timeline_to_mapping(first), "steady": timelines.timeline_to_mapping(steady), "hidden": []}
    path = tmp_path / "a.json.gz"
    path.write_bytes(timelines.pack(content))
    again = timelines.read_timelines(path)
    for timeline, step in ((first, "first"), (steady, "steady")):
        assert again[step].totals.tolist() == timeline.totals.tolist()
        assert (again[step].names, again[step].labels) == (timeline.names, timeline.labels)
        assert again[step].streams.tolist() == timeline.streams.tolist()
    assert timelines.pack(content) == path.read_bytes()  # the same history, the same bytes


def test_too_large_a_history_is_not_packed(monkeypatch):
    monkeypatch.setattr(timelines, "MAX_PACKED_BYTES", 100)
    assert timelines.pack({"names": [str(number) for number in range(1000)]}) is None


zipped = partial(gzip.compress, mtime=0)  # the same bytes in every process that collects these tests


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",  # a pickle
        zipped(b"[1]"),
        zipped(b"{"),
        zipped(b"[" * 100_000),
        zipped(b'{"first": {}, "steady": {}}'),
        zipped(b'{"first": 1, "steady": []}'),
        zipped(json.dumps({"first": {"names": ["a"], "modules": [], "labels": []}, "steady": {}}).encode()),
        zipped(b"{}")[:-3],
        b"",
    ],
)
def test_a_file_that_is_no_history_is_refused_in_a_sentence(tmp_path, data):
    path = tmp_path / "a.json.gz"
    path.write_bytes(data)
    with pytest.raises(RecordError, match=r"a\.json\.gz (cannot be read|holds no timelines): .*record it again"):
        timelines.read_timelines(path)


def test_a_small_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(timelines, "MAX_UNPACKED_BYTES", 10_000)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b" " * 1_000_000))
    with pytest.raises(RecordError, match="holds more than 10,000 bytes"):
        timelines.read_timelines(path)


# -- recorded ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("from_the_warm_parent")
def test_a_collection_keeps_timelines_beside_its_rows(tmp_path):
    pytest.importorskip("transformers")
    shard = tmp_path / "mine.shard.jsonl"
    jobs = expand({"include": [{"architecture": {"name": "gpt2", "num_hidden_layers": 1}, "sequence_length": 64}]})
    summary = collect(jobs, shard, CollectSettings(trace=True, history=True))
    assert summary.finished == 1, summary.reasons
    (row,) = read_shard(shard)[0]
    path = timelines_folder(shard) / row.environment["readings"]["timelines"]
    assert path == tmp_path / "mine.shard.timelines" / f"{row.key}.json.gz"
    found = timelines.read_timelines(path)
    assert max(timeline.peak().num_bytes for timeline in found.values()) == row.peak_allocated_bytes
    assert path.stat().st_size < 50_000


@pytest.fixture
def stamps(monkeypatch):
    """What operators stamp the allocator's history with, in order."""
    torch = pytest.importorskip("torch")
    seen = []
    monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", seen.append)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    return seen


def test_real_operators_stamp_the_history_and_their_tensors_are_told_from_the_rest(stamps):
    """A history as an allocator would have kept it for these operators, one workspace added; addresses are the tensors'."""
    import torch

    from peakcast.collectors.tracing.recorded_run import Recording

    recording = Recording("cpu")
    with recording:
        layer = torch.nn.Linear(64, 128, bias=False)
        recording.name([("weight", layer.weight)], Category.PARAMETERS)
        recording.step()
        recording.phase = Phase.FORWARD
        x = torch.ones(256, 64)
        y = layer(x)
        recording.phase = Phase.BACKWARD
        recording.step()
        y.sum().backward()
        recording.name([("weight.grad", layer.weight.grad)], Category.GRADIENTS)
    labels = list(recording._labels)
    assert stamps[-1] == ""
    assert stamps[:-1] == [stamp for number in range(len(labels)) for stamp in (str(number), f"{number}+")]
    at = {tensor: tensor.untyped_storage().data_ptr() for tensor in (x, y, layer.weight, layer.weight.grad)}
    made_by = {tensor: next(s.operator for s in map(recording._storage, *zip(*recording._addresses.items(), strict=True))
                            if s.address == address) for tensor, address in at.items()}  # fmt: skip
    events = [alloc(str(number), at[tensor], tensor.nbytes) for tensor, number in made_by.items()]
    (matmul,) = (number for number, label in enumerate(labels) if label == "mm.default" and number < made_by[y] + 1)
    events.append(alloc(str(matmul), 64, 8 << 20))
    content = recording.content_of(sorted(events, key=lambda event: int(event["user_metadata"])))
    assert [(entry["operator"], entry["largest_bytes"]) for entry in content["hidden"]] == [("mm.default", 8 << 20)]
    steady = timelines.timeline_from_mapping(content["steady"])
    assert isinstance(steady, Timeline)
    alive = dict(zip(steady.names, steady.categories.tolist(), strict=True))
    assert alive["weight"] == Category.PARAMETERS
    assert alive["weight.grad"] == Category.GRADIENTS
    assert alive["hidden: mm.default"] == Category.WORKSPACES
    assert steady.peak(Phase.BACKWARD).num_bytes == 32_768 + 65_536 + 131_072 + 32_768 + (8 << 20)
