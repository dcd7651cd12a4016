"""What tests of collecting share: cells that are small programs, and ledgers beside traces."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import pytest

from peakcast.models.analytical.ledger import ledger
from peakcast.timeline import Phase

ANSWER = """
import os, pathlib, signal, subprocess, sys, time
from peakcast.dialects.job_file import job_from_mapping
from peakcast.errors import CollectorError
from peakcast.records import Measurement

def row(question):
    job = job_from_mapping(question["job"])
    return Measurement(job=job, gpu="A100-80GB", provenance="traced", source="peakcast", peak_allocated_bytes=1)
"""


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """The name of a function that does `text`, as the processes of a collection find it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
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
