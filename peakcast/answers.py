"""One question answered: the prediction for its job, and what reading the question took for granted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from peakcast.dialects.translation import Translation
from peakcast.errors import SpecError
from peakcast.questions import Question
from peakcast.readings import with_others

if TYPE_CHECKING:
    from peakcast.models.calibration import Calibration
    from peakcast.prediction import Answer, Prediction

UNSUPPORTED_SEVERITY = 2
UNKNOWN_SEVERITY = 1
"""How much bars widen for each thing a configuration asks for that a job cannot say, and for each key nobody here knows.
Severities are those of `models.domain`."""


def answer(asked: Question, calibration: Calibration | str | Path | None = None) -> Prediction:
    """The prediction for a question that was read already."""
    from dataclasses import replace

    from peakcast.models.calibration import load_calibration
    from peakcast.models.predict import predict as predict_job
    from peakcast.models.widening import widened

    if isinstance(calibration, (str, Path)):
        calibration = load_calibration(Path(calibration))
    try:
        prediction = predict_job(asked.job, asked.device, asked.rank, calibration)
    except NotImplementedError as error:
        raise SpecError(f"this job cannot be answered: {error}", parameter="job") from error
    notes = asked.translation
    prediction = replace(
        prediction,
        assumptions=tuple(dict.fromkeys((*notes.assumptions, *prediction.assumptions))),
        warnings=tuple(dict.fromkeys((*notes.warnings, *notes.unsupported, *prediction.warnings))),
    )
    prediction = widened(prediction, severity_of(notes))
    return with_others(prediction, notes.others, lambda job: predict_job(job, asked.device, asked.rank, calibration))


def full_answer(
    asked: Question, calibration: Calibration | str | Path | None = None, *, all_ranks: bool = False
) -> Answer:
    """`answer` with what one asks next: which GPU types would fit, what to try first, what is not modelled, every rank."""
    from dataclasses import replace

    from peakcast.explaining import outlook
    from peakcast.explaining.advice import first_to_try
    from peakcast.prediction import Answer

    prediction = answer(asked, calibration)
    gpus = outlook.gpu_verdicts(asked.job, asked.device, asked.rank, severity_of(asked.translation))
    return Answer(
        **vars(prediction),
        gpus=tuple(replace(item, fits=prediction.fits) if item.gpu == prediction.gpu else item for item in gpus),
        first_to_try=first_to_try(asked.job, asked.device, prediction.rank),
        not_modelled=outlook.not_modelled(asked.job),
        ranks=tuple(
            outlook.rank_peak(stage, answer(replace(asked, rank=stage.rank), calibration))
            for stage in (outlook.stages(asked.job) if all_ranks else ())
        ),
    )


def severity_of(notes: Translation) -> int:
    """How far outside of what a job can say a configuration lies."""
    return UNSUPPORTED_SEVERITY * len(notes.unsupported) + UNKNOWN_SEVERITY * len(notes.unknown)
