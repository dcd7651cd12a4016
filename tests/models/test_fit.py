from __future__ import annotations

import pytest

from peakcast.core.errors import CalibrationError
from peakcast.models.calibration.fit import fit, rows_for
from peakcast.models.calibration.samples import prepare, repeat_weights


def test_a_gpu_with_few_rows_shares_those_of_all(fakes):
    rows = fakes.rows(num_architectures=8, gpus=("H100-80GB", "A100-80GB"))
    calibration = fit(rows, "H100-80GB", created="2026-11-21", **fakes.stand_ins)
    assert calibration.quantities["peak_allocated_bytes"].rows_by_gpu == {"A100-80GB": 16, "H100-80GB": 16}


def test_a_gpu_with_enough_rows_uses_its_own(fakes):
    rows = fakes.rows(num_architectures=20, rows_each=8, gpus=("H100-80GB", "A100-80GB"))
    samples = prepare(rows, **fakes.stand_ins).samples
    assert {sample.row.gpu for sample in rows_for("H100-80GB", "peak_allocated_bytes", samples)} == {"H100-80GB"}


def test_too_few_architectures_are_refused_with_the_reasons(fakes):
    with pytest.raises(CalibrationError, match=r"at least 3 architectures are needed.*peakcast collect"):
        fit(fakes.rows(num_architectures=2), "H100-80GB", created="2026-11-21", **fakes.stand_ins)


def test_repeats_weigh_as_one(fakes):
    rows = fakes.rows(num_architectures=2, rows_each=1)
    samples = prepare([rows[0], rows[0], rows[1]], **fakes.stand_ins).samples
    assert sorted(repeat_weights(samples)) == [0.5, 0.5, 1.0]


def test_device_baselines_leave_nccl_out_where_collectives_were_fake(fakes):
    from dataclasses import replace

    row = next(row for row in fakes.rows() if row.job.parallelism.world_size > 1)
    both = prepare([replace(row, collectives="fake"), replace(row, collectives="nccl")], **fakes.stand_ins).samples
    fake, real = sorted(both, key=lambda sample: sample.row.collectives)
    assert fake.baseline.communicator_bytes == 0
    difference = real.baseline.peak_device_bytes - fake.baseline.peak_device_bytes
    assert difference == real.baseline.communicator_bytes > 0
