"""`Explanation`: why a job needs its memory. Plain values; `peakcast.explaining` makes them, and its `text` prints them.

Bytes are ints and of one rank unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from peakcast.answers.advised import Advice, json_values
from peakcast.core.findings import Finding, sentences
from peakcast.jobs.allocator_settings import Allocator
from peakcast.timelines.timeline import Category, Timeline

LAYER_COLUMNS: dict[str, tuple[Category, ...]] = {
    "weights": (Category.PARAMETERS, Category.MAIN_PARAMETERS, Category.REFERENCE_PARAMETERS),
    "gradients": (Category.GRADIENTS,),
    "optimizer": (Category.OPTIMIZER_STATES,),
    "activations": (Category.ACTIVATIONS, Category.LOGITS, Category.KV_CACHE),
    "other": (
        Category.TEMPORARIES,
        Category.OPTIMIZER_TEMPORARIES,
        Category.COMMUNICATION_BUFFERS,
        Category.WORKSPACES,
        Category.INPUTS,
        Category.OTHER,
    ),
}
"""Column of the per-layer table -> the categories that it adds up. Every category is in exactly one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One module's part. Each column has the bytes at the instant when that column's sum over all modules is largest, so a
    column adds up to the most that its categories have in the step; `at_peak` adds up to the peak."""

    module: str
    num_parameters: int
    """Number of elements on this rank, including frozen ones and adapters."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    other: int
    at_peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """One parameter: its shape in the whole model, its shape on this rank, and the number of ranks over which sharded data
    parallelism splits the latter again."""

    module: str
    name: str
    shape: tuple[int, ...]
    rank_shape: tuple[int, ...]
    shards: int = 1
    is_trained_adapter: bool = False
    """Whether it is a tensor of an adapter that trains, and not one that stays as it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks that communicate with each other along one axis of the layout, in Megatron's order tp-cp-ep-dp-pp."""

    axis: str
    members: tuple[int, ...]
    """The ranks in the group of the explained rank."""
    firsts: tuple[int, ...]
    """The first rank of every group of the axis; its other ranks follow at the same distances as in `members`."""

    @property
    def size(self) -> int:
        """Number of ranks in a group."""
        return len(self.members)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every group of the axis; all of them together are the ranks of the job."""
        distances = [member - self.members[0] for member in self.members]
        return tuple(tuple(first + distance for distance in distances) for first in self.firsts)


CollectiveName = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send/recv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of communication of a job, from the view of one rank."""

    axis: str
    function: CollectiveName
    what: str
    where: str
    """The part of the step in which it happens."""
    group_size: int
    message_bytes: int
    """Bytes of one call: the whole tensor, before it is scattered or after it is gathered."""
    calls_per_micro_batch: int
    """0 if it happens once per iteration."""
    calls_per_iteration: int
    """0 if this rank takes no part in it."""
    sent_per_micro_batch_bytes: int
    """Bytes that this rank sends in a ring: 2(n−1)/n of the message for an all-reduce, (n−1)/n for an all-gather, a
    reduce-scatter or an all-to-all, and all of it for a send."""
    sent_per_iteration_bytes: int
    sent_in_cluster_bytes: int
    """Bytes that all ranks together send for it per iteration."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReason:
    """Why the peak is where it is."""

    num_bytes: int
    phase: str
    module: str
    operation: str
    standing_bytes: Mapping[str, int]
    """Category -> bytes at the peak that have existed since before the step."""
    on_top_bytes: Mapping[str, int]
    """Category -> bytes at the peak that were allocated in this step. With `standing_bytes` they add up to the peak."""
    largest: tuple[tuple[str, str, int, int], ...]
    """(name, category, bytes, number of tensors)."""
    previous_phase: str
    """The phase before the peak's; "" if there is none."""
    grown_bytes: Mapping[str, int]
    """Category -> bytes at the peak minus bytes at the previous phase's end; negative for what was freed."""
    next_phase: str
    """The other phase with the highest peak; "" if there is none."""
    next_bytes: int
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One line of a comparison: bytes at the peak of either job."""

    name: str
    category: str
    before: int
    after: int

    @property
    def difference(self) -> int:
        """Bytes of the second job minus bytes of the first."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two jobs side by side, each at its own peak."""

    fields: Mapping[str, tuple[Any, Any]]
    """Field of the job -> (value in the first, value in the second), for fields that differ."""
    peak_bytes: tuple[int, int]
    peak_phase: tuple[str, str]
    phases: tuple[Change, ...]
    """The peak of each phase."""
    categories: tuple[Change, ...]
    tensors: tuple[Change, ...]
    """Groups of tensors with equal names that differ, the biggest difference first."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything that `peakcast explain` shows of one rank of a job."""

    architecture: str
    gpu: str | None
    """None: only what the framework allocates on any GPU, without library workspaces."""
    rank: int
    source: Literal["ledger", "recipe", "trace"]
    peak: PeakReason
    timeline: Timeline
    modules: tuple[ModuleRow, ...]
    unsharded_modules: tuple[ModuleRow, ...] = ()
    """The rows of the same job on one rank that holds everything; empty if the job has one rank."""
    parameters: tuple[ParameterRow, ...] = ()
    groups: tuple[Group, ...] = ()
    communication: tuple[Collective, ...] = ()
    communication_notes: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    """Each change by itself, the largest saving first."""
    together: tuple[Advice, ...] = ()
    """What to try first: each change on top of those before it."""
    comparison: Comparison | None = None
    assumptions: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    allocator: Allocator = field(default_factory=Allocator)
    """Allocator settings for a snapshot of the timeline."""
    written: tuple[str, ...] = field(default=())
    """Files that were written on request."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The sentences of the findings."""
        return sentences(self.findings)

    def to_mapping(self) -> dict[str, Any]:
        """The explanation as a JSON-able mapping; the timeline is given by its totals, phases and labels at each
        instant."""
        timeline = self.timeline
        mapping: dict[str, Any] = {
            name: json_values(value)
            for name, value in vars(self).items()
            if name != "timeline" and not name.startswith("_")
        }
        mapping["groups"] = [
            {"axis": each.axis, "size": each.size, "members": list(each.members), "groups": json_values(each.groups)}
            for each in self.groups
        ]
        mapping["findings"] = [finding.to_mapping() for finding in self.findings]
        mapping["warnings"] = list(self.warnings)
        mapping["timeline"] = {
            "allocated_bytes": timeline.totals.tolist(),
            "phases": timeline.phases.tolist(),
            "labels": list(timeline.labels),
        }
        return mapping
