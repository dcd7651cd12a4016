from __future__ import annotations

import json
from dataclasses import replace

import pytest

from peakcast.core.errors import CalibrationError
from peakcast.models.calibration.calibration import (
    MAX_FILE_BYTES,
    UNCALIBRATED,
    Calibration,
    calibration_for,
    calibrations,
    load_calibration,
)
from peakcast.models.calibration.fit import fit


@pytest.fixture(scope="module")
def calibration(fakes):
    return fit(fakes.rows(noise=0.01), "H100-80GB", created="2026-11-21", **fakes.stand_ins)


def test_the_same_rows_and_date_give_the_same_bytes(fakes, calibration):
    rows = list(reversed(fakes.rows(noise=0.01)))
    again = fit(rows, "H100-80GB", created="2026-11-21", **fakes.stand_ins)
    assert again.to_bytes() == calibration.to_bytes()


def test_a_calibration_survives_its_file(tmp_path, calibration):
    calibration.save(tmp_path / "H100-80GB.json")
    again = load_calibration(tmp_path / "H100-80GB.json")
    assert again.to_bytes() == calibration.to_bytes()
    assert set(again.quantities) == {"peak_allocated_bytes"}
    assert again.quantities["peak_allocated_bytes"].rows_by_gpu == {"H100-80GB": 48}


def damaged(calibration: Calibration, **changes) -> bytes:
    return json.dumps({**calibration.to_mapping(), **changes}).encode()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda c: c.to_bytes()[:1000], "not valid JSON"),
        (lambda c: b"", "not valid JSON"),
        (lambda c: b"\xff\xfe" + c.to_bytes(), "not valid JSON"),
        (lambda c: b"[" * 200_000, "nested too deeply"),
        (lambda c: damaged(c, schema_version=2), "schema_version=2"),
        (lambda c: damaged(c, schema_version="1"), "schema_version='1'"),
        (lambda c: damaged(c, surprise=1), "unknown \\['surprise'\\]"),
        (lambda c: damaged(c, gpu=7), "gpu=7 must be a text"),
        (lambda c: damaged(c, quantities={"peak": {}}), "quantities must be among"),
        (lambda c: damaged(c, quantities=[1]), "quantities must be among"),
        (lambda c: b"\"__import__('os').system('true')\"", "calibration must be a mapping"),
        (lambda c: c.to_bytes().replace(b'"shrinkage":', b'"shrinkage":NaN,"x":'), "NaN is not a number"),
        (lambda c: c.to_bytes().replace(b'"half_width":', b'"half_width":"wide","x":'), "wrong keys"),
        (lambda c: c.to_bytes().replace(b'"coverage":0.9', b'"coverage":1e999'), "finite number"),
    ],
)
def test_a_damaged_file_is_refused_with_the_way_out(tmp_path, calibration, spoil, said):
    path = tmp_path / "H100-80GB.json"
    path.write_bytes(spoil(calibration))
    with pytest.raises(CalibrationError, match=said) as refusal:
        load_calibration(path)
    assert str(path) in str(refusal.value)
    assert "fit the calibration again" in str(refusal.value)


def test_a_gigantic_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "H100-80GB.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(CalibrationError, match="it is larger than"):
        load_calibration(path)


def test_a_missing_file_names_itself(tmp_path):
    with pytest.raises(CalibrationError, match=r"none\.json cannot be read"):
        load_calibration(tmp_path / "none.json")


def test_the_nearest_relative_stands_in(fakes, calibration):
    others = {"H100-80GB": calibration, "A100-80GB": replace(calibration)}
    assert calibration_for(fakes.devices["H100-80GB"], others) is calibration
    assert calibration_for(fakes.devices["H200"], others) is others["H100-80GB"]
    assert calibration_for(fakes.devices["H200"], {}) is UNCALIBRATED


def test_every_shipped_calibration_loads():
    assert all(calibrations()[gpu].gpu == gpu for gpu in calibrations())
