"""A new fit beside the one in use, architecture by architecture."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from peakcast.models.calibration.calibration import Calibration
from peakcast.models.calibration.fit import fit
from peakcast.models.calibration.samples import prepare
from peakcast.models.evaluation.promotion import compare

QUANTITY = "peak_allocated_bytes"


@pytest.fixture(scope="module")
def rows(fakes):
    return fakes.rows(num_architectures=12, noise=0.002, hidden=lambda random, unit: 0.02)


@pytest.fixture(scope="module")
def new(fakes, rows):
    return fit(rows, "H100-80GB", created="2026-11-21", **fakes.stand_ins)


def with_errors(calibration: Calibration, change) -> Calibration:
    learned = calibration.quantities[QUANTITY]
    errors = {name: change(error) for name, error in learned.unseen_errors.items()}
    return replace(calibration, quantities={QUANTITY: replace(learned, unseen_errors=errors)})


def test_a_calibration_keeps_what_it_missed_on_each_architecture(new):
    errors = new.quantities[QUANTITY].unseen_errors
    assert set(errors) == set(new.quantities["peak_allocated_bytes"].domain.architectures)
    assert max(errors.values()) < 0.01  # the hidden 2 % are learned from the others


def test_the_same_fit_is_not_worse_than_itself(fakes, rows, new):
    found = compare(new, new, prepare(rows, **fakes.stand_ins).samples)
    assert found.promoted
    assert found.quantities[0].difference == 0
    assert found.sentence.startswith("not worse on unseen architectures (allocated ")


def test_a_fit_that_misses_more_on_unseen_architectures_is_not_promoted(fakes, rows, new):
    samples = prepare(rows, **fakes.stand_ins).samples
    worse = with_errors(new, lambda error: error + 0.01)
    assert not compare(worse, new, samples).promoted
    assert compare(new, worse, samples).promoted
    json.dumps(compare(worse, new, samples).to_mapping(), allow_nan=False)


def test_what_the_one_in_use_never_saw_is_asked_of_it(fakes, rows, new):
    """The one in use knows six architectures and has no residual; on the other six it misses the hidden 2 %."""
    samples = prepare(rows, **fakes.stand_ins).samples
    names = {sample.architecture for sample in samples[:1]}
    for sample in samples:
        if len(names) < 6:
            names.add(sample.architecture)
    known = [sample.row for sample in samples if sample.architecture in names]
    old = fit(known, "H100-80GB", created="", **fakes.stand_ins)
    learned = old.quantities[QUANTITY]
    learned.residual.shrinkage_ = 0.0
    found = compare(new, old, samples).quantities[0]
    assert found.num_architectures == 12
    assert found.old_error == pytest.approx((0.02 * 6 + sum(learned.unseen_errors.values())) / 12, abs=0.001)
    assert found.new_error < found.old_error


def test_a_quantity_that_is_lost_is_no_progress(fakes, rows, new):
    samples = prepare(rows, **fakes.stand_ins).samples
    before = replace(new, quantities={**new.quantities, "peak_device_bytes": new.quantities[QUANTITY]})
    found = compare(new, before, samples)
    assert (found.promoted, found.lost) == (False, ("peak_device_bytes",))
    assert "no device any more" in found.sentence
