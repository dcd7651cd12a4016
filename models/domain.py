"""The calibrated domain: what the rows of a calibration have in common with a job, and how much bars widen outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peakcast.conventions import unmodelled_versions
from peakcast.errors import CalibrationError
from peakcast.lengths import lengths_change
from peakcast.models.grouping import feed_forward_of, layout_of
from peakcast.models.strict import number, read, texts
from peakcast.spec import TrainingJob
from peakcast.versions import release, resolved

if TYPE_CHECKING:
    from peakcast.models.samples import Sample

RANGED = (
    "log2_allocated",
    "log2_tokens",
    "log2_sequence_length",
    "log2_hidden_size",
    "log2_num_hidden_layers",
    "log2_vocab_size",
    "log2_head_dim",
    "log2_data_parallel",
    "log2_tensor_parallel",
    "log2_pipeline_parallel",
    "log2_context_parallel",
    "log2_expert_parallel",
)
"""Features with a calibrated range, all in powers of two."""
MARGIN = 1.0
"""A job may lie this far outside a range, in powers of two, before it counts as outside."""
_WEIGHTY = {"framework": 2, "layout": 2, "task": 2, "feed_forward": 2, "finetuning": 2}
"""Severity of a trait that no row has; the others have 1."""
OUT_OF_SCOPE_SEVERITY = 6
MOST_SEVERE = 8
"""Severities add up to at most this."""


@dataclass(frozen=True, slots=True)
class Outside:
    """One reason why a job lies outside, and how severe it is (1 mild, 2 another kind of job, 6 not modelled at all)."""

    sentence: str
    severity: int


@dataclass(frozen=True, kw_only=True)
class Domain:
    """What a calibration has seen."""

    architectures: tuple[str, ...] = ()
    traits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Trait (`framework`, `layout`, `attention`, ...) → values seen."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Feature → smallest and largest value seen."""
    versions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Package → major.minor releases seen."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Domain:
        """The domain that `samples` span."""
        seen: dict[str, set[str]] = {}
        versions: dict[str, set[str]] = {}
        for sample in samples:
            for name, value in traits(sample.row.job).items():
                seen.setdefault(name, set()).add(value)
            for package, version in resolved(sample.row.job.versions).items():
                versions.setdefault(package, set()).add(_minor(str(version)))
        spans = {name: [sample.features[name] for sample in samples] for name in RANGED if samples}
        return cls(
            architectures=tuple(sorted({sample.architecture for sample in samples})),
            traits={name: tuple(sorted(values)) for name, values in sorted(seen.items())},
            ranges={name: (min(values), max(values)) for name, values in spans.items()},
            versions={package: tuple(sorted(values)) for package, values in sorted(versions.items())},
        )

    def outside(self, job: TrainingJob, row: Mapping[str, float]) -> list[Outside]:
        """Every reason why `job` with the features `row` lies outside, none when it lies inside. An architecture that was
        never measured is no reason: the bars are made of such."""
        if not self.traits:
            return []
        reasons = [
            Outside(f"no measured run has {name}={value}; the bars are widened.", _WEIGHTY.get(name, 1))
            for name, value in traits(job).items()
            if value not in self.traits.get(name, ())
        ]
        for name, (low, high) in self.ranges.items():
            if not low - MARGIN <= row[name] <= high + MARGIN:
                label = name.removeprefix("log2_") + (" in GiB" if name == "log2_allocated" else "")
                reasons.append(
                    Outside(
                        f"{label} {_plain(2 ** row[name])} is far outside the measured {_plain(2**low)} to "
                        f"{_plain(2**high)}; the bars are widened.",
                        1,
                    )
                )
        for package, version in resolved(job.versions).items():
            seen = self.versions.get(package)
            if seen and _minor(str(version)) not in seen:
                reasons.append(
                    Outside(f"{package} {version} was not measured (seen: {', '.join(seen)}); the bars are widened.", 1)
                )
        reasons += [Outside(sentence, 1) for sentence in unmodelled_versions(job)]
        return reasons

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "architectures": list(self.architectures),
            "traits": {name: list(values) for name, values in self.traits.items()},
            "ranges": {name: list(span) for name, span in self.ranges.items()},
            "versions": {package: list(values) for package, values in self.versions.items()},
        }

    @classmethod
    def from_mapping(cls, mapping: object) -> Domain:
        """The domain of `to_mapping`. Raises: CalibrationError."""
        top = read(mapping, {"architectures", "traits", "ranges", "versions"}, "domain")
        for key in ("traits", "ranges", "versions"):
            if not isinstance(top[key], Mapping):
                raise CalibrationError(f"domain.{key} must be a mapping; fit the calibration again.", parameter=key)
        ranges = {}
        for name, span in top["ranges"].items():
            if name not in RANGED or not isinstance(span, list) or len(span) != 2:
                raise CalibrationError(f"domain.ranges[{name!r}] is not a known pair; fit the calibration again.")
            ranges[name] = (number(span[0], name), number(span[1], name))
        return cls(
            architectures=tuple(texts(top["architectures"], "architectures")),
            traits={name: tuple(texts(values, name)) for name, values in top["traits"].items()},
            ranges=ranges,
            versions={package: tuple(texts(values, package)) for package, values in top["versions"].items()},
        )


def severity(reasons: Iterable[Outside]) -> int:
    """How far outside a job lies, all reasons together: 0 to MOST_SEVERE."""
    return min(sum(reason.severity for reason in reasons), MOST_SEVERE)


def difficulty(severity: float) -> float:
    """How many times wider the bar of a job of this severity is than that of one inside. A judgement."""
    return 1 + severity / 2


def traits(job: TrainingJob) -> dict[str, str]:
    """The kinds of thing a job is, each of which a calibration has or has not seen."""
    offloads = [name for name in ("parameters", "optimizer", "activations") if getattr(job.offload, name)]
    return {
        "framework": job.framework,
        "layout": layout_of(job.parallelism),
        "task": job.task,
        "feed_forward": feed_forward_of(job),
        "attention_structure": "latent" if job.architecture.mla else "heads",
        "attention": job.attention,
        "finetuning": job.finetuning.quantization or job.finetuning.method,
        "optimizer": f"{job.optimizer.name}/{job.optimizer.implementation}",
        "parameters": job.precision.parameters,
        "compute": job.precision.compute,
        "activation_checkpointing": job.activation_checkpointing.mode,
        "fused_linear_cross_entropy": str(job.loss.fused_linear_cross_entropy).lower(),
        "compile": str(job.compile).lower(),
        "offload": "+".join(offloads) or "none",
        "expandable_segments": str(job.allocator.expandable_segments).lower(),
        # only where they differ: calibrations made before jobs could say so have seen no others
        **({"lengths": "changing"} if lengths_change(job) else {}),
        **({"loss": job.loss.kind} if job.loss.kind != "cross_entropy" else {}),
    }


def _minor(version: str) -> str:
    numbers = release(version)[:2]
    return ".".join(map(str, numbers)) if numbers else version


def _plain(value: float) -> str:
    """A size as a person writes it: whole from 100 on, else three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
