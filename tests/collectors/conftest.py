"""What tests of collecting share: cells that are small programs, and ledgers beside traces."""

from __future__ import annotations

import itertools
import os
import textwrap
from pathlib import Path

import pytest

from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Phase

ANSWER = """
import os, pathlib, signal, subprocess, sys, time
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.core.errors import CollectorError
from peakcast.measurements.records import Measurement

def row(question):
    job = job_from_mapping(question["job"])
    return Measurement(job=job, gpu="A100-80GB", provenance="traced", source="peakcast", peak_allocated_bytes=1)
"""


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """The name of a function that does `text`, as the processes of a collection find it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]  # the rest: of a checkout that is not installed
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    names = (f"cell_{number}" for number in itertools.count())

    def written(text):
        name = next(names)
        body = textwrap.indent(textwrap.dedent(text), "    ")
        (folder / f"{name}.py").write_text(f"{ANSWER}\ndef work(question):\n{body}\n")
        return f"{name}:work"

    return written


@pytest.fixture(scope="session")
def gone():
    """Whether a process has ended (a zombie has)."""

    def ended(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    return ended


@pytest.fixture(scope="session")
def ledger_equals_trace(traced):
    """Asserts that the ledger of a job's rank equals its trace within `rel` of each phase's peak, in the first and in a
    steady step; gives both, step by step."""

    def compare(job, rank=0, *, rel):
        both = {step: (ledger(job, rank=rank, step=step), trace) for step, trace in traced(job, rank).items()}
        for step, (closed_form, trace) in both.items():
            for phase, size in trace.phase_peaks().items():
                if phase is not Phase.INIT:
                    assert closed_form.peak(phase).num_bytes == pytest.approx(size, rel=rel), (rank, step, phase.name)
        return both

    return compare


class StandIn:
    """The readings of a GPU that is not there; what runs is real, on this machine's CPU. Numbers count up by call."""

    def __init__(self):
        self.reading = 0
        self.used, self.reserved, self.pinned = 0, 0, 0
        self.pageable = None

    def peaks(self):
        self.reading += 1
        return dict.fromkeys(("allocated", "reserved", "active", "requested"), self.reading)


@pytest.fixture
def stand_in(monkeypatch):
    """A cell can be measured by `worker.run` in this process: CUDA's calls answer with a `StandIn`'s numbers."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from peakcast.collectors import stacks as frameworks
    from peakcast.collectors.machine import probes
    from peakcast.collectors.machine.nvml import Nvml
    from peakcast.collectors.measure import worker
    from peakcast.collectors.stacks import layouts

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    found = StandIn()
    for name in ("set_device", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: found.reserved)
    for name in ("require_gpu", "open_context"):
        monkeypatch.setattr(probes, name, lambda: None)
    monkeypatch.setattr(probes, "cuda_environment", lambda: {"gpu_name": "NVIDIA H100 80GB HBM3"})
    monkeypatch.setattr(probes, "allocator_peaks", found.peaks)
    monkeypatch.setattr(probes, "allocator_counts", lambda: {"num_alloc_retries": 0, "num_ooms": 0})
    monkeypatch.setattr(probes, "pinned_peak_bytes", lambda: found.pinned)
    monkeypatch.setattr(probes, "attention_backend", lambda job: "math")
    monkeypatch.setattr(layouts, "_device_type", lambda: "cpu")

    class Read(Nvml):
        """Memory in use is what the test says."""

        def used_bytes(self):
            return found.used

    monkeypatch.setattr(worker, "Nvml", Read)
    for name in ("build", "build_inference"):
        real = getattr(frameworks, name)
        monkeypatch.setattr(frameworks, name, lambda job, device, real=real: real(job, "cpu"))
    yield found
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
