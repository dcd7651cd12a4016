"""Compares two jobs, each at its own peak: which fields differ, and which bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.answers.explanation import Change, Comparison
from peakcast.core.fields import to_mapping
from peakcast.jobs.spec import TrainingJob
from peakcast.timelines.timeline import Category, Phase, Timeline

NUM_TENSORS = 40


def compare(first: tuple[TrainingJob, Timeline], second: tuple[TrainingJob, Timeline]) -> Comparison:
    """The differences between the `first` job and the `second`, each with its timeline."""
    (before_job, before), (after_job, after) = first, second
    peaks = before.peak(), after.peak()
    compositions = before.composition(peaks[0].instant), after.composition(peaks[1].instant)
    before_phases, after_phases = before.phase_peaks(), after.phase_peaks()
    tensors = _tensors(before, peaks[0].instant), _tensors(after, peaks[1].instant)
    return Comparison(
        fields=changed_fields(before_job, after_job),
        peak_bytes=(peaks[0].num_bytes, peaks[1].num_bytes),
        peak_phase=(peaks[0].phase.name.lower(), peaks[1].phase.name.lower()),
        phases=tuple(
            Change(
                name=phase.name.lower(), category="", before=before_phases.get(phase, 0), after=after_phases.get(phase, 0)
            )
            for phase in Phase
            if phase in before_phases or phase in after_phases
        ),
        categories=_ranked(
            Change(
                name=category.name.lower(),
                category=category.name.lower(),
                before=compositions[0].get(category, 0),
                after=compositions[1].get(category, 0),
            )
            for category in Category
            if category in compositions[0] or category in compositions[1]
        ),
        tensors=tuple(
            change
            for change in _ranked(
                Change(name=name, category=category, before=tensors[0].get(key, 0), after=tensors[1].get(key, 0))
                for key in dict.fromkeys([*tensors[0], *tensors[1]])
                for name, category in (key,)
            )
            if change.difference
        )[:NUM_TENSORS],
    )


def changed_fields(first: TrainingJob, second: TrainingJob) -> dict[str, tuple[Any, Any]]:
    """Path of a field -> its two values, for fields that differ. An architecture with another name counts as one field."""
    before, after = _flat(to_mapping(first)), _flat(to_mapping(second))
    if before["architecture.name"] != after["architecture.name"]:
        names = {"architecture": (before["architecture.name"], after["architecture.name"])}
        others = [path for path in [*before, *after] if not path.startswith("architecture.")]
    else:
        names, others = {}, [*before, *after]
    return names | {path: (before.get(path), after.get(path)) for path in others if before.get(path) != after.get(path)}


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat


def _tensors(timeline: Timeline, instant: int) -> dict[tuple[str, str], int]:
    return {
        (name, category.name.lower()): size for name, category, size, _ in timeline.largest_at(instant, len(timeline.names))
    }


def _ranked(changes: Any) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda change: -abs(change.difference)))
