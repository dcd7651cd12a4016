"""The door inside a training script: predict before the first step, compare with what the run really took at its end.

    with peakcast.watch(job, "H100-80GB", append_to="mine.shard.jsonl"):
        train()

    trainer = Trainer(..., callbacks=[peakcast.trainer_callback(append_to="mine.shard.jsonl")])

Nothing is sent anywhere. A row of the run is kept only where `append_to` names a file for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from peakcast import catalog
from peakcast.answers import answer
from peakcast.catalog import Device
from peakcast.errors import PeakcastError, SpecError
from peakcast.labels import VERDICTS
from peakcast.questions import Question, question
from peakcast.units import format_gib

if TYPE_CHECKING:
    from peakcast.prediction import Interval, Prediction

Say = Callable[[str], None]
COMPARED = (
    ("allocated", "peak_allocated_bytes", "allocated"),
    ("reserved", "peak_reserved_bytes", "reserved"),
)
"""Name shown, field of a prediction, reading of an observation."""


class Watch:
    """A prediction and the run it is of, as a context manager; `say` gets each line that a user should see."""

    def __init__(
        self, job: object = None, gpu: str | Device | None = None, *, append_to: str | Path | None = None, say: Say = print
    ) -> None:
        from peakcast.collectors.observing import Observation

        self._observation = Observation()
        reported = self._observation.gpu_name()
        self._gpu = gpu if gpu is not None else reported
        self._measures = reported is not None
        self._append_to = Path(append_to) if append_to is not None else None
        self.say = say
        self.question: Question | None = None
        self.prediction: Prediction | None = None
        self.measured: dict[str, int] = {}
        """Peaks by name (`allocated`, `reserved`), in bytes, once the run has ended."""
        if job is not None:
            self.ask(job)

    def ask(self, job: object) -> None:
        """Predict `job`, in any form that `peakcast.predict` takes, and say so in one line.

        Raises: SpecError or CatalogError, also when there is neither a GPU here nor one named.
        """
        if self._gpu is None:
            raise SpecError(
                "gpu is required where there is no GPU; name its type, such as gpu='H100-80GB'.", parameter="gpu"
            )
        device = self._gpu if isinstance(self._gpu, Device) else catalog.gpu(self._gpu)
        self.question = question(job, device)
        self.prediction = answer(self.question)
        bar = self.prediction.peak_allocated_bytes
        self.say(f"peakcast: {VERDICTS[self.prediction.fits]} on {device.name}; allocated peak {_bar(bar)} predicted")

    def __enter__(self) -> Watch:
        self._observation.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish(complete=kind is None)

    def finish(self, num_steps: int | None = None, *, complete: bool = True) -> None:
        """Compare, in a line for each quantity, and keep the row where that was asked for and the run is `complete`."""
        if not self._measures or self.question is None or self.prediction is None:
            self.say("peakcast: nothing to compare; the run used no GPU that can be read")
            return
        self._observation.finish()
        for name, quantity, reading in COMPARED:
            bar: Interval = getattr(self.prediction, quantity)
            self.measured[name] = size = self._observation.peaks[reading]
            inside = "inside" if bar.lower <= size <= bar.upper else "OUTSIDE"
            error = f"{(bar.point / size - 1) * 100:+.1f} %" if size else "nothing was allocated"
            self.say(f"peakcast: {name} peak {format_gib(size)} measured, {_bar(bar)} predicted: {error}, {inside} the bar")
        if self._append_to is not None and complete:
            from peakcast import store

            row = self._observation.row(self.question.job, self.question.device.name, num_steps)
            store.append(self._append_to, row)
            self.say(f"peakcast: row appended to {self._append_to}" + "".join(f"; marked: {why}" for why in row.spoiled))


class _Listener:
    """Turns what a Trainer tells into a watch's questions. A fault is said, and never stops a training run."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._facts: dict[str, Any] = {}
        self._entered = False

    def begins(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def sees(self, batch: int, sequence: int) -> None:
        arguments = {
            **self._facts["training_arguments"],
            "per_device_train_batch_size": batch,
            "max_length": sequence,
        }
        try:
            self._watch.ask({"huggingface": {**self._facts, "training_arguments": arguments}})
            if not self._entered:
                self._watch.__enter__()
                self._entered = True
        except PeakcastError as error:
            self._watch.say(f"peakcast: {error.message}")

    def ends(self, num_steps: int) -> None:
        if not self._entered:
            return
        try:
            self._watch.finish(num_steps)
        except PeakcastError as error:
            self._watch.say(f"peakcast: {error.message}")


def watch(job: object, gpu: str | Device | None = None, *, append_to: str | Path | None = None, say: Say = print) -> Watch:
    """A context manager around a training run of `job`: predicts it, then compares with the real peaks.

    `gpu`: a GPU type (None: the one at hand). `append_to`: a JSON-lines file that a row of the run is added to, which
    `peakcast fit` and `peakcast evaluate --against` read. `say` gets each line.
    Raises: SpecError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    return Watch(job, gpu, append_to=append_to, say=say)


def trainer_callback(gpu: str | Device | None = None, *, append_to: str | Path | None = None, say: Say = print) -> Any:
    """A callback for transformers' Trainer that predicts when the first batch is seen, before its step, and compares at
    the end. It reads the model's config, the TrainingArguments and the adapter by itself; a fault of its own is said and
    never stops the run. Parameters as `watch`."""
    from peakcast.collectors.frameworks.callback import TellingCallback

    return TellingCallback(_Listener(Watch(None, gpu, append_to=append_to, say=say)))


def _bar(bar: Interval) -> str:
    return f"{format_gib(bar.point)} ({format_gib(bar.lower)} to {format_gib(bar.upper)})"
