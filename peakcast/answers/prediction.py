"""`Prediction`: the answer to "how much memory", each quantity with its error bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from peakcast.answers.advised import Advice, json_values
from peakcast.core.findings import Finding, sentences

if TYPE_CHECKING:
    from peakcast.jobs.spec import TrainingJob

SEEN_BY = {
    "peak_allocated_bytes": "torch.cuda.max_memory_allocated",
    "peak_reserved_bytes": "torch.cuda.max_memory_reserved",
    "peak_device_bytes": "nvidia-smi",
    "peak_host_bytes": "CPU memory of the rank",
}
"""Quantity -> the reading that shows its value on a running job."""
QUANTITIES = tuple(SEEN_BY)
"""The four quantities of every answer, and of every measurement that has them."""

Fits = Literal["yes", "no", "uncertain"]
RestsOn = Literal["measurements", "relatives", "judgement"]
"""Source of a bar: errors on rows like the job; on rows of another GPU type or of similar kinds of jobs; or a judgement,
because no row is like the job (`models.calibration.spread.PRIORS`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One quantity in bytes: `baseline` (analytical), `point` (baseline + residual), a two-sided 90 % interval
    `lower`..`upper`, and `upper_95`, the one-sided 95 % bound that decides whether a job fits."""

    baseline: int
    point: int
    lower: int
    upper: int
    upper_95: int
    rests_on: RestsOn = "judgement"

    def to_mapping(self) -> dict[str, Any]:
        """The five numbers and their source, by name."""
        return {name: getattr(self, name) for name in ("baseline", "point", "lower", "upper", "upper_95", "rests_on")}


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of one quantity is available to a rank, in bytes."""

    quantity: str
    num_bytes: int
    known: bool = True
    """False if a usual value was assumed."""

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name."""
        return {"quantity": self.quantity, "bytes": self.num_bytes, "known": self.known}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuVerdict:
    """Whether the same rank would fit on a GPU type, by that type's own calibration."""

    gpu: str
    capacity_bytes: int
    fits: Fits


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """Peaks of the ranks of one pipeline stage, which hold the same shapes."""

    rank: int
    """The first of these ranks, whose peaks these are."""
    num_ranks: int
    stage: int
    layers: tuple[int, ...]
    peak_allocated_bytes: Interval
    peak_device_bytes: Interval
    fits: Fits
    peak_phase: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one rank of a job needs on a GPU type. Bytes are ints."""

    gpu: str
    rank: int
    """The rank of the numbers: the one that was asked for, or the worst."""
    peak_allocated_bytes: Interval
    peak_reserved_bytes: Interval
    peak_device_bytes: Interval
    peak_host_bytes: Interval
    capacity_bytes: int
    """Memory that CUDA can use on this GPU."""
    fits: Fits
    limit: Limit
    """The limit that decides the verdict: of the GPU, of what the allocator may reserve, or of the host."""
    peak_phase: str
    phase_peaks_bytes: dict[str, int] = field(default_factory=dict)
    """Allocated peak of each phase of a steady step."""
    steady_state_bytes: int = 0
    """Allocated between steps, after the first or a later step."""
    first_step_peak_bytes: int = 0
    """Allocated peak of the first step."""
    largest: tuple[tuple[str, str, int, int], ...] = ()
    """(name, category, bytes, number of tensors) of the biggest groups alive at the peak."""
    composition: dict[str, int] = field(default_factory=dict)
    inside_calibrated_domain: bool = False
    """Whether the job is like rows of allocated memory, and rows of any quantity have its releases and its GPU type. Each
    interval's `rests_on` says the same of its own quantity."""
    calibration: str = "none"
    assumptions: tuple[str, ...] = ()
    found: tuple[Finding, ...] = ()
    """The findings but for the one that other releases need another amount."""
    compare_releases: Callable[[], tuple[Finding, ...]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Why the real peak may differ from the answer; findings that may change it most come first. Whether other releases
        need another amount takes as long as the prediction itself, so it is computed when findings are first read."""
        return (*self.found, *self.compare_releases())

    @property
    def warnings(self) -> tuple[str, ...]:
        """The sentences of the findings."""
        return sentences(self.findings)

    @property
    def is_covered(self) -> bool:
        """Whether the ledger counts everything in the job."""
        return all(finding.code not in ("not_modelled", "network_guessed") for finding in self.found)

    def to_mapping(self) -> dict[str, Any]:
        """The answer as a JSON-able mapping."""
        return {
            "gpu": self.gpu,
            "rank": self.rank,
            **{name: getattr(self, name).to_mapping() for name in QUANTITIES},
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "limit": self.limit.to_mapping(),
            "peak_phase": self.peak_phase,
            "phase_peaks_bytes": dict(self.phase_peaks_bytes),
            "steady_state_bytes": self.steady_state_bytes,
            "first_step_peak_bytes": self.first_step_peak_bytes,
            "largest": [
                {"name": name, "category": category, "bytes": size, "tensors": number}
                for name, category, size, number in self.largest
            ],
            "composition_bytes": dict(self.composition),
            "inside_calibrated_domain": self.inside_calibrated_domain,
            "calibration": self.calibration,
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
            "findings": [finding.to_mapping() for finding in self.findings],
        }


@dataclass(frozen=True, kw_only=True)
class Answer(Prediction):
    """A prediction with further answers. The other GPU types and the advice take ten times as long as the prediction
    itself, so they are computed when they are first read."""

    job: TrainingJob
    """The job that the question describes."""
    compare_gpus: Callable[[], tuple[GpuVerdict, ...]] = field(repr=False, compare=False)
    advise: Callable[[], tuple[Advice, ...]] = field(repr=False, compare=False)
    not_modelled: tuple[str, ...]
    """What a run may allocate that none of the numbers includes."""
    ranks: tuple[RankPeak, ...] = ()
    """One per group of ranks with equal shapes, if the question asked for them."""
    remarks: tuple[str, ...] = ()
    """What is worth knowing in addition to the numbers, such as the size of the cache of a generation."""

    @cached_property
    def gpus(self) -> tuple[GpuVerdict, ...]:
        """Every GPU type of the catalog, the smallest first."""
        return self.compare_gpus()

    @cached_property
    def first_to_try(self) -> tuple[Advice, ...]:
        """Changes that lower the peak, each on top of those before it."""
        return self.advise()

    def to_mapping(self) -> dict[str, Any]:
        """The prediction's mapping and the lists above."""
        further = {name: json_values(getattr(self, name)) for name in ("gpus", "first_to_try", "not_modelled", "ranks")}
        return {**Prediction.to_mapping(self), **further}
