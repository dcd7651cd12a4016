"""Why the peak is where it is: what existed before the step, what was added, what grew last, and which phase would peak
next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from peakcast.answers.explanation import PeakReason
from peakcast.answers.labels import category_name, phase_name
from peakcast.core.units import format_gib
from peakcast.jobs.spec import TrainingJob
from peakcast.timelines.timeline import Category, Phase, Timeline

NUM_LARGEST = 8
NUM_NAMED = 2
"""Number of tensors that a sentence names."""
WORTH_NAMING = 0.005
"""Categories below this fraction of the peak are not named in sentences."""
WORTH_EXPLAINING = 0.05
"""A mechanism is explained if it makes up at least this fraction of the peak."""


def peak_reason(timeline: Timeline, job: TrainingJob | None) -> PeakReason:
    """The reason for the peak of `timeline`; `job` is None for a module without a job."""
    peak = timeline.peak()
    alive = timeline.alive_at(peak.instant)
    standing = _by_category(timeline, alive & (timeline.born <= 0))
    on_top = _by_category(timeline, alive & (timeline.born > 0))
    before = np.flatnonzero(timeline.phases[: peak.instant] != peak.phase)
    previous, grown = "", dict[str, int]()
    if before.size:
        instant = int(before[-1])
        previous = Phase(int(timeline.phases[instant])).name.lower()
        grown = _difference(timeline.composition(instant), timeline.composition(peak.instant))
    others = {phase: size for phase, size in timeline.phase_peaks().items() if phase != peak.phase}
    following = max(others, key=lambda phase: others[phase], default=None)
    found = PeakReason(
        num_bytes=peak.num_bytes,
        phase=peak.phase.name.lower(),
        module=_module_at(timeline, peak.instant),
        operation=str(timeline.labels[peak.instant]) if len(timeline.labels) else "",
        standing_bytes=standing,
        on_top_bytes=on_top,
        largest=tuple(
            (name, category.name.lower(), size, number)
            for name, category, size, number in timeline.largest_at(peak.instant, NUM_LARGEST)
        ),
        previous_phase=previous,
        grown_bytes=grown,
        next_phase=following.name.lower() if following is not None else "",
        next_bytes=others[following] if following is not None else 0,
        sentences=(),
    )
    return _with_sentences(found, timeline, job)


def _with_sentences(reason: PeakReason, timeline: Timeline, job: TrainingJob | None) -> PeakReason:
    facts = Facts(reason, timeline, job)
    causes = [cause.sentence(facts) for cause in CAUSES if cause.holds(facts)]
    sentences = [_where(reason), _standing(reason), _on_top(facts), *causes, _since(reason), _next(reason)]
    return replace(reason, sentences=tuple(sentence for sentence in sentences if sentence))


# -- sentences that every peak has --------------------------------------------------------------------------------------


def _where(reason: PeakReason) -> str:
    place = f" of {reason.module}" if reason.module and reason.module != "optimizer" else ""
    operation = f", at {reason.operation}{place}" if reason.operation else ""
    return f"The peak, {format_gib(reason.num_bytes)}, is in {phase_name(reason.phase)}{operation}."


def _listed(sizes: Mapping[str, int], total: int) -> str:
    """The sizes in words: those worth naming, the largest first, then the sum of the rest."""
    named = [(name, size) for name, size in sizes.items() if size >= WORTH_NAMING * total]
    rest = sum(sizes.values()) - sum(size for _, size in named)
    parts = [f"{category_name(name)} {format_gib(size)}" for name, size in named]
    return ", ".join([*parts, *([f"the rest {format_gib(rest)}"] if rest > 0 and format_gib(rest) != "0.00 GiB" else [])])


def _standing(reason: PeakReason) -> str:
    total = sum(reason.standing_bytes.values())
    return f"{format_gib(total)} of it existed before the step: {_listed(reason.standing_bytes, reason.num_bytes)}."


def _on_top(facts: Facts) -> str:
    total = sum(facts.reason.on_top_bytes.values())
    if not total:
        return "The step itself added nothing."
    return (
        f"The step itself added {format_gib(total)}: {_listed(facts.reason.on_top_bytes, facts.reason.num_bytes)}; "
        f"the biggest are {facts.biggest_on_top()}."
    )


def _since(reason: PeakReason) -> str:
    if not reason.previous_phase:
        return ""
    least = WORTH_NAMING * reason.num_bytes
    grown = [f"{category_name(n)} grew by {format_gib(s)}" for n, s in reason.grown_bytes.items() if s >= least]
    released = [f"{format_gib(-s)} of {category_name(n)}" for n, s in reason.grown_bytes.items() if -s >= least]
    changes = [" and ".join(grown), f"{' and '.join(released)} were freed" if released else ""]
    sentence = ", while ".join(part for part in changes if part) or "nothing large changed"
    return f"Since the end of {phase_name(reason.previous_phase)}, {sentence}."


def _next(reason: PeakReason) -> str:
    if not reason.next_phase:
        return ""
    less = reason.num_bytes - reason.next_bytes
    if format_gib(less) == format_gib(0):
        return f"The peak of {phase_name(reason.next_phase)} is as high: lowering only one of the two saves nothing."
    return (
        f"The next highest peak, in {phase_name(reason.next_phase)}, is {format_gib(reason.next_bytes)}: lowering only the "
        f"highest saves at most {format_gib(less)}."
    )


# -- sentences that only some peaks have --------------------------------------------------------------------------------


SQUARE_ROOTS = ("exp_avg_sq_sqrt", "_foreach_sqrt")
"""Names of these tensors in the ledger and in a trace."""


@dataclass(frozen=True)
class Facts:
    """The facts from which causes are recognised: the timeline at its peak, and the job."""

    reason: PeakReason
    timeline: Timeline
    job: TrainingJob | None

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        return self.timeline.alive_at(self.timeline.peak().instant)

    def named(self, *words: str) -> tuple[int, int]:
        """(bytes, number) of the tensors at the peak whose names contain one of `words`."""
        chosen = [i for i in np.flatnonzero(self.alive).tolist() if any(word in self.timeline.names[i] for word in words)]
        return sum(int(self.timeline.num_bytes[i]) for i in chosen), len(chosen)

    @property
    def float32_logits(self) -> int:
        """Bytes of one set of the rank's logits in float32."""
        job = self.job
        assert job is not None
        layout = job.parallelism
        rows = job.micro_batch_size * job.sequence_length // layout.context_parallel_size
        return rows * -(-job.architecture.vocab_size // layout.tensor_parallel_size) * 4

    def like_logits(self) -> list[int]:
        """Entries at the peak with the size of the logits in float32 or in 16 bits: the logits, their softmax, their
        gradients."""
        if self.job is None:
            return []
        sizes, head = self.timeline.num_bytes, [module == "head" for module in self.timeline.modules]
        large = (sizes >= 0.45 * self.float32_logits) & (self.timeline.born > 0) & np.array(head, dtype=bool)
        weights = np.isin(self.timeline.categories, [int(Category.GRADIENTS), int(Category.OPTIMIZER_STATES)])
        found: list[int] = np.flatnonzero(self.alive & large & ~weights).tolist()
        return found

    def biggest_on_top(self) -> str:
        """The biggest tensors made in this step, in words."""
        groups: dict[str, list[int]] = {}
        for i in np.flatnonzero(self.alive & (self.timeline.born > 0)).tolist():
            groups.setdefault(self.timeline.names[i], []).append(int(self.timeline.num_bytes[i]))
        ranked = sorted(groups.items(), key=lambda item: -sum(item[1]))[:NUM_NAMED]
        return " and ".join(
            f"{name} ({format_gib(sum(sizes))}" + (f" in {len(sizes)} tensors)" if len(sizes) > 1 else ")")
            for name, sizes in ranked
        )


@dataclass(frozen=True, slots=True)
class Cause:
    """A mechanism that gets a sentence if it applies."""

    holds: Callable[[Facts], bool]
    sentence: Callable[[Facts], str]


def _share(facts: Facts, size: int) -> bool:
    return size >= WORTH_EXPLAINING * facts.reason.num_bytes


def _foreach(facts: Facts) -> str:
    size, number = facts.named(*SQUARE_ROOTS)
    tensors = "its tensor" if number == 1 else f"all {number} tensors"
    return (
        f"AdamW's foreach step takes the square root of the second moments of {tensors} at once: a copy of "
        f"{format_gib(size)} that lives until the step ends (torch/optim/adam.py, _multi_tensor_adam); fused makes none."
    )


def _logits(facts: Facts) -> str:
    job, timeline = facts.job, facts.timeline
    assert job is not None
    layout = job.parallelism
    rows, words = job.micro_batch_size * job.sequence_length // layout.context_parallel_size, job.architecture.vocab_size
    split = f" over {layout.tensor_parallel_size} tensor-parallel ranks" if layout.tensor_parallel_size > 1 else ""
    sizes = [(timeline.names[i], int(timeline.num_bytes[i])) for i in facts.like_logits()]
    named = ", ".join(f"{name} {format_gib(size)}" for name, size in sorted(sizes, key=lambda item: -item[1]))
    return (
        f"Logits are {rows:,} tokens × {words:,} words{split}, in float32 {format_gib(facts.float32_logits)}; {len(sizes)} "
        f"tensor{'s' * (len(sizes) > 1)} of their size live here: {named}."
    )


def _activations(facts: Facts) -> str:
    timeline, bytes_of_layer = facts.timeline, {}  # type: Timeline, dict[str, int]
    for i in np.flatnonzero(facts.alive & (timeline.categories == Category.ACTIVATIONS)).tolist():
        if timeline.modules[i].startswith("layers."):
            bytes_of_layer[timeline.modules[i]] = bytes_of_layer.get(timeline.modules[i], 0) + int(timeline.num_bytes[i])
    most = max(bytes_of_layer, key=lambda module: bytes_of_layer[module])
    total = format_gib(sum(bytes_of_layer.values()))
    if facts.job is not None and facts.job.activation_checkpointing.mode == "full" and len(bytes_of_layer) > 1:
        least = min(bytes_of_layer.values())
        return (
            f"Checkpointing keeps {format_gib(least, 3)} of each layer ({total} over {len(bytes_of_layer)} layers, with "
            f"{format_gib(bytes_of_layer[most])} of {most}, which is being recomputed)."
            if bytes_of_layer[most] > 2 * least
            else f"Checkpointing keeps {format_gib(least, 3)} of each of {len(bytes_of_layer)} layers, {total} together."
        )
    largest = f"{most} most with {format_gib(bytes_of_layer[most], 3)}"
    return f"{len(bytes_of_layer)} layers keep {total} of activations for the backward pass, {largest}."


def _keeps_layers(facts: Facts) -> bool:
    if facts.job is not None and facts.job.task != "train":
        return False
    modules = facts.timeline.modules
    chosen = np.flatnonzero(facts.alive & (facts.timeline.categories == Category.ACTIVATIONS)).tolist()
    return _share(facts, sum(int(facts.timeline.num_bytes[i]) for i in chosen if modules[i].startswith("layers.")))


CAUSES = (
    Cause(lambda f: f.reason.phase == "optimizer_step" and _share(f, f.named(*SQUARE_ROOTS)[0]), _foreach),
    Cause(lambda f: _share(f, sum(int(f.timeline.num_bytes[i]) for i in f.like_logits())), _logits),
    Cause(_keeps_layers, _activations),
)


# -- sums ---------------------------------------------------------------------------------------------------------------


def _by_category(timeline: Timeline, chosen: npt.NDArray[np.bool_]) -> dict[str, int]:
    sums = {
        category.name.lower(): int(timeline.num_bytes[chosen & (timeline.categories == category)].sum())
        for category in Category
    }
    return dict(sorted(((name, size) for name, size in sums.items() if size), key=lambda item: -item[1]))


def _difference(before: Mapping[Category, int], after: Mapping[Category, int]) -> dict[str, int]:
    changes = {category.name.lower(): after.get(category, 0) - before.get(category, 0) for category in Category}
    return dict(sorted(((name, size) for name, size in changes.items() if size), key=lambda item: -abs(item[1])))


def _module_at(timeline: Timeline, instant: int) -> str:
    """The module that is running: that of the biggest tensor born at `instant`, or of the last one born before it in this
    phase."""
    same = timeline.phases[timeline.born.clip(0, len(timeline.phases) - 1)] == timeline.phases[instant]
    candidates = np.flatnonzero((timeline.born <= instant) & (timeline.born > 0) & (timeline.dies > instant) & same)
    if not candidates.size:
        return ""
    latest = candidates[timeline.born[candidates] == timeline.born[candidates].max()]
    return timeline.modules[int(latest[np.argmax(timeline.num_bytes[latest])])]
