"""The calibrated domain: what the rows of a calibration have in common with a job, and how far outside a job is.

The *kind* of a job is its framework, its task, its kind of feed-forward layers and which weights train. It counts as
measured only if one row has all of these: rows with adapters under one framework say nothing of adapters under another. Any
other trait counts as measured if any row has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from peakcast.core.errors import CalibrationError
from peakcast.core.findings import OUT_OF_SCOPE, Finding
from peakcast.core.versions import release, resolved
from peakcast.jobs.conventions import unmodelled_versions
from peakcast.jobs.lengths import lengths_change
from peakcast.jobs.spec import TrainingJob
from peakcast.models.calibration.grouping import feed_forward_of, layout_name
from peakcast.models.calibration.strict import number, read, texts

if TYPE_CHECKING:
    from peakcast.models.calibration.samples import Sample

RANGED = (
    "log2_allocated",
    "log2_tokens",
    "log2_sequence_length",
    "log2_hidden_size",
    "log2_num_hidden_layers",
    "log2_head_dim",
    "log2_data_parallel",
    "log2_tensor_parallel",
    "log2_pipeline_parallel",
    "log2_context_parallel",
    "log2_expert_parallel",
)
"""Features with a calibrated range, all in powers of two. The vocabulary has none: tables and logits are counted exactly,
and rows with 100,000 words and more are predicted no worse than others."""
MARGIN = 1.0
"""How far a job may be outside a range, in powers of two, before it counts as outside."""
_KINDS = frozenset(("framework", "layout", "task", "feed_forward", "finetuning"))
"""Traits that make a job a different kind of job; the others are settings."""
_PARAMETERS = {
    "layout": "parallelism",
    "feed_forward": "architecture",
    "attention_structure": "architecture",
    "optimizer": "optimizer",
    "parameters": "precision.parameters",
    "compute": "precision.compute",
    "fused_linear_cross_entropy": "loss.fused_linear_cross_entropy",
    "expandable_segments": "allocator.expandable_segments",
    "lengths": "batch.shortest_sequence",
    "inputs": "images",
    "loss": "loss.kind",
}
"""Trait → the job's parameter that decides it, if its name is different."""
_OF_TRAINING = frozenset(("optimizer", "activation_checkpointing", "fused_linear_cross_entropy", "loss"))
"""Traits that only training has."""
MOST_SEVERE = 8
"""The sum of severities counts as at most this."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """What the rows of a calibrated quantity have in common."""

    architectures: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    """GPU types that ran them."""
    kinds: tuple[tuple[str, ...], ...] = ()
    """Kinds of jobs seen (`_kind`)."""
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
            gpus=tuple(sorted({sample.row.gpu for sample in samples})),
            kinds=tuple(sorted({_kind(sample.row.job) for sample in samples})),
            traits={name: tuple(sorted(values)) for name, values in sorted(seen.items())},
            ranges={name: (min(values), max(values)) for name, values in spans.items()},
            versions={package: tuple(sorted(values)) for package, values in sorted(versions.items())},
        )

    def outside(self, job: TrainingJob, row: Mapping[str, float]) -> list[Finding]:
        """Every reason why `job` with the features `row` is outside; empty if it is inside. An architecture that was never
        measured is not a reason, because the bars come from predictions of unseen architectures."""
        if not self.kinds:
            return []
        unseen = list(self._traits_outside(job))
        if not self.has_kind(job) and all(finding.code != "kind_not_measured" for finding in unseen):
            unseen.append(self._kind_outside(job))
        return [*unseen, *self._sizes_outside(row), *self._versions_outside(job), *unmodelled_versions(job)]

    def with_kinds_of(self, samples: Iterable[Sample]) -> Domain:
        """The domain, with the kinds of jobs of `samples`: which weights a framework trains is a matter neither of the GPU
        nor of which peak was read."""
        return replace(self, kinds=tuple(sorted({_kind(sample.row.job) for sample in samples})))

    def has_kind(self, job: TrainingJob) -> bool:
        """Whether a row has the job's framework, task, kind of layers and trained weights at once."""
        return _kind(job) in self.kinds

    def _kind_outside(self, job: TrainingJob) -> Finding:
        """A kind of job whose parts were measured, though no row has all of them."""
        together = ", ".join(_kind(job))
        sentence = f"measured runs have each of these, but none has all: {together}; the bars are widened."
        return Finding("kind_not_measured", "finetuning", "either", sentence)

    def _traits_outside(self, job: TrainingJob) -> Iterator[Finding]:
        """Traits of the job that no row has."""
        for name, value in traits(job).items():
            if value not in self.traits.get(name, ()) and (job.task == "train" or name not in _OF_TRAINING):
                code = "kind_not_measured" if name in _KINDS else "setting_not_measured"
                sentence = f"{self._no_run} has {name}={value}; the bars are widened."
                yield Finding(code, _PARAMETERS.get(name, name), "either", sentence)

    @property
    def _no_run(self) -> str:
        """The subject of a sentence about what no row has: if the rows are of one GPU type, others may have it."""
        return f"no run measured on {self.gpus[0]}" if len(self.gpus) == 1 else "no measured run"

    def _sizes_outside(self, row: Mapping[str, float]) -> Iterator[Finding]:
        """Sizes that are further than MARGIN outside the rows' range."""
        for name, (low, high) in self.ranges.items():
            if not low - MARGIN <= row[name] <= high + MARGIN:
                size = name.removeprefix("log2_")
                label = "the allocated peak in GiB" if size == "allocated" else size
                sentence = (
                    f"{label} is {_plain(2 ** row[name])}, far outside the measured range of {_plain(2**low)} to "
                    f"{_plain(2**high)}; the bars are widened."
                )
                yield Finding("size_not_measured", size, "either", sentence)

    def _versions_outside(self, job: TrainingJob) -> Iterator[Finding]:
        """Packages of an earlier or later release than all rows'."""
        for package, version in resolved(job.versions).items():
            seen = self.versions.get(package, ())
            releases = [release(other)[:2] for other in seen if release(other)]
            if releases and release(version) and not min(releases) <= release(version)[:2] <= max(releases):
                sentence = f"{package} {version} is none of the measured releases ({', '.join(seen)}); bars are widened."
                yield Finding("version_not_measured", f"versions.{package}", "either", sentence)

    def distance(self, job: TrainingJob, row: Mapping[str, float], gpu: str) -> int:
        """How far outside `job` with the features `row` is on the GPU type `gpu`: from 0 (inside) to MOST_SEVERE."""
        return min(severity(self.outside(job, row)) + (gpu not in self.gpus), MOST_SEVERE)

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "architectures": list(self.architectures),
            "gpus": list(self.gpus),
            "kinds": [list(kind) for kind in self.kinds],
            "traits": {name: list(values) for name, values in self.traits.items()},
            "ranges": {name: list(span) for name, span in self.ranges.items()},
            "versions": {package: list(values) for package, values in self.versions.items()},
        }

    @classmethod
    def from_mapping(cls, mapping: object) -> Domain:
        """The domain of `to_mapping`. Raises: CalibrationError."""
        top = read(mapping, {"architectures", "gpus", "kinds", "traits", "ranges", "versions"}, "domain")
        for key in ("traits", "ranges", "versions"):
            if not isinstance(top[key], Mapping):
                raise CalibrationError(f"domain.{key} must be a mapping; fit the calibration again.", parameter=key)
        if not isinstance(top["kinds"], list):
            raise CalibrationError("domain.kinds must be a list; fit the calibration again.", parameter="kinds")
        ranges = {}
        for name, span in top["ranges"].items():
            if name not in RANGED or not isinstance(span, list) or len(span) != 2:
                raise CalibrationError(f"domain.ranges[{name!r}] is not a known pair; fit the calibration again.")
            ranges[name] = (number(span[0], name), number(span[1], name))
        return cls(
            architectures=tuple(texts(top["architectures"], "architectures")),
            gpus=tuple(texts(top["gpus"], "gpus")),
            kinds=tuple(tuple(texts(kind, "kinds")) for kind in top["kinds"]),
            traits={name: tuple(texts(values, name)) for name, values in top["traits"].items()},
            ranges=ranges,
            versions={package: tuple(texts(values, package)) for package, values in top["versions"].items()},
        )


def severity(findings: Iterable[Finding]) -> int:
    """How far outside a job is by all `findings` together: from 0 to MOST_SEVERE. What the ledger does not cover counts
    once, however many parts of the job that are."""
    severities = [finding.severity for finding in findings]
    uncovered = [size for size in severities if size >= OUT_OF_SCOPE]
    return min(sum(size for size in severities if size < OUT_OF_SCOPE) + max(uncovered, default=0), MOST_SEVERE)


def traits(job: TrainingJob) -> dict[str, str]:
    """The traits of a job, each of which the rows of a calibration may or may not have."""
    offloads = [name for name in ("parameters", "optimizer", "activations") if getattr(job.offload, name)]
    return {
        "framework": job.framework,
        "layout": layout_name(job),
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
        # only if they differ from the default: older calibrations do not have these traits
        **({"lengths": "changing"} if lengths_change(job) else {}),
        **({"inputs": "images"} if job.images.per_sequence else {}),
        **({"loss": job.loss.kind} if job.loss.kind != "cross_entropy" else {}),
    }


def _kind(job: TrainingJob) -> tuple[str, ...]:
    """The kind of a job: framework, task, kind of feed-forward layers, and which weights have gradients, whatever the
    method's name."""
    trained = "all weights" if job.finetuning.method == "full" else "adapters"
    if job.finetuning.quantization and trained == "adapters":
        trained += " of quantised weights"
    return (job.framework, job.task, feed_forward_of(job), trained)


def _minor(version: str) -> str:
    """major.minor of a version."""
    numbers = release(version)[:2]
    return ".".join(map(str, numbers)) if numbers else version


def _plain(value: float) -> str:
    """A size as a person writes it: whole from 100 on, otherwise three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
