"""Rows of a small network, and tables of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements import store
from peakcast.measurements.records import Measurement

TINY = Architecture(
    name="tiny",
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=256,
)


def make_row(case: str = "a", **changes) -> Measurement:
    values = {
        "job": TrainingJob(architecture=TINY),
        "gpu": "H100-80GB",
        "provenance": "measured",
        "source": "peakcast",
        "case": case,
        "peak_allocated_bytes": 123_456,
        "observed": "2025-06-30",
    }
    return Measurement(**{**values, **changes})


@pytest.fixture(scope="session")
def row() -> Callable[..., Measurement]:
    """`row(case, **changes)`: a measured row, for tests (which cannot import from here)."""
    return make_row


@pytest.fixture(scope="session")
def table() -> Callable[..., Path]:
    """`table(path, *rows)`: a table of `rows` at `path`."""

    def written(path: Path, *rows: Measurement) -> Path:
        store.write_csv(path, rows)
        return path

    return written
