"""The answer to one question: the prediction for its job, with the assumptions made in reading the question."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from peakcast.core.errors import CollectorError, SpecError
from peakcast.doors.questions import Question
from peakcast.doors.readings import with_others
from peakcast.doors.recording import ensure_recipe, only_a_trace_has, timelines_from
from peakcast.models.recipes.baseline_choice import SeenRun, Trace, baseline_from
from peakcast.models.recipes.shelf import wants_recipe

if TYPE_CHECKING:
    from peakcast.answers.advised import Advice
    from peakcast.answers.prediction import Answer, GpuVerdict, Prediction
    from peakcast.jobs.spec import TrainingJob
    from peakcast.models.calibration.calibration import Calibration

LONGEST_TRACE_SECONDS = 300.0
"""Longest that an answer waits for a trace nobody asked for: as long as for a recording."""


def answer(asked: Question, calibration: Calibration | str | Path | None = None) -> Prediction:
    """The prediction for a question that has been read."""
    from peakcast.models.calibration.calibration import load_calibration
    from peakcast.models.prediction.predict import predict as predict_job

    if isinstance(calibration, (str, Path)):
        calibration = load_calibration(Path(calibration))
    try:
        prediction = predict_job(asked.job, asked.device, asked.rank, calibration, findings=asked.translation.findings)
    except NotImplementedError as error:
        raise SpecError(f"this job cannot be answered: {error}", parameter="job") from error
    assumptions = (*asked.translation.assumptions, *prediction.assumptions)
    prediction = replace(prediction, assumptions=tuple(dict.fromkeys(assumptions)))
    others = asked.translation.others
    return with_others(prediction, others, lambda job: predict_job(job, asked.device, asked.rank, calibration))


def full_answer(
    asked: Question,
    calibration: Calibration | str | Path | None = None,
    *,
    all_ranks: bool = False,
    baseline: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> Answer:
    """`answer` with further answers: which GPU types would fit and what to try first (both computed when they are read),
    what is not modelled, and every rank. `baseline` and `progress` as in `api.predict`."""
    with timelines_from(baseline):
        ensure_recipe(asked.job, progress)
        traces = baseline == "auto" and only_a_trace_has(asked.job)
    if traces and progress:
        progress(f"tracing {asked.job.architecture.name} without a GPU, of which no recipe can be made; this takes minutes")
    if traces:  # else, or where that fails, the nearest guess and the reason why there is no recipe
        with suppress(CollectorError), timelines_from("trace", LONGEST_TRACE_SECONDS):
            return _full_answer(asked, calibration, all_ranks=all_ranks, advises=False)
    with timelines_from(baseline):
        return _full_answer(asked, calibration, all_ranks=all_ranks, advises=baseline != "trace")


def answer_from_trace(
    asked: Question,
    trace: Trace,
    calibration: Calibration | str | Path | None = None,
    run: SeenRun | None = None,
) -> Answer:
    """`full_answer` with `baseline` "trace", from timelines in `trace`, and from the whole `run` if that was seen."""
    with baseline_from("trace", trace, run):
        return _full_answer(asked, calibration, all_ranks=False, advises=False)


def _full_answer(
    asked: Question, calibration: Calibration | str | Path | None, *, all_ranks: bool, advises: bool
) -> Answer:
    from peakcast.answers.prediction import Answer
    from peakcast.explaining.outlook import not_modelled, rank_peak, stages

    prediction = answer(asked, calibration)
    here = copy_context()  # answers that are computed later use the timelines chosen now
    return Answer(
        **vars(prediction),
        job=asked.job,
        compare_gpus=partial(here.run, _gpus, asked, prediction),
        advise=partial(here.run, _advice, asked, prediction) if advises else tuple,
        not_modelled=not_modelled(asked.job),
        remarks=_remarks(asked, prediction),
        ranks=tuple(
            rank_peak(stage, answer(replace(asked, rank=stage.rank), calibration))
            for stage in (stages(asked.job) if all_ranks else ())
        ),
    )


def _remarks(asked: Question, prediction: Prediction) -> tuple[str, ...]:
    if wants_recipe(asked.job):
        return _changes_without_number(asked.job) if prediction.fits != "yes" else ()
    if asked.job.task != "inference" or asked.job.architecture.kind != "decoder" or not prediction.is_covered:
        return ()
    from peakcast.explaining.key_value_cache import cache_sentences

    return cache_sentences(asked.job, asked.device, prediction)


def _changes_without_number(job: TrainingJob) -> tuple[str, ...]:
    from peakcast.explaining.uncompared import uncompared

    found = []
    for candidate in uncompared(job):
        settings = " ".join(f"--set {path}={str(value).lower()}" for path, value in candidate.changes(job).items())
        found.append(f"{candidate.sentence[0].lower()}{candidate.sentence[1:]} ({settings})")
    return (f"Not compared, since each is recorded only when it is asked for: {'; '.join(found)}.",) if found else ()


def _gpus(asked: Question, prediction: Prediction) -> tuple[GpuVerdict, ...]:
    from peakcast.explaining.outlook import gpu_verdicts

    found = gpu_verdicts(asked.job, asked.device, asked.rank, asked.translation.findings)
    return tuple(replace(item, fits=prediction.fits) if item.gpu == prediction.gpu else item for item in found)


def _advice(asked: Question, prediction: Prediction) -> tuple[Advice, ...]:
    from peakcast.answers.advised import counted_from
    from peakcast.explaining.advice import first_to_try

    steps = first_to_try(asked.job, asked.device, prediction.rank)
    return counted_from(steps, prediction.peak_allocated_bytes.point)
