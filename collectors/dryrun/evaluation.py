"""Evaluation before and between training steps: it is counted as the script runs it, or left out."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peakcast.collectors.dryrun.noted import RunFindings, where
from peakcast.collectors.dryrun.repeated_forwards import RepeatedForwards
from peakcast.collectors.machine.imports import when_imported
from peakcast.collectors.tracing.tracer import Tracer
from peakcast.core.units import format_gib

CODE, PARAMETER = "script_part_skipped", "evaluation"
LATER = "the script evaluates after the steps that were followed, and what that takes is not counted."
TRAINER_STEP = 2
"""After this step transformers' Trainer evaluates, if it evaluates at all, so that the third step runs with what the
evaluation has left in memory."""
MOST_BATCHES = 8
"""Most batches of one evaluation of the Trainer."""


@dataclass
class _Evaluation:
    """An evaluation from one operation to another (None: it has not ended), with the place in the script where it began."""

    network: torch.nn.Module
    place: str
    start: int
    stop: int | None = None


class Evaluations:
    """Forwards of a network in evaluation mode and without gradients, and everything that runs until it trains again."""

    def __init__(self, tracer: Tracer, notes: RunFindings, *, skip: bool) -> None:
        self._tracer, self._notes, self._skip = tracer, notes, skip
        self.seen: list[_Evaluation] = []
        """Those of the run, in order."""
        self._lines: set[int] = set()
        """Lines of the script that have put a network into evaluation mode."""

    def install(self) -> None:
        """Change transformers' Trainer, which evaluates by itself and rarely within three steps, and note the script's
        lines that begin an evaluation."""
        module: Any = torch.nn.Module
        begin = module.eval

        def begin_from(network: Any) -> Any:
            caller = sys._getframe(1)
            if caller.f_code.co_filename.endswith(Path(sys.argv[0]).name):
                self._lines.add(caller.f_lineno)
            return begin(network)

        module.eval = begin_from
        when_imported("transformers.trainer", self._in_trainer)
        when_imported("transformers.trainer_callback", self._in_callbacks)

    def forward_begins(self, network: torch.nn.Module) -> bool:
        """Note that an outermost forward begins. Returns whether training goes on after an evaluation with it."""
        running = self.seen[-1] if self.seen and self.seen[-1].stop is None else None
        if _evaluates(network):
            if running is None:
                self.seen.append(_Evaluation(network, where(), self._tracer.now))
            self._run_few(network)
        if running is None or not torch.is_grad_enabled():
            return False
        running.stop = self._tracer.now
        return True

    def _run_few(self, network: torch.nn.Module) -> None:
        """Let only few of the network's forwards run in this evaluation, from the next one on."""
        forward = network.forward
        if not isinstance(forward, RepeatedForwards) and network._compiled_call_impl is None:
            RepeatedForwards(network, functools.partial(_evaluates, network), functools.partial(self._note_few, where()))

    def _note_few(self, place: str) -> None:
        self._notes.add(
            CODE,
            PARAMETER,
            f"of the forwards without gradients from {place} on, the first few and those of longer inputs ran; the others "
            "were taken to be like them.",
        )

    def awaited(self, network: torch.nn.Module, ended: int) -> bool:
        """Whether to go on with an outermost forward of `network` after enough steps: while an evaluation runs, and if no
        step has ended since the first one did, as scripts that warm up undo everything before it. `ended`: the operation
        at which the last step ended."""
        if self._skip or not self.seen:
            return False
        return _evaluates(network) or self._stop(self.seen[0]) >= ended

    def say_idle(self, steps: int) -> None:
        """Say that the network is not trained between the `steps` that were followed and the evaluation."""
        self._notes.add(
            CODE,
            PARAMETER,
            f"after {steps} steps the network's forward and backward were left out up to the script's evaluation; training "
            "steps there were taken to be like those before.",
        )

    @property
    def come_later(self) -> bool:
        """Whether the script has an evaluation that has not begun yet. A line that has run already, before the first step,
        is of a network that is not trained, such as a teacher."""
        if self._skip or self.seen:
            return False
        lines = enumerate(text_of_script().splitlines(), 1)
        return any(".eval()" in line and number not in self._lines for number, line in lines)

    def said(self, trained: set[int], end: int) -> tuple[str, ...]:
        """Sentences about what was counted, once everything has run. An evaluation that is to be skipped is removed from
        the tracer. `trained`: the `id`s of the parameters that optimizers have; `end`: that of the last step."""
        found = [one for one in self.seen if any(id(parameter) in trained for parameter in one.network.parameters())]
        if self.come_later:
            self._notes.add(CODE, PARAMETER, LATER, "more")
        if not found:
            return ()
        places = " and ".join(dict.fromkeys(one.place for one in found))
        if self._skip:
            for one in found:
                self._leave_out(one)
            self._notes.add(CODE, PARAMETER, f"the evaluation at {places} is left out, as --skip-evaluation asks.")
            return ()
        peak = self._tracer.timeline(0, end, self.fullest()).peak()
        if peak.instant >= end or any(one.start <= peak.instant < self._stop(one) for one in found):
            sentence = f"the peak is in the evaluation at {places}; how much training needs, --skip-evaluation says."
            self._notes.add("peak_in_evaluation", PARAMETER, sentence)
        most = max(self._tracer.timeline(one.start, self._stop(one)).peak().num_bytes for one in found)
        return (f"the evaluation at {places} counts, with {format_gib(most)} at most; --skip-evaluation leaves it out.",)

    def fullest(self) -> tuple[int, int] | None:
        """(first operation, end) of the evaluation with most bytes; None if none counts."""
        spans = [(one.start, self._stop(one)) for one in self.seen]
        if self._skip or not spans:
            return None
        return max(spans, key=lambda span: self._tracer.timeline(*span).peak().num_bytes)

    def _stop(self, one: _Evaluation) -> int:
        return self._tracer.now if one.stop is None else one.stop

    def _leave_out(self, one: _Evaluation) -> None:
        """Remove tensors that were made and freed during it from the tracer."""
        stop = self._stop(one)
        for number, storage in list(self._tracer._entries.items()):
            if one.start <= storage.born and storage.dies is not None and storage.dies <= stop:
                del self._tracer._entries[number]

    def _in_trainer(self, module: Any) -> None:
        trainer, notes, skip = module.Trainer, self._notes, self._skip
        evaluate, run = trainer._evaluate, trainer.evaluation_loop

        def evaluate_once(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if skip:
                notes.add(CODE, PARAMETER, "the Trainer's evaluation is left out, as --skip-evaluation asks.")
                return _Metrics()
            try:
                return evaluate(self, *arguments, **keywords)
            except Exception as error:  # from code after the required steps
                traceback.print_exc()
                notes.add(CODE, PARAMETER, f"the Trainer's evaluation cannot be followed ({error}), and is not counted.")
                return _Metrics()

        def run_few(self: Any, dataloader: Any, *arguments: Any, **keywords: Any) -> Any:
            few = _Few(dataloader)
            answer = run(self, few, *arguments, **keywords)
            if few.left_out and self.compute_metrics is not None and self.args.eval_accumulation_steps is None:
                notes.add(
                    CODE,
                    PARAMETER,
                    f"the Trainer gathers the predictions of a whole evaluation on the GPU, of which {MOST_BATCHES} "
                    "batches are counted; eval_accumulation_steps moves them to the host as they come.",
                    "more",
                )
            return answer

        trainer._evaluate, trainer.evaluation_loop = evaluate_once, run_few

    def _in_callbacks(self, module: Any) -> None:
        flow = module.DefaultFlowCallback
        end_step = flow.on_step_end

        def end_and_evaluate(self: Any, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
            control = end_step(self, args, state, control, **keywords)
            if state.global_step == TRAINER_STEP and str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
                control.should_evaluate = True
            return control

        flow.on_step_end = end_and_evaluate


def _evaluates(network: torch.nn.Module) -> bool:
    """Whether a forward of `network` would now be part of an evaluation; modules around it may be in training mode all the
    same."""
    return not torch.is_grad_enabled() and not all(part.training for part in network.modules())


def text_of_script() -> str:
    """The text of the program that was started; "" if it is in no file."""
    try:
        return Path(sys.argv[0]).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class _Few:
    """A data loader that yields only the first batches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.left_out = False

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._loader):
            if number == MOST_BATCHES:
                self.left_out = True
                return
            yield batch

    def __len__(self) -> int:
        return min(MOST_BATCHES, len(self._loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Metrics(dict[str, float]):
    """The results of an evaluation that did not run: 0 for every name."""

    def __missing__(self, name: str) -> float:
        return 0.0
