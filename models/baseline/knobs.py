"""Jobs that differ in a few knobs, as columns: for each dotted key of a job ("parallelism.tensor_parallel_size") one value
per job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.core.errors import SpecError
from peakcast.jobs.spec import TrainingJob

Ints = npt.NDArray[np.int64]
Arrays = Mapping[str, npt.NDArray[Any]]


def num_combinations(job: TrainingJob, columns: Arrays) -> int:
    """How many jobs `columns` describe. Raises: SpecError for knobs that are not keys of a job, or columns that differ in
    length."""
    for name, values in columns.items():
        owner: object = job
        for part in name.split("."):
            if not hasattr(owner, part) or not is_dataclass(owner):
                raise SpecError(f"{name} is no key of a job; use for example parallelism.zero_stage.", parameter=name)
            owner = getattr(owner, part)
        if values.ndim != 1:
            raise SpecError(f"{name} must be a list of values, one for each combination.", parameter=name)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise SpecError(f"knobs differ in length: {lengths}; give each one value for every combination.", parameter="knobs")
    return next(iter(lengths.values()), 1)


def groups(columns: Arrays, which: Ints) -> Iterator[tuple[dict[str, Any], Ints]]:
    """Groups of the combinations `which` that have the same value in every column: those values, and the members'
    indices."""
    code, num_codes = np.zeros(len(which), dtype=np.int64), 1
    for values in columns.values():
        digit, base = _digits(values)
        if num_codes * base >= 2**63:
            distinct, code = np.unique(code, return_inverse=True)
            num_codes = len(distinct)
        code, num_codes = code * base + digit, num_codes * base
    order = np.argsort(code, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(code[order])) + 1):
        if len(members):
            yield {name: values[members[0]].item() for name, values in columns.items()}, members


def _digits(values: npt.NDArray[Any]) -> tuple[Ints, int]:
    """A code from 0 on for each value, equal for equal values, and a number above all codes."""
    if values.dtype.kind in "iub" and len(values) and int(np.ptp(values.astype(np.int64))) < 2**16:
        whole = values.astype(np.int64)
        digits = whole - whole.min()
        return digits, int(digits.max()) + 1
    numbers: dict[Any, int] = {}
    digits = np.array([numbers.setdefault(value, len(numbers)) for value in values.tolist()], dtype=np.int64)
    return digits, len(numbers) or 1


def with_knobs(job: TrainingJob, changes: Mapping[str, Any]) -> TrainingJob:
    """`job` with dotted keys changed. Raises: SpecError if the result is not a valid job."""
    nested: dict[str, Any] = {}
    for name, value in changes.items():
        part, _, key = name.partition(".")
        if key:
            nested[part] = replace(nested.get(part, getattr(job, part)), **{key: value})
        else:
            nested[part] = value
    return job.replace(**nested)
