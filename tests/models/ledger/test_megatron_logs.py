"""Megatron-LM's logs beside their arguments (`datasets/published/megatron_logs.csv`), replayed; nothing is fitted."""

from __future__ import annotations

import pytest

from peakcast.catalog import gpu
from peakcast.measurements.store import datasets_folder, read_csv
from peakcast.models.baseline.baseline import baseline

ROWS = {row.case.split()[0]: row for row in read_csv(datasets_folder() / "published" / "megatron_logs.csv")}
CLOSE = ("MLOG-001", "MLOG-005", "MLOG-006", "MLOG-007", "MLOG-010", "MLOG-011", "MLOG-019")
"""Dense networks, whose peak is in the head or in a layer of Transformer Engine's."""


@pytest.mark.parametrize("name", CLOSE)
def test_logged_peaks_of_dense_networks(name: str):
    row = ROWS[name]
    found = baseline(row.job, gpu(row.gpu), row.rank)
    assert found.peak_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.001)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_no_logged_peak_is_missed_by_more_than_three_per_cent(name: str):
    """The worst are experts without a capacity, where a rank's share depends on the router, and stages before the last."""
    row = ROWS[name]
    found = baseline(row.job, gpu(row.gpu), row.rank)
    assert found.peak_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.03)
