"""`peakcast doctor`: what is found with and without GPUs; NVML's answers are replaced by recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from peakcast import api
from peakcast.catalog.constants import Constants, save_constants
from peakcast.collectors.machine import installed
from peakcast.doors.destinations import calibration_folder
from peakcast.printing.answers import installation_text

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984, "used_bytes": 3 * 2**20}
A10 = {"name": "NVIDIA A10", "memory_bytes": 24_146_608_128, "used_bytes": 0}
UNKNOWN = {"name": "NVIDIA Quantum 9000", "memory_bytes": 2**40, "used_bytes": 0}


def with_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, object]) -> None:
    monkeypatch.setattr(installed, "nvml_gpus", lambda: ("580.65.06", list(gpus)))


def test_without_a_gpu_it_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "nvml_gpus", lambda: ("NVML cannot be read: NVML Shared Library Not Found", []))
    found = api.doctor()
    assert found.gpus == ()
    assert any("No NVIDIA GPU is seen" in sentence for sentence in found.findings)
    assert "Shared Library" in installation_text(found)


def test_a_measured_gpu_has_its_own_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, H100)
    (gpu,) = api.doctor().gpus
    assert (gpu.catalog_name, gpu.calibration) == ("H100-80GB", "H100-80GB")


def test_another_gpu_is_told_whose_calibration_answers_and_an_unknown_one_how_to_add_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, A10, UNKNOWN)
    found = api.doctor()
    assert [gpu.catalog_name for gpu in found.gpus] == ["A10", None]
    assert any("A10 has no calibration of its own" in sentence for sentence in found.findings)
    assert any("Quantum 9000 is not in the catalog" in sentence for sentence in found.findings)


def test_every_shipped_calibration_is_found() -> None:
    files = {path.stem for path in Path(calibration_folder()).glob("*.json")}
    found = api.doctor().calibrations
    assert {item.gpu for item in found} == files
    assert all(sum(item.rows.values()) > 0 for item in found)


def test_versions_come_from_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    found = api.doctor()
    assert found.versions["numpy"] == numpy.__version__
    monkeypatch.setitem(found.versions, "torch", None)  # type: ignore[arg-type]
    assert "not installed: " in installation_text(found)


def test_what_device_memory_rests_on_is_said_even_where_the_file_is_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PEAKCAST_CONSTANTS", str(tmp_path))
    with_gpus(monkeypatch, H100, H100)
    (estimated,) = [said for said in api.doctor().findings if "constants" in said]
    assert estimated.startswith("device memory on H100-80GB is estimated; `peakcast collect constants`")
    save_constants(Constants(gpu="H100-80GB", context_bytes=5, observed="2026-01-31"))
    (read,) = [said for said in api.doctor().findings if "constants" in said]
    assert f"read (2026-01-31, {tmp_path / 'H100-80GB.json'})" in read
    (tmp_path / "H100-80GB.json").write_text("{")
    (damaged,) = [said for said in api.doctor().findings if "constants" in said]
    assert "is not what `peakcast collect constants` writes" in damaged
