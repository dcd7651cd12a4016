from __future__ import annotations

import math
from dataclasses import replace

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.core.units import GIB
from peakcast.jobs.spec import Parallelism
from peakcast.models.baseline.baseline import baseline
from peakcast.models.calibration.features import FEATURES, features, of_quantity


@pytest.fixture
def row(fakes):
    job = fakes.job(
        parallelism=Parallelism(data_parallel_size=4, sharding="fsdp2", tensor_parallel_size=2),
        versions=FrozenMapping({"torch": "2.11.0+cu130"}),
    )
    device = fakes.devices["H100-80GB"]
    return features(job, device, baseline(job, device, 0, ledger=fakes.ledger))


def test_a_row_has_every_documented_feature_in_order_and_all_are_finite(row):
    assert list(row) == list(FEATURES)
    assert all(math.isfinite(value) for value in row.values())
    assert all(reason for reason in FEATURES.values())


def test_shares_of_the_peak_add_up_to_one(row):
    assert sum(value for name, value in row.items() if name.startswith("share_")) == pytest.approx(1)
    assert sum(value for name, value in row.items() if name.startswith("peak_in_")) == 1


def test_layout_versions_and_gpu_enter(row):
    assert (row["log2_data_parallel"], row["log2_tensor_parallel"], row["num_parallel_axes"]) == (2, 1, 2)
    assert (row["sharded"], row["distributed_optimizer"]) == (1, 1)
    assert (row["torch_release"], row["compute_capability"], row["num_sms"]) == (211, 90, 1.32)


def test_a_fixed_amount_weighs_by_the_quantity_that_it_is_part_of(fakes):
    """1 GiB beside 2 GiB of device memory is a half, however little of them the tensors are."""
    job, device = fakes.job(), fakes.devices["H100-80GB"]
    base = replace(baseline(job, device, 0, ledger=fakes.ledger), replayed_allocated_bytes=GIB, peak_device_bytes=2 * GIB)
    row = features(job, device, base)
    shares = [of_quantity(row, base, name)["gib_over_start"] for name in ("peak_allocated_bytes", "peak_device_bytes")]
    assert shares == [1, 0.5]
    assert row["gib_over_start"] == 1
    assert {**of_quantity(row, base, "peak_device_bytes"), "gib_over_start": 1} == row
