"""What tests of collecting share: cells that are small programs."""

from __future__ import annotations

import itertools
import textwrap

import pytest

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
