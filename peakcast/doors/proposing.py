"""The implementation of `api.watch`: reads the memory snapshot that a real run wrote, compares the run's peaks with its
prediction, and proposes a row for the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast import __version__
from peakcast.answers.remarks import compared_text
from peakcast.core.errors import RecordError
from peakcast.doors.answering import answer
from peakcast.doors.questions import Rank, question
from peakcast.doors.refusing import device_at
from peakcast.histories.files import read_histories
from peakcast.histories.history import Action, History
from peakcast.measurements.records import Measurement
from peakcast.models.allocator.history_replay import HistoryReplay, replay_history

if TYPE_CHECKING:
    from peakcast.answers.prediction import Prediction
    from peakcast.catalog import Device

SOURCE = "local"
"""The same as for rows that `peakcast.watch` measures in a script (collectors/stacks/steps/observing.py)."""
COMPARED = ("peak_allocated_bytes", "peak_reserved_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A recorded run with its prediction and its row; `appended_to` is the file in which the row is stored."""

    file: str
    prediction: Prediction
    row: Measurement
    appended_to: str | None = None

    @property
    def inside(self) -> dict[str, bool]:
        """Quantity -> whether its recorded peak lies inside the prediction's 90 % bar."""
        found = {}
        for quantity in COMPARED:
            bar = getattr(self.prediction, quantity)
            found[quantity] = bar.lower <= getattr(self.row, quantity) <= bar.upper
        return found

    def to_mapping(self) -> dict[str, Any]:
        """JSON values: the row as in a shard, then prediction and recording by quantity."""
        from peakcast.measurements.rows import to_row

        compared = {
            quantity: {
                "recorded": getattr(self.row, quantity),
                "point": (bar := getattr(self.prediction, quantity)).point,
                "lower": bar.lower,
                "upper": bar.upper,
                "inside": self.inside[quantity],
            }
            for quantity in COMPARED
        }
        return {"file": self.file, **compared, "row": to_row(self.row), "appended_to": self.appended_to}

    def text(self) -> str:
        """One line of comparison per quantity, reasons to doubt the row, and the file in which it is stored."""
        lines = [
            compared_text(quantity.split("_")[1], getattr(self.row, quantity), getattr(self.prediction, quantity))
            for quantity in COMPARED
        ]
        lines += [f"Against the row: {reason}" for reason in self.row.spoiled]
        if not all(self.inside.values()):
            lines.append(f"Which tensors differ, `peakcast replay {self.file} --against JOB` says.")
        if self.appended_to is not None:
            return "\n".join([*lines, f"Row appended to {self.appended_to}."])
        lines.append("The run as a row of a table of your own: --append-to FILE adds it, --json shows it.")
        return "\n".join([*lines, "`peakcast evaluate --against FILE` checks the calibrations on such rows."])


def proposed(
    snapshot: Path,
    job: object,
    gpu: str | Device | None,
    rank: Rank,
    append_to: Path | None,
) -> Proposed:
    """The row of the run that wrote `snapshot`. Raises: RecordError, and what a prediction raises."""
    histories = read_histories(snapshot)
    replays = [replay_history(history) for history in histories]
    fullest = max(range(len(replays)), key=lambda index: replays[index].recorded_peak_reserved_bytes)
    history, replay = histories[fullest], replays[fullest]
    asked = question(job, device_at(gpu), rank)
    prediction = answer(asked)
    row = Measurement(
        job=asked.job,
        gpu=asked.device.name,
        provenance="measured",
        source=SOURCE,
        source_version=__version__,
        case=snapshot.name,
        rank=prediction.rank,
        outcome="out_of_memory" if _ran_out(history) else "ok",
        peak_allocated_bytes=replay.peak_allocated_bytes,
        peak_reserved_bytes=replay.recorded_peak_reserved_bytes,
        environment={"snapshot": snapshot.name, **({"torch": history.torch} if history.torch else {})},
        assumptions=asked.translation.assumptions,
        spoiled=tuple(_doubts(history, replay)),
    )
    if append_to is not None:
        from peakcast.measurements import store

        store.append(append_to, row)
    kept = str(append_to) if append_to is not None else None
    return Proposed(file=str(snapshot), prediction=prediction, row=row, appended_to=kept)


def check_snapshot_path(path: Path) -> None:
    """Refuse a path to which no snapshot can be written. Raises: RecordError."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise RecordError(
            f"snapshot={path} cannot be written: give a file in a folder that is there.",
            parameter="snapshot",
            value=str(path),
        )


def _ran_out(history: History) -> bool:
    return any(event.action is Action.OUT_OF_MEMORY for event in history.events)


def _doubts(history: History, replay: HistoryReplay) -> list[str]:
    """Sentences about why the recorded peaks may not be those of the whole run."""
    from peakcast.histories.categories import phases
    from peakcast.timelines.timeline import Phase

    found = phases(history)
    steps = sum(
        now is Phase.OPTIMIZER_STEP and before is not Phase.OPTIMIZER_STEP
        for before, now in zip([Phase.INIT, *found], found, strict=False)
    )
    doubts = []
    if steps < 2:  # in the first step, optimizer states do not exist during backward
        number = "no optimizer step is" if steps == 0 else "one optimizer step is"
        doubts.append(f"{number} seen in the recording; the peak of a run comes in the second step or later.")
    if not replay.agrees:
        doubts.append("the simulated allocator does not do what was recorded, so the allocated peak may be off.")
    return doubts
