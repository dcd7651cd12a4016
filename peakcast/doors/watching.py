"""For use inside a training script: predicts before the first step, and compares with the measured peaks when the run ends.

    with peakcast.watch(job, "H100-80GB", append_to="mine.shard.jsonl"):
        train()

    trainer = Trainer(..., callbacks=[peakcast.trainer_callback(append_to="mine.shard.jsonl")])

Nothing is sent anywhere. A row of the run is stored only if `append_to` names a file for it.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from peakcast.answers.remarks import bar_text, compared_text, verdict_words
from peakcast.catalog import Device
from peakcast.core.errors import DoesNotFitError, PeakcastError
from peakcast.dialects.common.asked_versions import OF_THIS_RUN
from peakcast.dialects.huggingface.post_training import sequences_per_sample
from peakcast.doors.answering import answer
from peakcast.doors.proposing import check_snapshot_path
from peakcast.doors.questions import Question, question
from peakcast.doors.refusing import (
    Say,
    device_at,
    in_plain_values,
    mode_of,
    print_on_first_rank,
    refuse_what_does_not_fit,
    trl_program,
)

if TYPE_CHECKING:
    from peakcast.answers.prediction import Interval, Prediction

COMPARED = (
    ("allocated", "peak_allocated_bytes", "allocated"),
    ("reserved", "peak_reserved_bytes", "reserved"),
)
"""(name shown to the user, field of a prediction, reading of an observation)."""


class Watch:
    """A prediction and the run to which it belongs, as a context manager; `say` is called with each line for the user."""

    def __init__(
        self,
        job: object = None,
        gpu: str | Device | None = None,
        *,
        append_to: str | Path | None = None,
        snapshot: str | Path | None = None,
        refuse: bool | None = None,
        say: Say | None = None,
    ) -> None:
        from peakcast.collectors.stacks.steps.observing import Observation

        self._snapshot = Path(snapshot) if snapshot is not None else None
        if self._snapshot is not None:
            check_snapshot_path(self._snapshot)
        self._observation = Observation(self._snapshot)
        self._gpu = gpu
        self._measures = self._observation.gpu_name() is not None
        self._append_to = Path(append_to) if append_to is not None else None
        self._refuses = mode_of(refuse, "warn") == "refuse"
        self.say = say or print_on_first_rank
        self.question: Question | None = None
        self.prediction: Prediction | None = None
        self.measured: dict[str, int] = {}
        """Name (`allocated`, `reserved`) -> measured peak in bytes; filled when the run has ended."""
        if job is not None:
            self.ask(job)

    def ask(self, job: object, program: str = "") -> None:
        """Predict `job`, in any form that `peakcast.preflight` takes, as run by the TRL `program`, if it is one of TRL's
        runs, and say so in one line.

        Raises: SpecError or CatalogError, also if no GPU is named and this machine has none; DoesNotFitError if runs that
        surely do not fit are to be refused.
        """
        self.question = question(in_plain_values(job, program), device_at(self._gpu), versions=OF_THIS_RUN)
        self.prediction = answer(self.question)
        bar = self.prediction.peak_allocated_bytes
        verdict = f"{verdict_words(self.prediction)} on {self.question.device.name}"
        self.say(f"peakcast: {verdict}; allocated peak {bar_text(bar)} predicted")
        if self._refuses:
            refuse_what_does_not_fit(self.question, self.prediction)

    def __enter__(self) -> Watch:
        self._observation.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish(complete=kind is None)

    def finish(self, num_steps: int | None = None, *, complete: bool = True) -> None:
        """Compare prediction and measurement, in one line per quantity, and store the row if `append_to` is given and the
        run is `complete`."""
        if not self._measures or self.question is None or self.prediction is None:
            self.say("peakcast: nothing to compare; the run used no GPU that can be read")
            return
        self._observation.finish()
        for name, quantity, reading in COMPARED:
            bar: Interval = getattr(self.prediction, quantity)
            self.measured[name] = size = self._observation.peaks[reading]
            self.say(f"peakcast: {compared_text(name, size, bar)}")
        if self._snapshot is not None:
            self.say(f"peakcast: snapshot written to {self._snapshot}; `peakcast replay` compares it with a prediction")
        if self._append_to is not None and complete:
            from peakcast.measurements import store

            row = self._observation.row(self.question.job, self.question.device.name, num_steps)
            store.append(self._append_to, row)
            self.say(f"peakcast: row appended to {self._append_to}" + "".join(f"; marked: {why}" for why in row.spoiled))


class _Listener:
    """Passes a Trainer's reports to a watch. Its own errors are printed and never stop a training run; only a refusal that
    the user asked for does."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._facts: dict[str, Any] = {}
        self._program = ""
        """The TRL program that would run this trainer; "" for another trainer."""
        self._sequences = 1
        """How many sequences of a batch belong to one sample."""
        self._entered = False

    def begins(self, facts: dict[str, Any]) -> None:
        self._program = trl_program(facts["arguments_class"])
        self._facts = {key: value for key, value in facts.items() if key != "arguments_class"}
        self._sequences = sequences_per_sample(self._program)

    def sees(self, batch: int, sequence: int) -> None:
        arguments = {
            **self._facts["training_arguments"],
            "per_device_train_batch_size": max(batch // self._sequences, 1),
            "max_length": sequence,
        }
        try:
            self._watch.ask({"huggingface": {**self._facts, "training_arguments": arguments}}, self._program)
            if not self._entered:
                self._watch.__enter__()
                self._entered = True
        except DoesNotFitError:
            raise
        except PeakcastError as error:
            self._watch.say(f"peakcast: {error.message}")

    def ends(self, num_steps: int) -> None:
        if not self._entered:
            return
        try:
            self._watch.finish(num_steps)
        except PeakcastError as error:
            self._watch.say(f"peakcast: {error.message}")


class _LightningListener:
    """The same as `_Listener` for Lightning; the script gives the job."""

    def __init__(self, watch: Watch, job: object) -> None:
        self._watch = watch
        self._job = job
        self._entered = False

    def sets_up(self) -> None:
        self._watch.ask(self._job)

    def begins(self) -> None:
        self._watch.__enter__()
        self._entered = True

    def ends(self, num_steps: int) -> None:
        if self._entered:
            self._watch.finish(num_steps)


def watch(
    job: object,
    gpu: str | Device | None = None,
    *,
    append_to: str | Path | None = None,
    snapshot: str | Path | None = None,
    refuse: bool | None = None,
    say: Say | None = None,
) -> Watch:
    """A context manager around a training run of `job`: predicts the run, then compares with the measured peaks.

    `gpu`: a GPU type (None: that of this machine). `append_to`: a JSON-lines file to which a row of the run is added, for
    `peakcast fit` and `peakcast evaluate --against`. `snapshot`: a file to which the allocator's history of the run is
    written, for `peakcast watch` and `peakcast replay`; recording it slows the run down. `refuse`: whether a run that
    surely does not fit is stopped with a DoesNotFitError; if it is None, the environment variable PEAKCAST_PREFLIGHT
    decides, and without that variable the user is only told. `say` is called with each line; by default
    the first rank prints it.

    Raises: DoesNotFitError; SpecError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    return Watch(job, gpu, append_to=append_to, snapshot=snapshot, refuse=refuse, say=say)


def trainer_callback(
    gpu: str | Device | None = None,
    *,
    append_to: str | Path | None = None,
    refuse: bool | None = None,
    say: Say | None = None,
) -> Any:
    """A callback for transformers' Trainer that predicts when the first batch is seen, before its step, and compares at the
    end. It reads the model's config, the TrainingArguments and the adapter by itself; its own errors are printed and never
    stop the run. The weights are already loaded at that time; to refuse a run before that, use `peakcast.preflight`.
    Parameters as for `watch`."""
    from peakcast.collectors.stacks.callback import TellingCallback

    return TellingCallback(_Listener(Watch(None, gpu, append_to=append_to, refuse=refuse, say=say)))


def lightning_callback(
    job: object,
    gpu: str | Device | None = None,
    *,
    append_to: str | Path | None = None,
    refuse: bool | None = None,
    say: Say | None = None,
) -> Any:
    """A callback for Lightning's Trainer: it predicts `job` when a fit is set up, before `configure_model` makes weights,
    and compares at the end. Parameters, and what it raises, are those of `watch`."""
    from peakcast.collectors.stacks.lightning_callback import telling_callback

    return telling_callback(_LightningListener(Watch(None, gpu, append_to=append_to, refuse=refuse, say=say), job))
