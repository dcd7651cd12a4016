"""`Installation`: what `peakcast doctor` found on this machine. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peakcast.answers.advised import json_values


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledGpu:
    """One GPU of this machine, as NVML reports it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    catalog_name: str | None
    """The GPU type in the catalog; None if the catalog has none with this name."""
    calibration: str | None
    """The GPU type whose calibration is used for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCalibration:
    """A calibration that `predict` can use."""

    gpu: str
    created: str
    rows: Mapping[str, int]
    """Quantity -> number of rows in the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Versions, GPUs and calibrations of this machine, and sentences about what works here."""

    peakcast: str
    python: str
    system: str
    folder: str
    versions: Mapping[str, str | None]
    """Package -> version; None if it is not installed."""
    variables: Mapping[str, str]
    """Environment variables that change what PyTorch allocates."""
    nvml: str
    """The driver's version, or why NVML cannot be read."""
    gpus: tuple[InstalledGpu, ...]
    calibrations: tuple[FoundCalibration, ...]
    calibration_folder: str
    compiled_replay: bool
    """Whether the allocator's replay is the compiled one; the Python one gives the same, more slowly."""
    missing_extras: tuple[str, ...]
    """Extras of peakcast of which a package is not installed."""
    findings: tuple[str, ...] = ()
    """What works here, and how to repair what does not."""

    def to_mapping(self) -> dict[str, Any]:
        """The fields as JSON values."""
        mapping: dict[str, Any] = json_values(self)
        return mapping
