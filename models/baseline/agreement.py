"""How the ledger agrees with the trace of the real step, cell by cell and phase by phase.

Both contain what the framework allocates and leave out what kernels allocate, so a difference is a tensor that the ledger
lacks or has too many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from peakcast.core.findings import sentences
from peakcast.jobs.spec import TrainingJob, job_to_mapping
from peakcast.measurements.records import Measurement
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.recorded.covering import lacked_kernels
from peakcast.models.ledger.scope.scope import scope_findings

ONE_GPU_TOLERANCE = 0.001
PARALLEL_TOLERANCE = 0.005
"""The largest |ledger / trace - 1| in any phase that counts as agreement."""
FIRST_STEP, BETWEEN_STEPS = "first step", "between steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One cell: by phase, the ledger's bytes over the trace's, minus one; `reason`: why the two cannot be compared."""

    job: TrainingJob
    rank: int | None
    errors: dict[str, float]
    reason: str = ""

    @property
    def worst(self) -> float:
        """The error of the phase that is furthest off."""
        return max(self.errors.values(), key=abs, default=0.0)

    @property
    def tolerance(self) -> float:
        """The error up to which this layout counts as agreeing."""
        return ONE_GPU_TOLERANCE if self.job.parallelism.world_size == 1 else PARALLEL_TOLERANCE

    @property
    def holds(self) -> bool:
        """Whether every phase is within the tolerance."""
        return not self.reason and abs(self.worst) <= self.tolerance

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form."""
        job = job_to_mapping(self.job)
        return {"job": job, "rank": self.rank, "errors": self.errors, "holds": self.holds, "reason": self.reason}


def agreements(rows: Iterable[Measurement]) -> list[Agreement]:
    """Each traced row compared with the ledger of its job. Rows of a failed trace have a reason and no errors."""
    return [_agreement(row) for row in rows if row.provenance == "traced"]


def _agreement(row: Measurement) -> Agreement:
    """A traced row compared with the ledger, or the reason why there is nothing to compare."""
    if row.outcome != "ok":
        reason = f"no trace: {row.environment.get('reason', row.outcome)}"
        return Agreement(job=row.job, rank=row.rank, errors={}, reason=reason)
    if reason := _not_comparable(row.job):
        return Agreement(job=row.job, rank=row.rank, errors={}, reason=reason)
    first, steady = (ledger(row.job, rank=row.rank, step=step) for step in ("first", "steady"))
    found = {phase.name.lower(): size for phase, size in steady.phase_peaks().items()}
    traced: dict[str, int | None] = dict(row.phase_peaks)
    if not traced.get("gradient_clipping"):  # DeepSpeed's engine clips in its step
        found["optimizer_step"] = max(found.get("optimizer_step", 0), found.get("gradient_clipping", 0))
    if row.job.task == "train":  # a generation has no next step
        found |= {FIRST_STEP: first.peak().num_bytes, BETWEEN_STEPS: int(steady.totals[-1])}
        traced |= {FIRST_STEP: row.first_step_peak_allocated_bytes, BETWEEN_STEPS: row.steady_allocated_bytes}
    if not traced.get("gradient_clipping") and "gradient_clipping" in found:  # DeepSpeed's engine clips within its step
        found["optimizer_step"] = max(found["optimizer_step"], found.pop("gradient_clipping"))
    errors = {phase: found[phase] / size - 1 for phase, size in traced.items() if size and phase in found}
    return Agreement(job=row.job, rank=row.rank, errors=errors)


def _not_comparable(job: TrainingJob) -> str:
    """What the ledger does not cover of `job`; kernels that a recipe was recorded without are lacked by the trace too."""
    lacked = lacked_kernels(job)
    return " ".join(sentences(finding for finding in scope_findings(job) if finding not in lacked))
