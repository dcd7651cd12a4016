"""Evaluation before and between training steps: counted as the script asks for it, or left out."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peakcast.collectors.dryrun.imports import when_imported
from peakcast.collectors.dryrun.lengths import NUM_STEPS
from peakcast.collectors.dryrun.noted import Notes, where
from peakcast.collectors.tracing.tracer import Tracer
from peakcast.units import format_gib

CODE, PARAMETER = "script_part_skipped", "evaluation"
TRAINER_STEP = 2
"""After this step the Trainer of transformers evaluates, if it ever does: the third step then meets what is left of it."""
MOST_BATCHES = 8
"""Of one evaluation of the Trainer."""


QUICK, MOST_STEPS, MOST_SECONDS = 10, 24, 30.0
"""For an evaluation that comes after the steps that are asked for, so many more are followed, as long as each takes less
than this part of those before, which compiled, and for so long at most."""


@dataclass
class _Evaluation:
    """What runs from one operation to another (None: it has not ended), begun at a place of the script."""

    network: torch.nn.Module
    place: str
    start: int
    stop: int | None = None


class Evaluations:
    """Forwards of a network in evaluation mode and without gradients, and what runs until it trains again."""

    def __init__(self, tracer: Tracer, notes: Notes, *, skip: bool) -> None:
        self._tracer, self._notes, self._skip = tracer, notes, skip
        self._seen: list[_Evaluation] = []

    def install(self) -> None:
        """For the Trainer of transformers, which evaluates by itself, and rarely within three steps."""
        when_imported("transformers.trainer", self._in_trainer)
        when_imported("transformers.trainer_callback", self._in_callbacks)

    def forward_begins(self, network: torch.nn.Module) -> bool:
        """An outermost forward: whether training goes on after an evaluation with it."""
        running = self._seen[-1] if self._seen and self._seen[-1].stop is None else None
        if _evaluates(network) and running is None:
            self._seen.append(_Evaluation(network, where(), self._tracer.now))
        if running is None or not torch.is_grad_enabled():
            return False
        running.stop = self._tracer.now
        return True

    def awaited(self, network: torch.nn.Module, steps: Sequence[float], ended: int) -> bool:
        """Whether to go on with an outermost forward of `network` after enough steps: an evaluation runs; no step has ended
        since the first one did (scripts that warm up set everything back before it); or the script has one that has not
        come yet, and steps are quick now that all is compiled. `steps`: when the script began, and when each step has
        ended, in seconds. `ended`: the operation at which the last one did."""
        if self._skip:
            return False
        if self._seen:
            return _evaluates(network) or self._stop(self._seen[0]) >= ended
        before, step, beyond = steps[NUM_STEPS] - steps[0], steps[-1] - steps[-2], steps[-1] - steps[NUM_STEPS]
        quick = QUICK * step < before and beyond < min(before, MOST_SECONDS) and len(steps) <= NUM_STEPS + MOST_STEPS
        return quick and ".eval()" in _text_of_script()

    def said(self, trained: set[int]) -> tuple[str, ...]:
        """What was counted, once everything has run; what is to be skipped is taken out of the tracer. `trained`: the `id`s
        of the parameters that optimizers have."""
        found = [one for one in self._seen if any(id(parameter) in trained for parameter in one.network.parameters())]
        if not found:
            return ()
        places = " and ".join(dict.fromkeys(one.place for one in found))
        if self._skip:
            for one in found:
                self._leave_out(one)
            self._notes.add(CODE, PARAMETER, f"the evaluation at {places} is left out, as --skip-evaluation asks.")
            return ()
        most = max(self._tracer.timeline(one.start, self._stop(one)).peak().num_bytes for one in found)
        return (f"the evaluation at {places} counts, with {format_gib(most)} at most; --skip-evaluation leaves it out.",)

    def fullest(self) -> tuple[int, int] | None:
        """From and to which operations the one went that had most tensors; None where none counts."""
        spans = [(one.start, self._stop(one)) for one in self._seen]
        if self._skip or not spans:
            return None
        return max(spans, key=lambda span: self._tracer.timeline(*span).peak().num_bytes)

    def _stop(self, one: _Evaluation) -> int:
        return self._tracer.now if one.stop is None else one.stop

    def _leave_out(self, one: _Evaluation) -> None:
        """Tensors that came and went with it have never been."""
        stop = self._stop(one)
        for number, (_, _, born, dies, _) in list(self._tracer._entries.items()):
            if one.start <= born and dies is not None and dies <= stop:
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
            except Exception as error:  # of what comes later than the steps that are asked for
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
    """Whether a forward of it now is one of an evaluation; what wraps a network may be in training mode all the same."""
    return not torch.is_grad_enabled() and not all(part.training for part in network.modules())


def _text_of_script() -> str:
    try:
        return Path(sys.argv[0]).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class _Few:
    """A data loader of which the first batches come."""

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
    """What an evaluation that did not run has found: 0 of whatever is asked for."""

    def __missing__(self, name: str) -> float:
        return 0.0
