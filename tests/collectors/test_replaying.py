"""A timeline's calls to PyTorch's allocator, made on a GPU: here the simulated allocator stands for PyTorch's, so that what
is compared is the order of the calls, and the comparison itself."""

import json
import random

import pytest

from peakcast.collectors.machine import probes
from peakcast.collectors.measure import replaying
from peakcast.jobs.allocator_settings import Allocator
from peakcast.models.allocator import replayed
from peakcast.models.allocator.caching_allocator import CachingAllocator
from peakcast.timelines.files import pack, timeline_to_mapping
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

torch = pytest.importorskip("torch")
MIB = 2**20


class Cuda:
    """The calls of torch.cuda that a replay makes, answered by the simulated allocator."""

    def __init__(self):
        self.addresses = {}
        self.start("expandable_segments:False")

    def start(self, settings):
        assert not self.addresses, "the last replay has left something behind"
        self.allocator = CachingAllocator(Allocator(expandable_segments=settings.endswith("True")))
        self.requested = self.peak = 0

    def alloc(self, size, stream):
        block = self.allocator.allocate(size, stream)
        self.addresses[id(block)] = (block, size)
        self.requested += size
        self.peak = max(self.peak, self.requested)
        return id(block)

    def delete(self, address):
        block, size = self.addresses.pop(address)
        self.allocator.release(block)
        self.requested -= size

    def stats(self):
        peaks = {
            "allocated": self.allocator.peak_allocated_bytes,
            "reserved": self.allocator.peak_reserved_bytes,
            "requested": self.peak,
        }
        both = {f"{name}_bytes.all.peak": size for name, size in peaks.items()}
        return both | {f"{name}_bytes.all.current": 0 for name in peaks} | {"num_alloc_retries": 0}


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    monkeypatch.setattr(probes, "require_gpu", lambda: None)
    monkeypatch.setattr(probes, "cuda_environment", lambda: {"gpu_name": "NVIDIA H100 80GB HBM3"})
    numbers = iter(range(1, 1000))
    for name, answer in {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "current_stream": lambda: 0,
        "Stream": lambda: next(numbers),
        "memory_stats": found.stats,
        "caching_allocator_alloc": found.alloc,
        "caching_allocator_delete": found.delete,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", found.start)
    return found


def timeline(seed):
    """100 allocations over 60 instants, of both pools and three streams; some take another's place in one instant."""
    made = random.Random(seed)
    entries = []
    for number in range(100):
        born = made.randrange(60)
        size = made.choice([0, 512, 3 * 512, MIB - 512, 3 * MIB, 11 * MIB, 40 * MIB + 512])
        dies = born + made.choice([0, 1, 1, 5, 100])
        entries.append(Entry(f"t{number}", Category.ACTIVATIONS, size, born, dies, "", made.choice([0, 0, 1, 2])))
    return Timeline.from_entries(entries, [Phase.FORWARD] * 60)


def test_a_replay_makes_the_calls_that_the_simulation_makes(cuda, tmp_path, capsys):
    for seed in range(5):
        mapping = timeline_to_mapping(timeline(seed))
        (tmp_path / f"{seed}.json.gz").write_bytes(pack({"first": mapping, "steady": mapping, "hidden": []}))
    file = tmp_path / "replays.json"
    assert replaying.main([str(tmp_path), str(file)]) == 0
    measured = json.loads(file.read_text())["replays"]
    assert [each["expandable_segments"] for each in measured] == [False, True] * 5
    assert all(each["peak_requested_bytes"] <= each["peak_allocated_bytes"] for each in measured)
    assert replayed.main([str(file), str(tmp_path)]) == 0
    assert "10 of 10 equal to the byte; 0 left out." in capsys.readouterr().out

    measured[3]["peak_reserved_bytes"] += 512
    measured[4]["num_alloc_retries"] = 1
    file.write_text(json.dumps({"replays": measured}))
    assert replayed.main([str(file), str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "1.json.gz  expandable  allocated +0 bytes, reserved -512 bytes" in said
    assert "8 of 9 equal to the byte; 1 left out." in said


def test_what_goes_out_of_memory_is_said_and_given_back(cuda, monkeypatch):
    def full(size, stream):
        if len(cuda.addresses) == 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nmore")
        return cuda.alloc(size, stream)

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", full)
    answer = replaying.replayed(timeline(0), expandable_segments=False)
    assert answer["reason"] == "CUDA out of memory. Tried to allocate 2.00 MiB."
    assert not cuda.addresses
