"""Answers a table of jobs row by row: what the registered model does, without MLflow.

A row is a job, either as JSON in the column `job`, in any form that a job file may have, or spread over columns named by
the paths of its fields (`architecture`, `sequence_length`, `parallelism.tensor_parallel_size`, ...). Empty cells mean
defaults, but a column that is empty in every row is refused, since NaN in a request looks the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from peakcast.answers.prediction import QUANTITIES
from peakcast.core.bounded import json_value
from peakcast.core.deadline import TimeIsUp, limited
from peakcast.core.errors import PeakcastError, SpecError, near_misses
from peakcast.models.calibration.calibration import Calibration

JOB = "job"
PREDICTED_PARTS = ("baseline", "point", "lower", "upper", "upper_95")
MAX_JOB_CHARACTERS = 1_000_000
"""A longer text is not a job; it is refused before it is parsed."""
MAX_ROWS = 1_000
"""Rows of one request."""
REQUEST_SECONDS = 45.0
"""Time for one request. MLflow's server gives up after 60 s, and the computation would continue for nobody."""


@cache
def job_columns() -> tuple[str, ...]:
    """The columns over which a job can be spread: every field's path; the architecture as a name or a mapping."""
    from peakcast import catalog
    from peakcast.jobs.spec import TrainingJob, job_to_mapping

    example = job_to_mapping(TrainingJob(architecture=catalog.architecture(catalog.architecture_names()[0])))
    found = []
    for name, value in example.items():
        nested = isinstance(value, dict) and value and name != "architecture"
        found += [f"{name}.{part}" for part in value] if nested else [name]
    return tuple(found)


def rows_of(table: Any) -> list[dict[str, Any]]:
    """The rows of a table: a pandas DataFrame, a mapping of columns to lists, or a list of rows.

    Raises: SpecError if it is none of these, is empty or too long, or has a column that no job has.
    """
    import pandas  # type: ignore[import-untyped,unused-ignore]

    try:
        frame = table if isinstance(table, pandas.DataFrame) else pandas.DataFrame(table)
    except (ValueError, TypeError) as error:
        raise SpecError(f"the input is no table of jobs ({error}); give rows with named columns.", parameter=JOB) from error
    known = (JOB, *job_columns())
    names = [str(name) for name in frame.columns]
    for name, times in Counter(names).items():
        if name not in known:
            raise SpecError(f"{name} is no column of a job{near_misses(name, known) or _SUCH_AS}", parameter=name)
        if times > 1:
            raise SpecError(f"the column {name} appears {times} times in the table; keep one.", parameter=name)
    if not 0 < len(frame) <= MAX_ROWS:
        raise SpecError(f"the table has {len(frame):,} rows; give from 1 to {MAX_ROWS:,}.", parameter=JOB)
    rows: Any = frame.astype(object).to_dict("records")
    for name in names:
        if all(_not_a_number(row[name]) for row in rows):
            raise SpecError(f"{name} is empty or NaN in every row; leave the column out, or give values.", parameter=name)
    return list(rows)


_SUCH_AS = "; columns are the fields of a job file, such as architecture, sequence_length and micro_batch_size."


def job_mapping(row: Mapping[str, Any]) -> dict[str, Any]:
    """The job mapping of one row of a table. Raises: SpecError."""
    given = {name: value for name, value in row.items() if not _empty(value)}
    text = given.get(JOB)
    if text is not None:
        if isinstance(text, str):
            if len(text) > MAX_JOB_CHARACTERS:
                raise SpecError(f"job has {len(text):,} characters, more than {MAX_JOB_CHARACTERS:,}.", parameter=JOB)
            try:
                text = json_value(text, strict=True)
            except ValueError as error:
                raise SpecError(f"job is not valid JSON ({error}); write a job file's mapping.", parameter=JOB) from error
        if not isinstance(text, dict):
            raise SpecError(f"job must be a mapping as JSON, not {type(text).__name__}.", parameter=JOB, value=text)
        if others := sorted(set(given) - {JOB}):
            sentence = f"{others[0]} is given together with job, which already says it; keep one of them."
            raise SpecError(sentence, parameter=others[0])
        return text
    unknown = [name for name in given if name not in job_columns()]
    if unknown:
        raise SpecError(f"{unknown[0]} is no column of a job{near_misses(unknown[0], job_columns())}", parameter=unknown[0])
    values: dict[str, Any] = {}
    for path, value in given.items():
        place = values
        *parents, name = path.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    if not values:
        raise SpecError("the row is empty; give a job as JSON in the column job, or its fields as columns.", parameter=JOB)
    return values


def answer_row(row: Mapping[str, Any], calibration: Calibration) -> dict[str, Any]:
    """`fits`; for each quantity `<quantity>.baseline`, `.point`, `.lower`, `.upper`, `.upper_95` in bytes, and `.rests_on`;
    `findings` and `assumptions` as in `Prediction.to_mapping`.

    Raises: SpecError or CatalogError naming what is wrong with the job.
    """
    from dataclasses import replace

    from peakcast import catalog
    from peakcast.catalog.constants import own_constants
    from peakcast.dialects.common.job_file import job_from_mapping
    from peakcast.models.prediction.predict import predict

    job = job_mapping(row)
    if isinstance(job.get("architecture"), str):  # a name only: a remote request must not make us read our files
        job = {**job, "architecture": catalog.architecture(job["architecture"])}
    device = replace(catalog.gpu(calibration.gpu), constants=own_constants(calibration.gpu))
    prediction = predict(job_from_mapping(job), device, calibration=calibration)
    found: dict[str, Any] = {"fits": prediction.fits}
    for quantity in QUANTITIES:
        interval = getattr(prediction, quantity)
        found |= {f"{quantity}.{name}": value for name, value in interval.to_mapping().items()}
    findings = [finding.to_mapping() for finding in prediction.findings]
    return {**found, "findings": findings, "assumptions": list(prediction.assumptions)}


def answer_rows(rows: Sequence[Mapping[str, Any]], calibration: Calibration) -> list[dict[str, Any]]:
    """`answer_row` of each row, all within `REQUEST_SECONDS`. Raises: SpecError or CatalogError naming the row."""
    found: list[dict[str, Any]] = []
    try:
        with limited(REQUEST_SECONDS):
            for row in rows:
                found.append(answer_row(row, calibration))  # noqa: PERF401  # their number names the row that fails
    except (PeakcastError, NotImplementedError) as error:
        parameter = getattr(error, "parameter", None)
        raise SpecError(f"row {len(found) + 1}: {error}", parameter=parameter) from error
    except TimeIsUp:
        raise SpecError(f"row {len(found) + 1}: no answer within {REQUEST_SECONDS:g} s; ask for fewer rows.") from None
    return found


def _empty(value: object) -> bool:
    return value is None or _not_a_number(value)


def _not_a_number(value: object) -> bool:
    return isinstance(value, float) and value != value
