"""The per-layer table: which module holds which bytes. It is read off the timeline, so it adds up to the timeline's
totals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from peakcast.answers.explanation import LAYER_COLUMNS, ModuleRow, ParameterRow
from peakcast.core.units import DTYPE_BYTES
from peakcast.jobs.spec import TrainingJob
from peakcast.timelines.timeline import Category, Timeline

SHARED = "model"
"""Module of the Megatron-LM ledger's contiguous buffers, which hold all layers' parameters or gradients."""


def module_rows(timeline: Timeline, job: TrainingJob | None, parameters: Sequence[ParameterRow]) -> tuple[ModuleRow, ...]:
    """A row per module of `timeline`, in model order. The bytes of contiguous buffers are divided among the modules whose
    parameters they hold; their padding has a row of its own."""
    numel = _numel(parameters)
    columns = {
        name: _by_module(timeline, _most_of(timeline, categories), categories, job, numel)
        for name, categories in LAYER_COLUMNS.items()
    }
    at_peak = _by_module(timeline, timeline.peak().instant, tuple(Category), job, numel)
    names = dict.fromkeys([*numel, *at_peak, *(name for column in columns.values() for name in column)])
    rows = []
    for name in sorted(names, key=_model_order):
        sizes = {column: sums.get(name, 0) for column, sums in columns.items()}
        if numel.get(name) or any(sizes.values()) or at_peak.get(name):
            rows.append(ModuleRow(module=name, num_parameters=numel.get(name, 0), at_peak=at_peak.get(name, 0), **sizes))
    return tuple(rows)


def _numel(parameters: Sequence[ParameterRow]) -> dict[str, int]:
    """Module -> number of its elements on the rank; of a parameter that is split over data-parallel ranks, one part,
    rounded up."""
    sums: dict[str, int] = {}
    for row in parameters:
        sums[row.module] = sums.get(row.module, 0) - (-math.prod(row.rank_shape) // row.shards)
    return sums


def _alive_of(timeline: Timeline, categories: Sequence[Category]) -> npt.NDArray[np.bool_]:
    wanted: npt.NDArray[np.bool_] = np.isin(timeline.categories, [int(category) for category in categories])
    return wanted


def _most_of(timeline: Timeline, categories: Sequence[Category]) -> int:
    """The instant at which `categories` together have most bytes."""
    chosen, end = _alive_of(timeline, categories), len(timeline.phases)
    change = np.zeros(end + 1, dtype=np.int64)
    np.add.at(change, np.minimum(timeline.born[chosen], end), timeline.num_bytes[chosen])
    np.subtract.at(change, np.minimum(timeline.dies[chosen], end), timeline.num_bytes[chosen])
    return int(np.argmax(np.cumsum(change)[:-1]))


def _by_module(
    timeline: Timeline, instant: int, categories: Sequence[Category], job: TrainingJob | None, numel: Mapping[str, int]
) -> dict[str, int]:
    """Module -> bytes of `categories` at `instant`."""
    sums: dict[str, int] = {}
    alive = _alive_of(timeline, categories) & timeline.alive_at(instant)
    for index in np.flatnonzero(alive).tolist():
        module, size = timeline.modules[index], int(timeline.num_bytes[index])
        if module == SHARED and job is not None and numel:
            for owner, part in _shared_out(size, Category(int(timeline.categories[index])), job, numel).items():
                sums[owner] = sums.get(owner, 0) + part
        else:
            sums[module] = sums.get(module, 0) + size
    return sums


def _shared_out(size: int, category: Category, job: TrainingJob, numel: Mapping[str, int]) -> dict[str, int]:
    """A buffer's bytes by the modules whose elements it holds. The rest is padding and belongs to the buffer itself."""
    dtype = job.precision.gradients if category is Category.GRADIENTS else job.precision.parameters
    width = int(DTYPE_BYTES[dtype])
    parts = {module: elements * width for module, elements in numel.items()}
    padding = size - sum(parts.values())
    return {**parts, SHARED: padding} if padding >= 0 else {SHARED: size}


def _model_order(module: str) -> tuple[int, int, str]:
    """Sort key of a module: embedding, layers by number, head, then modules outside of layers."""
    head, _, tail = module.partition(".")
    if module == "embedding":
        return (0, 0, "")
    if head == "layers" and tail.isdigit():
        return (1, int(tail), "")
    return (2, 0, "") if module == "head" else (3, 0, module)
