"""Compares a recorded timeline with a predicted one: which tensors are as predicted, which are missing, which nobody
predicted.

A recording has no names of tensors, but exact sizes and times, so tensors are matched by size: as many tensors of one size
(rounded to 512 bytes) as both have at the compared moments are as predicted. In each phase, the moment at which the
recording has most bytes is compared with that moment of the prediction in the same phase that has most in common with
it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peakcast.core.units import ALLOCATION_UNIT_BYTES
from peakcast.timelines.timeline import Category, Phase, Timeline

NUM_NAMES = 3
UNKNOWN_PHASE = "phase unknown"
"""Shown to people instead of a phase if a recording does not contain it, as recordings without Python stacks do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """All tensors of one size at the compared moments: how many were recorded and predicted, and their predicted names."""

    size_bytes: int
    recorded: int
    predicted: int
    hidden: int
    """How many of the recorded ones a kernel or a library allocated, so that they are not tensors."""
    recorded_as: tuple[str, ...]
    predicted_as: tuple[str, ...]

    @property
    def difference_bytes(self) -> int:
        """Recorded bytes minus predicted bytes."""
        return (self.recorded - self.predicted) * self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment of a phase at which the recording has most bytes, and the nearest moment of the prediction.

    `as_predicted_bytes + unpredicted_bytes + hidden_bytes + slack_bytes` is what was recorded; `as_predicted_bytes +
    missing_bytes` is what was predicted.
    """

    phase: str
    recorded_instant: int
    """Number of allocations made until then."""
    recorded_bytes: int
    predicted_peak_bytes: int
    """The prediction's largest sum in that phase; in the whole step if it does not have the phase."""
    predicted_bytes: int
    """The prediction's bytes at the compared moment."""
    as_predicted_bytes: int
    missing_bytes: int
    """Bytes that were predicted and not recorded."""
    unpredicted_bytes: int
    """Bytes of tensors that were not predicted."""
    hidden_bytes: int
    """Memory of kernels and libraries that was not predicted; it belongs to no tensor."""
    slack_bytes: int
    """Bytes that blocks keep because the rest was too small to be split off."""
    sizes: tuple[SizeRow, ...]
    """By size; those whose bytes differ most come first, then by bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingComparison:
    """A recording compared with a prediction: at the recorded peak, and in every recorded phase."""

    predicted_by: str
    peak: Moment
    phases: tuple[Moment, ...]
    recorded: Timeline
    predicted: Timeline


def compare_recording(
    recorded: Timeline, predicted: Timeline, allocated_bytes: list[int], predicted_by: str
) -> RecordingComparison:
    """Compare `recorded` with `predicted`; `allocated_bytes` are the recording's at each instant, slack included."""
    allocated = np.array(allocated_bytes, dtype=np.int64)
    moments = {}
    for phase in Phase:
        inside = np.flatnonzero(recorded.phases == phase)
        if len(inside):
            at = int(inside[np.argmax(allocated[inside])])
            moments[phase] = _moment(recorded, predicted, phase, at, int(allocated[at]))
    fullest = max(moments.values(), key=lambda moment: moment.recorded_bytes)
    return RecordingComparison(
        predicted_by=predicted_by,
        peak=fullest,
        phases=tuple(moments.values()),
        recorded=recorded,
        predicted=predicted,
    )


def _moment(recorded: Timeline, predicted: Timeline, phase: Phase, at: int, allocated: int) -> Moment:
    """Compare the recording at instant `at` with the nearest moment of the prediction in that phase (or in the step)."""
    ours = np.flatnonzero(recorded.alive_at(at))
    have = Counter(recorded.num_bytes[ours].tolist())
    theirs = np.flatnonzero(predicted.alive_at(_nearest(predicted, phase, have)))
    want = Counter(_rounded(predicted)[theirs].tolist())
    of_kernels = recorded.categories[ours] == Category.WORKSPACES
    hidden = Counter(recorded.num_bytes[ours[of_kernels]].tolist())
    matched = {size: min(have[size], want[size]) for size in have}
    extra = {size: have[size] - matched[size] for size in have}
    of_hidden = {size: min(extra[size], hidden[size]) for size in have}
    names, ledger_names = _names(recorded, ours, recorded.num_bytes), _names(predicted, theirs, _rounded(predicted))
    rows = [
        SizeRow(
            size_bytes=size,
            recorded=have[size],
            predicted=want[size],
            hidden=hidden[size],
            recorded_as=names.get(size, ()),
            predicted_as=ledger_names.get(size, ()),
        )
        for size in {**have, **want}
    ]
    return Moment(
        phase=phase.name.lower(),
        recorded_instant=at,
        recorded_bytes=allocated,
        predicted_peak_bytes=predicted.peak(phase if (predicted.phases == phase).any() else None).num_bytes,
        predicted_bytes=sum(size * count for size, count in want.items()),
        as_predicted_bytes=sum(size * count for size, count in matched.items()),
        missing_bytes=sum(size * (count - matched.get(size, 0)) for size, count in want.items()),
        unpredicted_bytes=sum(size * (extra[size] - of_hidden[size]) for size in have),
        hidden_bytes=sum(size * count for size, count in of_hidden.items()),
        slack_bytes=allocated - int(recorded.num_bytes[ours].sum()),
        sizes=tuple(sorted(rows, key=lambda row: (-abs(row.difference_bytes), -row.size_bytes * row.recorded))),
    )


def _nearest(predicted: Timeline, phase: Phase, have: Counter[int]) -> int:
    """The instant of `phase` at which the prediction's bytes differ least from the sizes `have`."""
    end, sizes = len(predicted.phases), _rounded(predicted)
    lives = np.flatnonzero(np.clip(predicted.born, 0, end) < np.clip(predicted.dies, 0, end)).tolist()
    moves = [(max(int(predicted.born[entry]), 0), 1, int(sizes[entry])) for entry in lives]
    moves += [(int(predicted.dies[entry]), -1, int(sizes[entry])) for entry in lives if predicted.dies[entry] < end]
    change = np.zeros(end, dtype=np.int64)
    more = dict(have)  # how many of each size were recorded beyond those predicted
    for instant, step, size in sorted(moves):
        before = more.get(size, 0)
        more[size] = before - step
        change[instant] += (abs(before - step) - abs(before)) * size
    difference = np.cumsum(change)
    inside = predicted.phases == phase
    difference[~inside if inside.any() else np.zeros(end, dtype=bool)] = np.iinfo(np.int64).max
    return int(np.argmin(difference))


def shares(found: RecordingComparison, instants: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes of the recording at each of `instants`, [3, len(instants)]: as predicted; of tensors that were not predicted;
    of kernels and libraries. Of each size, as many are as predicted as the prediction ever has at once in that phase."""
    recorded, predicted = found.recorded, found.predicted
    most = {phase: _most_at_once(predicted, phase) for phase in Phase}
    result = np.zeros((3, len(instants)), dtype=np.int64)
    for column, instant in enumerate(instants.tolist()):
        alive = np.flatnonzero(recorded.alive_at(instant))
        known = most[Phase(int(recorded.phases[instant]))]
        have = Counter(recorded.num_bytes[alive].tolist())
        hidden = Counter(recorded.num_bytes[alive[recorded.categories[alive] == Category.WORKSPACES]].tolist())
        for size, count in have.items():
            matched = min(count, known.get(size, 0))
            of_kernels = min(count - matched, hidden[size])
            result[:, column] += np.array([matched, count - matched - of_kernels, of_kernels]) * size
    return result


def _most_at_once(predicted: Timeline, phase: Phase) -> dict[int, int]:
    """How many tensors of each size the prediction has at once in a phase; in the whole step if it does not have the
    phase."""
    inside = predicted.phases == phase
    inside = inside if inside.any() else np.ones(len(predicted.phases), dtype=bool)
    end, sizes = len(predicted.phases), _rounded(predicted)
    most = {}
    for size in np.unique(sizes).tolist():
        chosen = sizes == size
        change = np.zeros(end + 1, dtype=np.int64)
        np.add.at(change, np.clip(predicted.born[chosen], 0, end), 1)
        np.subtract.at(change, np.clip(predicted.dies[chosen], 0, end), 1)
        most[int(size)] = int(np.cumsum(change)[:-1][inside].max())
    return most


def _rounded(timeline: Timeline) -> npt.NDArray[np.int64]:
    rounded: npt.NDArray[np.int64] = -(-timeline.num_bytes // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES
    return rounded


def _names(timeline: Timeline, alive: npt.NDArray[np.intp], sizes: npt.NDArray[np.int64]) -> dict[int, tuple[str, ...]]:
    """The commonest names of tensors of each size."""
    by_size: dict[int, Counter[str]] = {}
    for entry in alive.tolist():
        by_size.setdefault(int(sizes[entry]), Counter())[timeline.names[entry]] += 1
    return {size: tuple(name for name, _ in names.most_common(NUM_NAMES)) for size, names in by_size.items()}
