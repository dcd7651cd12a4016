"""Examines this machine: what is installed, which GPUs and calibrations there are, and which parts of peakcast work."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peakcast import __version__, catalog
from peakcast.answers.installation import FoundCalibration, Installation, InstalledGpu
from peakcast.catalog.constants import own_constants
from peakcast.collectors.machine import installed
from peakcast.core.errors import CatalogError, RecordError
from peakcast.core.extras import USES, command, missing_extras
from peakcast.core.units import GIB
from peakcast.doors.destinations import calibration_folder
from peakcast.models.allocator import events as allocator_events
from peakcast.models.allocator import replay as allocator
from peakcast.models.calibration.calibration import calibration_for, calibrations

COMPILED = {
    True: "The simulated allocator runs as compiled code.",
    False: "The simulated allocator runs in Python, with the same result but some twenty-five times slower; install "
    "peakcast from a wheel of this system, or where there is a C compiler.",
}
"""By whether the compiled replay is in use. How much slower the other is: models/allocator/_pool_replay.c."""


def doctor() -> Installation:
    """What was found. It raises no error for what is missing, but reports it as a finding."""
    versions = installed.package_versions()
    nvml, readings = installed.nvml_gpus()
    gpus = tuple(_gpu(index, reading) for index, reading in enumerate(readings))
    found = tuple(_calibration(name) for name in sorted(calibrations()))
    installation = Installation(
        peakcast=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        folder=str(Path(__file__).resolve().parents[1]),
        versions=versions,
        variables=installed.allocator_variables(),
        nvml=nvml,
        gpus=gpus,
        calibrations=found,
        calibration_folder=str(calibration_folder()),
        compiled_replay=allocator.compiled is not None and allocator_events.compiled is not None,
        missing_extras=tuple(missing_extras()),
    )
    return replace(installation, findings=tuple(_findings(installation)))


def _gpu(index: int, reading: Mapping[str, Any]) -> InstalledGpu:
    device = known_gpu(reading["name"], reading["memory_bytes"])
    calibration = calibration_for(device).gpu if device is not None else None
    return InstalledGpu(
        index=index, catalog_name=device.name if device is not None else None, calibration=calibration, **reading
    )


def known_gpu(name: str, memory_bytes: int) -> catalog.Device | None:
    """The GPU type with that name; if several types share the name, the one whose memory fits."""
    for candidate in (name, f"{name}-{round(memory_bytes / GIB / 8) * 8}GB"):
        try:
            return catalog.gpu(candidate)
        except CatalogError:
            continue
    return None


def _calibration(name: str) -> FoundCalibration:
    calibration = calibrations()[name]
    rows = {quantity: sum(learned.rows_by_gpu.values()) for quantity, learned in calibration.quantities.items()}
    return FoundCalibration(gpu=name, created=calibration.created, rows=rows)


def _findings(found: Installation) -> list[str]:
    gpus, torch = found.gpus, found.versions["torch"]
    sentences = ["predict, explain, search, replay and batches work here.", COMPILED[found.compiled_replay]]
    if found.missing_extras:
        uses = ", ".join(f"{USES[extra]} ({extra})" for extra in found.missing_extras)
        sentences.append(
            f"Packages are missing for {uses}: add one with {command(found.missing_extras[0])}, all with {command('all')}."
        )
    if not gpus:
        sentences.append("No NVIDIA GPU is seen, so nothing can be measured here; `peakcast collect --trace` needs none.")
    if gpus and torch is not None and torch.endswith("+cpu"):
        sentences.append("torch is built for the CPU only: install the CUDA build to measure on this GPU.")
    sentences += [
        f"{gpu.name} is not in the catalog: add a stanza to peakcast/catalog/gpus.toml."
        for gpu in gpus
        if gpu.catalog_name is None
    ]
    sentences += [
        f"{gpu.catalog_name} has no calibration of its own; that of {gpu.calibration} answers, with wider bars: "
        f"`peakcast collect standard`, then `peakcast fit --gpu {gpu.catalog_name}`."
        for gpu in {gpu.catalog_name: gpu for gpu in gpus if gpu.catalog_name}.values()
        if gpu.calibration != gpu.catalog_name
    ]
    sentences += map(_constants, sorted({gpu.catalog_name for gpu in gpus if gpu.catalog_name}))
    if installed.has_shim():
        sentences.append("the package pynvml is a deprecated shim: pip uninstall pynvml; nvidia-ml-py has the module.")
    if not found.calibrations:
        sentences.append("no calibration is found: bars are default ones until `peakcast reproduce` has run in a checkout.")
    return sentences


def _constants(gpu: str) -> str:
    """A sentence on where the device memory of predictions for this machine's GPU type comes from."""
    try:
        own = own_constants(gpu)
    except RecordError as error:
        return error.message
    if own is None:
        return f"device memory on {gpu} is estimated; `peakcast collect constants` reads what it is on this machine."
    return f"device memory on {gpu} rests on what `peakcast collect constants` read ({own.observed}, {own.path})."
