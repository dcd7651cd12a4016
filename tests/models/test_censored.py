"""Runs out of memory as bounds, from the row to the calibration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peakcast.jobs.spec import Parallelism
from peakcast.models.baseline.baseline import baseline
from peakcast.models.calibration.fit import fit, fit_quantity
from peakcast.models.calibration.regressors import Zero
from peakcast.models.calibration.samples import TRUST, prepare

DEVICE_BYTES = "peak_device_bytes"


@pytest.fixture(scope="module")
def rows(fakes):
    """Device memory is 5 % above the baseline."""
    rows = fakes.rows(num_architectures=12, rows_each=2)
    peaks = [baseline(r.job, fakes.devices[r.gpu], 0, ledger=fakes.ledger) for r in rows]
    found = []
    for row, base in zip(rows, peaks, strict=True):
        own = base.peak_device_bytes - base.communicator_bytes  # collectives="none"
        found.append(replace(row, peak_allocated_bytes=None, peak_device_bytes=round(own * 1.05)))
    return found


def out_of_memory(row, fakes, short_of_capacity):
    """`row` with so many tokens that its baseline is this share below what the GPU has."""
    device = fakes.devices[row.gpu]

    def with_tokens(tokens):
        return row.job.replace(micro_batch_size=1, sequence_length=tokens)

    def needed(tokens):
        return baseline(with_tokens(tokens), device, 0, ledger=fakes.ledger).peak_device_bytes

    few, many = 2**20, 2**21
    per_token = (needed(many) - needed(few)) / (many - few)
    tokens = few + int((device.cuda_memory_bytes * (1 - short_of_capacity) - needed(few)) / per_token)
    return replace(row, job=with_tokens(tokens), outcome="out_of_memory", case="too big", peak_device_bytes=None)


def test_a_run_out_of_memory_wanted_more_than_the_gpu_has(fakes, rows):
    prepared = prepare([*rows, out_of_memory(rows[0], fakes, 0.3)], **fakes.stand_ins)
    (bound,) = prepared.censored
    assert len(prepared.samples) == 24
    assert prepared.left_out == {"outcome is out_of_memory": 1}
    assert bound.measured(DEVICE_BYTES) == bound.device.cuda_memory_bytes
    assert bound.measured("peak_allocated_bytes") is None
    assert bound.log_ratio(DEVICE_BYTES) == pytest.approx(0.357, abs=0.05)


def test_a_bound_that_is_missed_widens_the_bars_and_one_that_is_kept_changes_nothing(fakes, rows):
    def learned(*more):
        prepared = prepare([*rows, *more], **fakes.stand_ins)
        samples = [*prepared.samples, *prepared.censored]
        return fit_quantity(samples, DEVICE_BYTES, make_candidates=lambda: [Zero()])

    def upper(calibration):
        return calibration.intervals.bars_["all"].upper

    kept = out_of_memory(rows[0], fakes, -0.3)
    missed = [out_of_memory(row, fakes, 0.3) for row in rows[::2]]
    assert upper(learned(kept)) == upper(learned())
    assert upper(learned(*missed)) > upper(learned()) + 0.1
    assert learned(*missed).rows_by_gpu == {"H100-80GB": 24}


def test_bounds_are_part_of_what_a_calibration_was_made_of(fakes, rows):
    stand_ins = fakes.stand_ins
    without = fit(rows, "H100-80GB", created="", **stand_ins)
    with_bound = fit([*rows, out_of_memory(rows[0], fakes, -0.3)], "H100-80GB", created="", **stand_ins)
    assert with_bound.rows_digest != without.rows_digest
    assert all(with_bound.quantities[name].domain == without.quantities[name].domain for name in without.quantities)


def test_what_a_row_outside_missed_is_charged_to_jobs_outside(fakes):
    """One source alone ran tensor parallel: when it is held out nobody has shown that layout. An architecture that is held
    out leaves others of its source, and charges nothing."""
    rows = fakes.rows(num_architectures=6, rows_each=1)
    tensor_parallel = rows[-1].job.replace(parallelism=Parallelism(tensor_parallel_size=2))
    alone = replace(rows[-1], job=tensor_parallel, collectives="nccl", source="another/project")
    missed = replace(alone, peak_allocated_bytes=int(1.2 * (alone.peak_allocated_bytes or 0)))

    def spread(row):
        samples = prepare([*rows[:-1], row], **fakes.stand_ins).samples
        return fit_quantity(samples, "peak_allocated_bytes", make_candidates=lambda: [Zero()]).spread.coefficients_

    assert spread(missed)["outside"] > 1.5 * spread(alone)["outside"]
    same_source = replace(missed, source=rows[0].source)
    assert spread(same_source)["outside"] == pytest.approx(spread(replace(alone, source=rows[0].source))["outside"])


def test_own_rows_are_trusted_more_than_those_of_others(fakes):
    row = fakes.rows(num_architectures=1, rows_each=1)[0]
    ours, theirs = prepare([row, replace(row, provenance="published")], **fakes.stand_ins).samples
    by_kind = {sample.row.provenance: sample for sample in (ours, theirs)}
    assert by_kind["measured"].trust == 2 * by_kind["published"].trust == TRUST["measured"]
    assert by_kind["published"].features["published"] == 1
    assert by_kind["measured"].features["published"] == 0
