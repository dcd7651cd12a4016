"""One dry run in this process, which it changes permanently: it follows the script and writes the answer."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from peakcast import catalog
from peakcast.catalog import Device
from peakcast.collectors.dryrun.file_overlay import Overlay
from peakcast.timelines.files import timeline_to_mapping

if TYPE_CHECKING:
    import torch

    from peakcast.collectors.dryrun.steps import ScriptSteps
    from peakcast.collectors.tracing.tracer import Tracer
    from peakcast.timelines.timeline import Timeline

ANSWERED, CRASHED, NEVER_STEPPED = 0, 10, 11
"""Exit codes of the process: it answered, the script raised an error, the script ended before an optimizer stepped."""
SAYS_SECONDS = 1.0
"""So long before its time is up, a run prints where it is."""


class Session:
    """One dry run with its `question`, the steps that it follows, and its answer."""

    def __init__(self, question: Mapping[str, Any], overlay: Overlay) -> None:
        self.question = question
        self.overlay = overlay
        self.answer_file = Path(question["answer"])
        self.error = ""
        """The error that ended the script after enough of it was followed."""

    def run(self, program: Callable[[], object]) -> NoReturn:
        """Run `program`, and end the process with its answer or its failure."""
        import torch

        from peakcast.collectors.dryrun import dispatch_mode, lazy_modules
        from peakcast.collectors.dryrun.noted import RunFindings
        from peakcast.collectors.tracing import inductor

        asked = self.question
        device = catalog.gpu(asked["gpu"])
        self.notes, tracer = RunFindings(), self.tracer(device)
        own = torch.device("cuda", asked["rank"] % asked["ranks_per_node"])
        if (left := asked.get("until", 0.0) - time.monotonic() - SAYS_SECONDS) > 0:
            faulthandler.dump_traceback_later(left)
        self._stand_in_for_gpus(device, own, tracer)
        self._stand_in_for_files()
        self._stand_in_for_ranks(device, tracer)
        self._stand_in_for_programs()
        mode = self.mode = dispatch_mode.ScriptMode(self.notes, own)
        self.steps = self._follower(tracer)
        self.steps.follow()
        dispatch_mode.install(mode)
        lazy_modules.install(mode)
        with inductor.when_asked(tracer), mode, tracer, torch.autograd.set_multithreading_enabled(False):
            code = self._run(program)
        self.steps.close()
        if self.steps.spans and (code == ANSWERED or self._has_enough()):
            self.finish()
        end(code or (ANSWERED if asked.get("is_child") else NEVER_STEPPED))

    def _stand_in_for_gpus(self, device: Device, own: torch.device, tracer: Tracer) -> None:
        """Let the process see a node of GPUs of type `device`, whose own one is `own`."""
        from peakcast.collectors.dryrun import default_types, gpu, node, programs
        from peakcast.collectors.dryrun.peaks import Peaks

        num_gpus = self.question["ranks_per_node"]
        self.peaks = Peaks(tracer)
        gpu.install(device, num_gpus, own, self.peaks)
        default_types.install()
        programs.install(Path(self.question["folder"]), device, gpu.name_of(device), num_gpus)
        node.install(device, gpu.name_of(device), num_gpus, self.peaks)

    def _stand_in_for_files(self) -> None:
        """Give the script files that this machine lacks: data, tokenizers, packages; shorten the reading of large ones."""
        from peakcast.collectors.dryrun import absent_packages, byte_pieces, byte_tokenizers, checked_files, token_files
        from peakcast.collectors.dryrun.downloads import Downloads
        from peakcast.collectors.dryrun.lengths import of_rows

        files = token_files.TokenFiles(self.overlay, self.notes, of_rows(self.question["lengths"]))
        files.install()
        checked_files.install(files.stand_in)
        Downloads(self.notes, of_rows(self.question["lengths"])).install()
        byte_tokenizers.install(self.notes)
        byte_pieces.install(self.notes)
        absent_packages.AbsentPackages(self.notes).install()

    def _stand_in_for_ranks(self, device: Device, tracer: Tracer) -> None:
        """Let torch run on fake tensors, as the release that is asked for, and be one rank of several."""
        from peakcast.collectors.dryrun import older_torch, ranks
        from peakcast.collectors.dryrun.kept_by_nccl import KeptByNccl
        from peakcast.collectors.dryrun.pipelines import StageShapes
        from peakcast.collectors.tracing import patches

        asked = self.question
        patches.install()
        older_torch.install(asked.get("torch"))
        ranks.install(asked["rank"], asked["world_size"], tracer.name, launched=bool(asked["launched"]))
        self.kept = KeptByNccl(tracer, device)
        self.kept.install(asked.get("torch"))
        StageShapes(asked).install()

    def _stand_in_for_programs(self) -> None:
        """Replace what the script would start or load: other programs, its children, kernels, pretrained weights."""
        from peakcast.collectors.dryrun import (
            generation,
            graphs,
            lightning_launch,
            litgpt_checkpoints,
            outside,
            pretrained,
            programs,
            rewards,
        )
        from peakcast.collectors.dryrun.children import Children
        from peakcast.collectors.dryrun.kernel_packages import KernelPackages
        from peakcast.collectors.dryrun.lengths import of_rows
        from peakcast.collectors.dryrun.rank_counts import RankCounts

        outside.install(self.notes)
        generation.install(self.notes)
        rewards.install(self.notes)
        graphs.install(self.notes, lambda: self.steps.replayed())
        Children(self.question).install()
        programs.install_python(self.question)
        RankCounts(self.question, self.notes).install()
        lightning_launch.install(self.question)
        litgpt_checkpoints.install(self.notes, Path(self.question["folder"]))
        KernelPackages(self.notes).install()
        pretrained.Stand(self.notes, of_rows(self.question["lengths"])).install()

    def _follower(self, tracer: Tracer) -> ScriptSteps:
        """The follower of the script's steps and of its evaluation, with the lengths of its data and a limit of time."""
        from peakcast.collectors.dryrun.evaluation import Evaluations
        from peakcast.collectors.dryrun.lengths import StepLengths
        from peakcast.collectors.dryrun.patience import Patience

        asked = self.question
        lengths = StepLengths(asked["lengths"] if asked["lengths_change"] else None)
        evaluations = Evaluations(tracer, self.notes, skip=asked["skip_evaluation"])
        evaluations.install()
        patience = Patience(asked["seconds"], lambda: self.kept.settled)
        return self.follow(tracer, self.finish, lengths, evaluations, patience)

    def _run(self, program: Callable[[], object]) -> int:
        try:
            program()
        except SystemExit as error:
            if isinstance(error.code, str):  # as the interpreter does
                print(error.code, file=sys.stderr)
            return CRASHED if error.code not in (None, 0) else ANSWERED
        except KeyboardInterrupt:
            end(130)
        except BaseException as error:
            self.failed(error)
            if self._has_enough():
                self.error = f"{type(error).__name__}: {error}"
                self.finish()
            return CRASHED
        return ANSWERED

    def _has_enough(self) -> bool:
        """Whether enough was followed, and only idle steps, whose loop may need the gradients that they lack, or later ones
        are to come."""
        return self.steps.idle.began or (self.steps.later is not None and self.steps.later.began)

    def tracer(self, device: Device) -> Tracer:
        """The tracer of what is allocated on `device`."""
        from peakcast.collectors.tracing.tracer import Tracer

        tracer = Tracer()
        tracer.gpu = device
        return tracer

    def follow(self, *parts: Any) -> ScriptSteps:
        """The follower of the script's steps, made from `parts`."""
        from peakcast.collectors.dryrun.later_steps import LaterSteps
        from peakcast.collectors.dryrun.steps import ScriptSteps

        steps = ScriptSteps(*parts)
        if not self.question["lengths_change"]:
            steps.later = LaterSteps(steps, self.notes, self.finish, self.question["seconds"])
        return steps

    def failed(self, error: BaseException) -> None:
        """Report that the script has raised an error."""
        from peakcast.collectors.dryrun.failures import report
        from peakcast.collectors.dryrun.pretrained import STOOD_IN

        for finding in self.notes.findings:
            if STOOD_IN in finding.sentence:
                print(f"peakcast: {finding.sentence}", file=sys.stderr)
        print(report(error), file=sys.stderr, end="")

    def finish(self) -> NoReturn:
        """Write the answer and end the process, wherever the script is."""
        from torch.utils._python_dispatch import _disable_current_modes

        from peakcast.collectors.dryrun.described import described
        from peakcast.collectors.dryrun.evaluation import text_of_script
        from peakcast.collectors.dryrun.older_torch import say

        later = self.steps.later.said(self.error) if self.steps.later is not None else ()
        self.steps.tokens = self.steps.tokens or self.mode.batch
        with _disable_current_modes():
            seen = described(self.steps, self.question)
            evaluated = self.steps.evaluated()
            timelines = self.steps.timelines()
            self._without_kept(timelines)
            peaks = self.peaks.said(self.steps.spans[-1][1])
        self._say_what_comes_later()
        if {"mode": "none"} in self.steps.checkpointing.values():
            sentence = (
                "gradient checkpointing is on, but the network is in evaluation mode, as from_pretrained leaves it, in "
                "which transformers recomputes nothing; call model.train() before the loop."
            )
            self.notes.add("recomputation_off", "activation_checkpointing", sentence)
        under = {"autocast": self.steps.autocast is not None, "compiled": self.steps.tracer.compiled}
        say(self.notes, self.question.get("torch"), text_of_script(), **under)
        answer = {
            "timelines": {name: timeline_to_mapping(timeline) for name, timeline in timelines.items()},
            "job": seen.job,
            "unsaid": [*seen.unsaid],
            "assumptions": [*evaluated, *peaks, *later],
            "evaluated": bool(evaluated),
            "compiled": self.steps.tracer.compiled,
            "findings": [finding.to_mapping() for finding in self.notes.findings],
            "steps": len(self.steps.spans),
        }
        self.write(answer)
        end(ANSWERED)

    def _say_what_comes_later(self) -> None:
        """Note what steps after those that were followed may need more for."""
        from peakcast.collectors.dryrun.lengths import growth

        led = self.steps.later is not None and self.steps.later.counts
        if not led and (remark := self.steps.lengths.remark()):
            self.notes.add("script_part_skipped", "lengths", remark)
        if interrupted := self.steps.patience.interrupted:
            sentence = f"{interrupted}: what comes later, such as larger batches, is not counted."
            self.notes.add("steps_not_followed", "timeout_seconds", sentence, "more")
        if not led and (grown := growth(self.steps.batches)):
            self.notes.add("steps_not_followed", "lengths", grown, "more")

    def _without_kept(self, timelines: dict[str, Timeline]) -> None:
        """Add the run without what NCCL keeps, if it keeps anything, and say how much that is."""
        if self.kept.keeps:
            timelines["let_go"] = self.steps.run(kept=False)
            more = timelines["run"].peak().num_bytes - timelines["let_go"].peak().num_bytes
            self.kept.say(self.notes, [end for _, end in self.steps.spans], more)

    def write(self, answer: Mapping[str, Any]) -> None:
        """Write the answer's file, which appears only when it is complete."""
        written = self.answer_file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(answer), encoding="utf-8")
        written.replace(self.answer_file)


def end(code: int) -> NoReturn:
    """End this process, with everything that runs in it."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
