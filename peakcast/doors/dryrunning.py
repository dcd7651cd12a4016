"""The implementation of `api.dryrun`: runs a user's training script on fake tensors, then gives an answer like
`predict`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast import catalog
from peakcast.catalog import Device
from peakcast.core.errors import PeakcastError, SpecError
from peakcast.core.extras import need
from peakcast.core.findings import Finding, ordered
from peakcast.core.units import GIB, KIB
from peakcast.core.versions import release
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.dialects.common.translation import Translation
from peakcast.doors.questions import Question, on_node
from peakcast.jobs.micro_batch import MOST_TOKENS
from peakcast.jobs.spec import TrainingJob
from peakcast.timelines.timeline import Timeline

if TYPE_CHECKING:
    from peakcast.answers.advised import Advice
    from peakcast.answers.prediction import Answer
    from peakcast.collectors.dryrun.command import TrainingCommand
    from peakcast.collectors.dryrun.process import RankReport
    from peakcast.doors.recipe_files import RecipeFile
    from peakcast.doors.saved_recipes import Walks
    from peakcast.models.calibration.calibration import Calibration

TIMEOUT_SECONDS = 600.0
ADVISED = 0.01
"""How far the ledger's peak of the job that was seen may be from the script's, as a fraction, for advice to be given."""
DESCRIBED = 0.02
"""How far these two may differ before the answer says that the job is not all that the script does."""
MEMORY_SHARE = 0.8
"""Fraction of the machine's free memory that the script may use by default."""


@dataclass(frozen=True, kw_only=True)
class Dryrun:
    """The result of a dry run: the answer, the job that the script turned out to run, and the timelines of its rank."""

    answer: Answer
    job: TrainingJob
    timelines: Mapping[str, Timeline]
    command: tuple[str, ...]
    steps: int
    seconds: float
    kept: RecipeFile | None = None
    """The recipe that was saved, if one was asked for."""
    not_kept: str = ""
    """Why no recipe was saved."""

    @property
    def fits(self) -> str:
        """The answer's verdict."""
        return self.answer.fits

    def to_mapping(self) -> dict[str, Any]:
        """The answer's mapping, and what was run."""
        from peakcast.jobs.spec import job_to_mapping

        ran = {"command": list(self.command), "steps": self.steps, "seconds": round(self.seconds, 1)}
        return {**self.answer.to_mapping(), "dryrun": {**ran, "job": job_to_mapping(self.job)}}


def dryrun(
    command: Sequence[str] | Callable[[], object],
    gpu: str | Device,
    rank: int | None = None,
    world_size: int | None = None,
    calibration: Calibration | str | Path | None = None,
    *,
    length: int | None = None,
    lengths: tuple[int, int] | None = None,
    skip_evaluation: bool = False,
    torch: str | None = None,
    save_recipe: str | Path | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    memory_gib: float | None = None,
    progress: Callable[[str], None] | None = None,
    output: Callable[[str], None] | None = None,
) -> Dryrun:
    """Run `command` on fake CUDA tensors until its third optimizer step has ended. Returns the four peaks of its `rank` on
    `gpu`, in bytes, with error bars, as `predict` gives them for traces.

    `command`: the words of a training command (["torchrun", "--nproc-per-node", "8", "train.py"]), or a function without
    arguments that trains, a copy of which runs in another process. `rank`: 0 by default; `world_size`: if no launcher says
    it. `length`: tokens of synthetic rows for data that cannot be downloaded; `lengths`: tokens of the shortest and the
    longest of these, if they are to change from step to step. `skip_evaluation`: evaluation does not count. `torch`: the
    release that the run will have, if it is older than the one here; known differences are followed. `save_recipe`:
    a file in which the recorded network is saved, if the recipe gives the script's own peak; `predict` accepts it as
    `recipe`. `timeout_seconds` and `memory_gib` (of the host) limit the script; `progress` is called with what is being
    done, `output` with what the script prints.
    Raises: SpecError or CatalogError for an impossible question, ScriptError with the script's last lines when it fails,
    MissingPackageError without torch.
    """
    need("a dry run", "torch", *(["cloudpickle"] if callable(command) else []))
    from peakcast.collectors.dryrun.process import DryRunLimits, DryRunQuestion, run
    from peakcast.collectors.dryrun.walks import script_walks

    device = on_node(gpu if isinstance(gpu, Device) else catalog.gpu(gpu), None, None)
    asked = _asked(command, world_size, device)
    number = _rank(rank, asked.world_size)
    if torch is not None and not release(torch):
        raise SpecError(f"torch={torch!r} must be a release of torch, such as 2.10.", parameter="torch", value=torch)
    limits = DryRunLimits(seconds=timeout_seconds, memory_bytes=_memory_bytes(memory_gib))
    rows = _lengths(length, lengths)
    question = DryRunQuestion(
        gpu=device.name, rank=number, limits=limits, lengths=rows, skip_evaluation=skip_evaluation, torch=torch
    )
    say = progress or (lambda message: None)
    ranks = f"rank {number} of {asked.world_size:,}" if asked.world_size > 1 else "one rank"
    say(f"running {asked.script} as {ranks} on a fake {device.name}, until its third optimizer step has ended")
    seen = run(asked, question, output)
    say(f"{seen.steps} steps seen in {seen.seconds:.1f} s; replaying them through the allocator")
    job = job_from_mapping(seen.job)
    found = Dryrun(
        answer=answered(job, device, number, seen, calibration),
        job=job,
        timelines=seen.timelines,
        command=(asked.script,) if callable(command) else tuple(map(str, command)),
        steps=seen.steps,
        seconds=seen.seconds,
    )
    if save_recipe is None:
        return found
    walks = partial(script_walks, asked, question, (job.micro_batch_size, job.sequence_length))
    return _with_recipe(found, Path(save_recipe), device, number, walks, progress)


def _asked(command: Sequence[str] | Callable[[], object], world_size: int | None, device: Device) -> TrainingCommand:
    """The command or function to run, as `world_size` ranks on nodes of `device` if its launcher does not say how many."""
    from peakcast.collectors.dryrun.command import TrainingCommand, read_command
    from peakcast.collectors.dryrun.sent_functions import name_of

    if callable(command):
        asked = TrainingCommand(script=name_of(command), function=command)
    else:
        asked = read_command([str(word) for word in command])
    if world_size is None:
        return asked
    per_node = asked.ranks_per_node if asked.world_size > 1 else device.gpus_per_node
    return replace(asked, world_size=world_size, ranks_per_node=min(per_node, world_size), launched=True)


def _with_recipe(
    found: Dryrun,
    path: Path,
    device: Device,
    rank: int,
    walks: Callable[[], AbstractContextManager[Walks]],
    progress: Callable[[str], None] | None,
) -> Dryrun:
    from peakcast.doors.saved_recipes import DryrunStep, save_recipes

    try:
        command, steady = shlex.join(found.command), found.timelines["steady"]
        seen = DryrunStep(command=command, job=found.job, steady=steady, device=device, rank=rank)
        kept = save_recipes(path, seen, walks, progress)
    except PeakcastError as error:
        return replace(found, not_kept=error.message)
    return replace(found, kept=kept)


def answered(
    job: TrainingJob, device: Device, rank: int, seen: RankReport, calibration: Calibration | str | Path | None = None
) -> Answer:
    """The answer that `predict --baseline trace` gives, from timelines that were recorded already."""
    from peakcast.doors.answering import answer_from_trace
    from peakcast.models.recipes.baseline_choice import SeenRun

    question = Question(translation=Translation(job=job, findings=seen.findings), device=device, rank=rank)
    differs = _differs(job, device, rank, seen)
    timelines = dict(seen.timelines)
    run = SeenRun(timelines["run"], seen.compiled, timelines.get("let_go"))
    found = answer_from_trace(question, lambda *_: timelines, calibration, run)
    return replace(
        found,
        assumptions=(*_said(seen), *found.assumptions),
        advise=partial(_advice, job, device, rank, differs, found.peak_allocated_bytes.point),
        not_modelled=tuple(gap.removeprefix("evaluation, " if seen.evaluated else "") for gap in found.not_modelled),
        found=ordered((*found.found, *_few_steps(seen), *_not_the_run(differs, seen.unsaid))),
    )


def _differs(job: TrainingJob, device: Device, rank: int, seen: RankReport) -> float | None:
    """The ledger's peak of `job` divided by that of the script's steady step, minus one; None if the ledger has none."""
    from peakcast.doors.saved_recipes import UNDESCRIBED
    from peakcast.models.baseline.ledger import ledger
    from peakcast.models.ledger.scope.scope import out_of_scope

    if job.architecture.model_type == UNDESCRIBED:
        return None
    with suppress(PeakcastError, NotImplementedError):
        if not out_of_scope(job):
            own = ledger(job, device=device, rank=rank, step="steady").peak().num_bytes
            return own / seen.timelines["steady"].peak().num_bytes - 1
    return None


def _advice(job: TrainingJob, device: Device, rank: int, differs: float | None, peak_bytes: int) -> tuple[Advice, ...]:
    """The advice that `predict` gives for `job`, if its own peak equals the script's, counted from the script's
    `peak_bytes`. Empty if the script does something else, or trains a network that is not from transformers."""
    from peakcast.answers.advised import counted_from
    from peakcast.explaining.advice import first_to_try

    if differs is None or abs(differs) > ADVISED:
        return ()
    with suppress(PeakcastError, NotImplementedError):
        return counted_from(first_to_try(job, device, rank), peak_bytes)
    return ()


def _not_the_run(differs: float | None, unsaid: tuple[str, ...]) -> tuple[Finding, ...]:
    """What to know before asking `predict` about the job that was seen, which leaves `unsaid` what it cannot say."""
    if differs is None or abs(differs) <= DESCRIBED:
        return ()
    sentence = (
        f"the script does something that a job cannot say: predict expects {abs(differs):.0%} "
        f"{'more' if differs > 0 else 'less'} for the job of this answer, whose own numbers are those of the script"
        f"{': ' if unsaid else ''}{'; '.join(unsaid)}."
    )
    return (Finding("job_differs", "command", "either", sentence),)


def _said(seen: RankReport) -> tuple[str, ...]:
    release = seen.job.get("versions", {}).get("torch", "")
    under = f" under torch {release}, the release here" if release else ""
    own = (*(f"its job does not say that {one}." for one in seen.unsaid), *seen.assumptions)
    said = (*own, f"tensors are those of the script{under}; the values of tensors on the GPU were not known.")
    lengths = seen.job.get("batch", {}).get("shortest_sequence")
    if lengths is None:
        return said
    return (
        *said,
        f"the {seen.steps} steps that were seen are replayed in turn, whose longest sequences have {lengths:,} to "
        f"{seen.job['sequence_length']:,} tokens; tensors are those of the fullest step.",
    )


def _few_steps(seen: RankReport) -> tuple[Finding, ...]:
    if seen.steps >= 2:
        return ()
    sentence = "the script ended after one optimizer step: the steady step is treated as the first one."
    return (Finding("script_part_skipped", "command", "either", sentence),)


def _lengths(length: int | None, lengths: tuple[int, int] | None) -> tuple[int, int] | None:
    """Tokens of the shortest and of the longest row; None if neither argument is given."""
    if length is not None and lengths is not None:
        raise SpecError("length and lengths contradict each other; give one of them.", parameter="lengths", value=lengths)
    shortest, longest = lengths or (length, length)
    if shortest is None or longest is None:
        return None
    if not 1 <= shortest <= longest <= MOST_TOKENS:
        raise SpecError(
            f"lengths={shortest}..{longest} must be the tokens of the shortest and the longest row, from 1 to "
            f"{MOST_TOKENS:,}; give such as 128..4096.",
            parameter="lengths",
            value=lengths,
        )
    return shortest, longest


def _rank(rank: int | None, world_size: int) -> int:
    if rank is None:
        return 0
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise SpecError(
            f"rank={rank!r} must be from 0 to {world_size - 1}, the ranks of this command; give a larger --world-size.",
            parameter="rank",
            value=rank,
        )
    return rank


def _memory_bytes(memory_gib: float | None) -> int:
    if memory_gib is not None:
        if not 1 <= memory_gib <= 2**20:
            raise SpecError(
                f"memory_gib={memory_gib!r} must be at least 1, what importing torch takes.", parameter="memory_gib"
            )
        return int(memory_gib * GIB)
    return int(MEMORY_SHARE * _free_bytes())


def _free_bytes() -> int:
    """Memory of this machine that programs can get: what is free, and what the cache of files would give back."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return KIB * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with suppress(ValueError, OSError, AttributeError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    return 20 * GIB
