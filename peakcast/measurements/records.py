"""`Measurement`: one measured (or published, or traced) run of one rank. This is the schema; `peakcast.measurements.store`
has the files.

Schema history: 1 (first).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from peakcast.jobs.spec import TrainingJob, canonical_json

SCHEMA_VERSION = 1

Provenance = Literal["measured", "published", "traced"]
Outcome = Literal["ok", "out_of_memory", "failed"]
Collectives = Literal["nccl", "gloo", "fake", "none"]

DEVICE_MEAN = "device_is_mean"
"""Key of a row's `environment`; true if `peak_device_bytes` is the mean over all GPUs of the run."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row. All byte counts are of one rank over the whole run (first step included) unless the name says otherwise;
    None means that the source does not have the number. Out of memory is a valid outcome: its peaks are lower bounds."""

    job: TrainingJob
    gpu: str
    """Catalog name of the GPU type."""
    provenance: Provenance
    source: str
    """Who measured: a project and file for published rows, "peakcast" for rows of this project."""
    source_version: str = ""
    """Commit of the source for published rows, peakcast's version for its own."""
    case: str = ""
    """The source's own name of the run, which distinguishes repeats and variants of one configuration."""
    rank: int | None = 0
    """The rank of the numbers; None: each is the largest over all ranks."""
    collectives: Collectives = "none"
    outcome: Outcome = "ok"
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    """Host memory of the job: pinned, managed, and pageable beyond what the process had before the job was built."""
    peak_requested_bytes: int | None = None
    peak_active_bytes: int | None = None
    first_step_peak_allocated_bytes: int | None = None
    steady_allocated_bytes: int | None = None
    """Allocated right after a step's end, from step 2 on."""
    context_bytes: int | None = None
    """NVML's used memory after the creation of the context, minus the memory used when idle."""
    num_alloc_retries: int | None = None
    phase_peaks: dict[str, int] = field(default_factory=dict)
    """Allocated peak in bytes by phase name (`forward`, `loss`, `backward`, ...) of the last step."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions, driver, allocator settings, chosen attention backend, optimizer path, platform."""
    assumptions: tuple[str, ...] = ()
    """What was assumed to express the run as a `TrainingJob`."""
    out_of_scope: str = ""
    """Why the ledger does not cover this row ("" if it does). Such rows are kept, but do not count for accuracy."""
    spoiled: tuple[str, ...] = ()
    """Hidden state that may have spoiled the numbers: retries, another process on the GPU, missing optimizer states."""
    observed: str = ""
    """ISO date of the measurement, or of the source's commit where known."""
    schema_version: int = SCHEMA_VERSION

    @property
    def key(self) -> str:
        """16 hex digits that identify this row: the same configuration measured in the same way has the same key.

        `environment["readings"]` (wall time and the like) differs from run to run and is not part of the key.
        """
        identity = [
            self.job.config_hash,
            self.gpu,
            self.provenance,
            self.source,
            self.case,
            self.rank,
            self.collectives,
            {name: value for name, value in self.environment.items() if name != "readings"},
        ]
        return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16]

    @property
    def project(self) -> str:
        """Who measured, without the file. Rows of one project share a machine, versions and mistakes, so they are held out
        together to judge the accuracy on other people's runs."""
        return self.source.split(" ")[0]

    @property
    def counts(self) -> bool:
        """Whether the row may count for accuracy: measured, finished, in scope, not spoiled."""
        return (
            self.provenance in ("measured", "published")
            and self.outcome == "ok"
            and not self.out_of_scope
            and not self.spoiled
        )
