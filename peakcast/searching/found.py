"""The answers of a search as plain values; bytes are those of the rank that needs most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peakcast.answers.advised import json_values
from peakcast.answers.prediction import Fits, Interval, Limit
from peakcast.catalog.speeds import has_data_sheet
from peakcast.core.findings import Finding, sentences
from peakcast.jobs.spec import TrainingJob
from peakcast.searching.costs import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to run the job, with its prediction."""

    job: TrainingJob
    fits: Fits
    peak_device_bytes: Interval
    peak_host_bytes: Interval
    node_host_bytes: int
    """Host memory to expect of all ranks on a node together."""
    beyond_host: bool
    """Whether that is more than the node has, if that was given."""
    limit: Limit
    """What decides whether it fits: memory of the GPU, or of the host."""
    headroom_bytes: int
    """Capacity minus the 95 % bound; negative if the bound exceeds the capacity."""
    cost: Cost
    """Extra time beyond the step's own operations."""

    def to_mapping(self) -> dict[str, Any]:
        """The plan as JSON values: what the search changed in the job, and the numbers."""
        return {
            "job": changes_of(self.job),
            "fits": self.fits,
            "peak_device_bytes": self.peak_device_bytes.to_mapping(),
            "peak_host_bytes": self.peak_host_bytes.to_mapping(),
            "node_host_bytes": self.node_host_bytes,
            "limit": self.limit.to_mapping(),
            "headroom_bytes": self.headroom_bytes,
            "recompute": self.cost.recompute,
            "bubble": self.cost.bubble,
            "sending": self.cost.sending,
            "offloading": self.cost.offloading,
            "extra_time": self.cost.total,
            "sent_bytes": self.cost.sent_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer of a search, the best plans first."""

    gpu: str
    num_gpus: int
    global_batch_size: int
    num_candidates: int
    num_ruled_out: int
    """Number of candidates whose weights, gradients and optimizer states alone are more than the GPU has."""
    left_out: Mapping[str, int]
    """Reason why some layouts are not candidates -> how many: the network's recipes do not cover them; or, where nothing
    fits, the ledger does not."""
    plans: tuple[Plan, ...]
    num_beyond_host: int = 0
    """Number of candidates that were left out because they need more host memory than the node has; 0 if enough others
    surely fit."""
    findings: tuple[Finding, ...] = ()
    """What was left out when the configuration was read; every error bar is widened for it."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The sentences of the findings."""
        return sentences(self.findings)

    @property
    def recommended(self) -> Plan | None:
        """Of the plans that surely fit, the one whose step takes least time; None if none surely fits."""
        return self.plans[0] if self.fits == "yes" else None

    @property
    def estimates_time(self) -> bool:
        """Whether the speed of the GPU type is known, so that the order of plans is that of their times."""
        return has_data_sheet(self.gpu)

    @property
    def fits(self) -> Fits:
        """Whether any plan fits."""
        return self.plans[0].fits if self.plans else "no"

    def to_mapping(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            **{name: getattr(self, name) for name in ("gpu", "num_gpus", "global_batch_size")},
            **{name: getattr(self, name) for name in ("num_candidates", "num_ruled_out", "num_beyond_host")},
            "estimates_time": self.estimates_time,
            "left_out": dict(self.left_out),
            "recommended": self.recommended.to_mapping() if self.recommended is not None else None,
            "plans": [plan.to_mapping() for plan in self.plans],
            "warnings": list(self.warnings),
            "findings": [f.to_mapping() for f in self.findings],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The answer to an inverse question: the largest value (for GPUs, the smallest number) that surely fits, and the next
    value, which does not. `value` is None if not even the smallest value fits."""

    asked: str
    value: int | str | None
    plan: Plan | None
    beyond: int | str | None
    beyond_fits: Fits | None
    limit: int | None = None
    """The largest value that the recipe covers, if the search ended there."""
    findings: tuple[Finding, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """The sentences of the findings."""
        return sentences(self.findings)

    @property
    def fits(self) -> Fits:
        """Whether there is an answer."""
        return "yes" if self.plan is not None else self.beyond_fits or "no"

    def to_mapping(self) -> dict[str, Any]:
        """As JSON has it."""
        plan = self.plan.to_mapping() if self.plan is not None else None
        asked = {n: getattr(self, n) for n in ("asked", "value", "beyond", "beyond_fits", "limit")}
        return {
            **asked,
            "plan": plan,
            "warnings": list(self.warnings),
            "findings": [f.to_mapping() for f in self.findings],
        }


def changes_of(job: TrainingJob) -> Mapping[str, Any]:
    """The fields of a job that a search varies, with their values."""
    return {
        "micro_batch_size": job.micro_batch_size,
        "sequence_length": job.sequence_length,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "activation_checkpointing": {"mode": job.activation_checkpointing.mode},
        "parallelism": _fields(job.parallelism),
        "offload": _fields(job.offload),
    }


def _fields(value: Any) -> dict[str, Any]:
    return {name: json_values(getattr(value, name)) for name in value.__dataclass_fields__}
