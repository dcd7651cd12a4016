"""Networks recorded with several releases of transformers, for jobs that published rows measured with those releases.

`python -P tests/models/ledger/releases.py RELEASE=PYTHON...` records them with these interpreters (an environment for each
release of transformers and the peft of its time), writes `releases.json` beside this file, and prints the table of
docs/decisions/2026-11-releases-recorded.md. Without an argument it prints the table of the file that is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from peakcast import catalog
from peakcast.collectors.measure.recording import WalkRecorder
from peakcast.core.fields import FrozenMapping
from peakcast.doors.recording import record_recipe
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.records import Measurement
from peakcast.measurements.store import datasets_folder, read_csv
from peakcast.models.baseline.ledger import ledger
from peakcast.models.recipes import shelf
from peakcast.models.recipes.baseline_choice import baseline_from
from peakcast.models.recipes.regime import point_of

FILE = Path(__file__).with_name("releases.json")
TABLES = ("fms_a100.csv", "fms_history.csv")
NETWORKS = ("mistral-7b", "santacoder")
NAMED = ("4.45.2", "4.48.1")
"""Releases of transformers that rows with these networks name."""
LIBRARIES = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class Recorded:
    """What a step of the job of the rows `name` allocates by what was recorded with the releases `versions`: phase ->
    bytes."""

    name: str
    versions: dict[str, str]
    peaks: dict[str, int]

    @property
    def rows(self) -> tuple[Measurement, ...]:
        """Runs of this job; read when a test asks, not while tests are collected."""
        return rows()[self.name]

    @property
    def job(self) -> TrainingJob:
        """The rows' job with these releases."""
        job = self.rows[0].job
        return job.replace(versions=FrozenMapping({**job.versions, **self.versions}))

    @property
    def measured(self) -> tuple[Measurement, ...]:
        """The rows that name this release of transformers."""
        return tuple(row for row in self.rows if row.job.versions["transformers"] == self.versions["transformers"])

    @property
    def peak(self) -> int:
        """The highest of all phases."""
        return max(self.peaks.values())


@cache
def rows() -> dict[str, tuple[Measurement, ...]]:
    """The rows by what they ran, besides releases: one GPU, plain kernels, weights as they are."""
    found: dict[str, list[Measurement]] = {}
    for row in (row for table in TABLES for row in read_csv(datasets_folder() / "published" / table)):
        job = row.job
        plain = not (job.finetuning.quantization or job.framework_options.get("fused_kernels"))
        plain = plain and job.parallelism.world_size == 1 and job.architecture.name in NETWORKS
        if plain and job.versions.get("transformers") in NAMED and row.counts and row.peak_allocated_bytes:
            found.setdefault(f"{job.architecture.name} {job.finetuning.method} {job.micro_batch_size}", []).append(row)
    return {name: tuple(found[name]) for name in sorted(found)}


def peaks(job: TrainingJob) -> dict[str, int]:
    """Each phase's peak of a later step, and the first step's, on the GPU of the rows. Forward and loss are one: a network
    that makes its own loss (before transformers 4.46) has no border between them."""
    first, steady = (ledger(job, device=catalog.gpu("A100-80GB"), step=step) for step in ("first", "steady"))
    by_phase = {phase.name.lower(): size for phase, size in steady.phase_peaks().items()}
    by_phase["loss"] = max(by_phase.pop("forward"), by_phase["loss"])
    return {**by_phase, "first_step": first.peak().num_bytes}


def recorded() -> Iterator[tuple[str, Recorded]]:
    """What `FILE` has, with the name of the job."""
    for name, releases in json.loads(FILE.read_text(encoding="utf-8")).items():
        for one in releases:
            yield name, Recorded(name, one["versions"], one["peaks"])


def record(interpreters: dict[str, str]) -> None:
    """Write `FILE` again with what these interpreters' libraries allocate. Recipes that are on the shelf are used again."""
    found: dict[str, list[dict[str, Any]]] = {}
    for release, python in interpreters.items():
        with WalkRecorder(python) as recorder:
            installed = recorder.versions()
        versions = {name: shelf.public(installed[name]) for name in LIBRARIES}
        assert versions["transformers"] == release
        for name, (measured, *_) in rows().items():
            job = measured.job.replace(versions=FrozenMapping({**measured.job.versions, **versions}))
            if not any(recipe.covers(*point_of(job)) for recipe in shelf.recipes_of(job)):
                record_recipe(job, python)
            with baseline_from("recipe"):
                found.setdefault(name, []).append({"versions": versions, "peaks": peaks(job)})
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


COLUMNS = ("job", "transformers", "recorded, MiB", "ledger", "runs", "ledger with their torch")


def table() -> list[str]:
    """The lines of the page's table: how far the ledger is from what was recorded, and both from what was measured."""
    lines = [COLUMNS, ("---", "---", *["--:"] * 4)]
    for name, one in recorded():
        by_ledger = max(peaks(one.job).values()) / one.peak - 1
        runs = {_off(one.peak, row) for row in one.measured}
        own = {_off(max(peaks(row.job).values()), row) for row in one.measured}
        sizes = (f"{one.peak / 2**20:,.0f}", f"{by_ledger:+.3%}", ", ".join(sorted(runs)), ", ".join(sorted(own)))
        lines.append((name, one.versions["transformers"], *sizes))
    return [f"| {' | '.join(line)} |".replace("%", " %") for line in lines]


def _off(peak: int, row: Measurement) -> str:
    return f"{peak / (row.peak_allocated_bytes or 1) - 1:+.3%}"


if __name__ == "__main__":
    if asked := dict(word.split("=", 1) for word in sys.argv[1:]):
        record(asked)
    print("\n".join(table()))
