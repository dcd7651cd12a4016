"""The implementation of `api.replay` and `api.replay_all`: reads recordings, replays them in the simulated allocator, and
compares one with a prediction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.core.errors import RecordError
from peakcast.doors.questions import Rank
from peakcast.histories.files import read_histories, recordings_of
from peakcast.histories.history import History
from peakcast.models.allocator.caching_allocator import SimulatedOutOfMemoryError
from peakcast.models.allocator.history_replay import HistoryReplay, allocated_bytes, replay_history

if TYPE_CHECKING:
    from peakcast.catalog import Device
    from peakcast.explaining.recording_comparison import RecordingComparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A recording and its replay, for each GPU; sizes in bytes. `beside`: the comparison of a prediction with the recording
    of the GPU that reserved most."""

    file: str
    names: tuple[str, ...]
    gpus: tuple[HistoryReplay, ...]
    beside: RecordingComparison | None = None
    written: str | None = None

    @property
    def fullest(self) -> int:
        """Index of the recording that reserved most."""
        return max(range(len(self.gpus)), key=lambda index: self.gpus[index].recorded_peak_reserved_bytes)

    @property
    def agrees(self) -> bool:
        """Whether the simulation reserved the same as the real allocators."""
        return all(each.agrees for each in self.gpus)

    def to_mapping(self) -> dict[str, Any]:
        """JSON values: allocations of all GPUs together, peaks of the fullest, then each GPU."""
        most = self.gpus[self.fullest]
        mapping: dict[str, Any] = {
            "file": self.file,
            "agrees": self.agrees,
            "allocations": sum(each.allocations for each in self.gpus),
            "same_place": sum(each.same_place for each in self.gpus),
            "peak_reserved_bytes": most.peak_reserved_bytes,
            "recorded_peak_reserved_bytes": most.recorded_peak_reserved_bytes,
            "peak_allocated_bytes": most.peak_allocated_bytes,
            "gpus": [_mapping(each) | {"name": name} for name, each in zip(self.names, self.gpus, strict=True)],
        }
        if self.beside is not None:
            mapping["beside"] = {
                "predicted_by": self.beside.predicted_by,
                "peak": _mapping(self.beside.peak),
                "phases": [_mapping(moment) for moment in self.beside.phases],
            }
        return mapping | ({"written": self.written} if self.written else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReplayed:
    """A file, among several, that cannot be replayed, and why."""

    file: str
    error: RecordError

    def to_mapping(self) -> dict[str, Any]:
        """JSON values."""
        error = self.error
        return {"file": self.file, "error": {"parameter": error.parameter, "value": error.value, "message": error.message}}


def all_replayed(files: Iterable[Path]) -> Iterator[Replayed | NotReplayed]:
    """The replay of each recording in `files`, one after the other. Raises: RecordError if a folder of them has none."""
    for file in [recording for path in files for recording in recordings_of(path)]:
        try:
            yield replayed(file, None, None, None, trace=False, module=None, output=None)
        except RecordError as error:
            yield NotReplayed(file=str(file), error=error)


def replayed(
    file: Path,
    against: object,
    gpu: str | Device | None,
    rank: Rank,
    *,
    trace: bool,
    module: str | None,
    output: Path | None,
) -> Replayed:
    """The replay of `file`. Raises: RecordError, and the errors of a prediction."""
    histories = read_histories(Path(file))
    found = Replayed(
        file=str(file),
        names=tuple(history.name for history in histories),
        gpus=tuple(_replay(history, file) for history in histories),
    )
    if against is None and module is None:
        if output is not None or trace:
            from peakcast.core.errors import SpecError

            name = "output" if output is not None else "trace"
            raise SpecError(f"{name} applies to a comparison only: give against, or module, too.", parameter=name)
        return found
    return _beside(found, histories[found.fullest], against, gpu, rank, trace=trace, module=module, output=output)


def _replay(history: History, file: Path) -> HistoryReplay:
    try:
        return replay_history(history)
    except (ValueError, IndexError, KeyError, AssertionError, SimulatedOutOfMemoryError) as error:
        raise RecordError(f"{file} contradicts itself: {error}; record it again.", value=str(file)) from error


def _beside(
    found: Replayed,
    history: History,
    against: object,
    gpu: str | Device | None,
    rank: Rank,
    *,
    trace: bool,
    module: str | None,
    output: Path | None,
) -> Replayed:
    from dataclasses import replace

    from peakcast.doors.destinations import output_errors
    from peakcast.doors.explaining import explanation
    from peakcast.explaining.comparison_picture import write_comparison
    from peakcast.explaining.picture import check_picture_path
    from peakcast.explaining.recording_comparison import compare_recording
    from peakcast.models.allocator.history_timeline import recorded_timeline

    if output is not None:
        check_picture_path(Path(output))
    if against is not None and module is not None:
        from peakcast.core.errors import SpecError

        raise SpecError("against and module are two predictions; leave one out.", parameter="module")
    predicted = explanation(against, gpu, rank, trace=trace, module=module)
    by = f"the {predicted.source} of {predicted.architecture}"
    compared = compare_recording(recorded_timeline(history), predicted.timeline, allocated_bytes(history), by)
    if output is not None:
        with output_errors(Path(output)):
            write_comparison(compared, Path(output), f"{history.name}, beside {by}")
    return replace(found, beside=compared, written=str(output) if output is not None else None)


def _mapping(value: Any) -> dict[str, Any]:
    from peakcast.answers.advised import json_values

    mapping: dict[str, Any] = json_values(value)
    if isinstance(value, HistoryReplay):
        mapping["agrees"] = value.agrees
    return mapping
