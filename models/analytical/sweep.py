"""Peaks of very many jobs that differ in a few knobs, as arrays and without a Python object per job: what `search` ranks.

No second copy of any formula: the ledger is asked. Jobs that differ in micro-batch b and sequence length s alone have the
same tensors with the same lives, and nearly every tensor has c0 + c1·b + c2·s + c3·b·s + c4·s² + c5·b·s² bytes before they
are rounded to 512. So a few timelines give the coefficients of every tensor and these the polynomial of every
instant, whose largest value is the peak. Rounding is exact too: to the polynomials the padding of the tensors whose bytes
are no multiple of 512 is added, class by class.

What is exact: the samples give the coefficients to the byte, and the ledger itself is asked at the corners of every range.
A tensor that is not such a polynomial (the embedding's workspace) is bounded by its largest bytes per token at the corners,
and a combination whose peak it could touch is asked of the ledger. Where lives differ (a kernel that is chosen by length) a
range is halved, down to single combinations. Between corners that agree, nothing is checked. Data parallelism adds or takes
away bytes instant by instant, whatever the micro-batch: each of its sizes costs one timeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.catalog import Device
from peakcast.errors import SpecError
from peakcast.models.analytical.ledger import ledger
from peakcast.models.analytical.tape import ALLOCATION_UNIT_BYTES
from peakcast.spec import TrainingJob
from peakcast.timeline import Timeline

Ints = npt.NDArray[np.int64]
REFUSED = -1
"""The "peak" of a combination that is no valid job."""
SAMPLE = 512
"""Samples are taken at multiples of it: every term but the constant one is then a multiple of 512, and not rounded."""
ADDED = ("parallelism.data_parallel_size", "parallelism.zero_stage")
"""Knobs that change what is held all along, and no activation: what each combination adds is taken from one timeline, and
checked on another micro-batch and length for the last one."""
_SPLIT_LENGTH = ("context_parallel_size", "tensor_parallel_size")
PARTS = 64
"""Coefficients are counted in parts of a byte: a dropout mask has an eighth of one per element, a layout divides it."""
UNIT = ALLOCATION_UNIT_BYTES * PARTS
BOUND = 1.02
"""What a tensor that is no polynomial is given beyond its largest bytes per token at the corners."""
POINTS_AT_ONCE = 128
SHRINKS = 0.9
"""Instants are thinned out until a round leaves more than this part of them."""
_EXPONENTS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))
"""Of micro-batch and sequence length, term by term."""


def sweep(
    job: TrainingJob,
    knobs: Mapping[str, Sequence[Any] | npt.NDArray[Any]],
    *,
    device: Device | None = None,
    stage: int | None = None,
    processes: int = 1,
) -> Ints:
    """Peak bytes of a steady step of `job` with each combination of `knobs`, [num_combinations]; -1 where the combination
    is no valid job.

    `knobs`: a job's keys, dotted where nested ("parallelism.tensor_parallel_size"), each with an array of one value per
    combination. `stage`: whose peaks, a pipeline stage's; None for the fullest. `processes` share the work.
    Raises: SpecError for knobs that are no keys of a job or differ in length.
    """
    columns = {name: np.asarray(values) for name, values in knobs.items()}
    length = _length(job, columns)
    _place_fewest_micro_batches(job, columns)
    batch, sequence = (
        np.asarray(columns.pop(name, np.full(length, getattr(job, name))), dtype=np.int64)
        for name in ("micro_batch_size", "sequence_length")
    )
    shared = {name: values for name, values in columns.items() if name not in ADDED}
    added = {name: values for name, values in columns.items() if name in ADDED}
    variants = list(_groups(added, np.arange(length)))
    variant_of = np.zeros(length, dtype=np.int64)
    for number, (_, members) in enumerate(variants):
        variant_of[members] = number
    groups = list(_groups(shared, np.arange(length)))
    tasks = [
        (job, changes, [variant for variant, _ in variants], variant_of[members], batch[members], sequence[members])
        for changes, members in groups
    ]
    peaks = np.full(length, REFUSED, dtype=np.int64)
    for (_, members), found in zip(groups, _map(partial(_peaks, device, stage), tasks, processes), strict=True):
        peaks[members] = found
    return peaks


_Task = tuple[TrainingJob, Mapping[str, Any], list[dict[str, Any]], Ints, Ints, Ints]


def _map(function: Callable[[_Task], Ints], tasks: Sequence[_Task], processes: int) -> Iterator[Ints]:
    if processes < 2 or len(tasks) < 2:
        yield from map(function, tasks)
        return
    with ProcessPoolExecutor(min(processes, len(tasks))) as pool:
        yield from pool.map(function, tasks, chunksize=max(1, len(tasks) // (processes * 8)))


def _length(job: TrainingJob, columns: Mapping[str, npt.NDArray[Any]]) -> int:
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


def _place_fewest_micro_batches(job: TrainingJob, columns: dict[str, npt.NDArray[Any]]) -> None:
    """The same peaks with as few micro-batches as the ledger places, so that they do not tell structures apart."""
    name = "gradient_accumulation_steps"
    if name not in columns:
        return
    if job.framework != "megatron":
        columns[name] = np.minimum(columns[name], 2)
    elif job.parallelism.virtual_pipeline_stages == 1 and not job.framework_options:
        stages = columns.get("parallelism.pipeline_parallel_size", np.array([job.parallelism.pipeline_parallel_size]))
        if "parallelism.virtual_pipeline_stages" not in columns:  # see pipeline.representative_micro_batches
            columns[name] = np.minimum(columns[name], stages + 2)


def _groups(columns: Mapping[str, npt.NDArray[Any]], which: Ints) -> Iterator[tuple[dict[str, Any], Ints]]:
    """Combinations that share all of `columns`: the values, and which."""
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
    """Whole numbers from 0 on that tell the values of a column apart, and a bound beyond them."""
    if values.dtype.kind in "iub" and len(values) and int(np.ptp(values.astype(np.int64))) < 2**16:
        whole = values.astype(np.int64)
        digits = whole - whole.min()
        return digits, int(digits.max()) + 1
    numbers: dict[Any, int] = {}
    digits = np.array([numbers.setdefault(value, len(numbers)) for value in values.tolist()], dtype=np.int64)
    return digits, len(numbers) or 1


def with_knobs(job: TrainingJob, changes: Mapping[str, Any]) -> TrainingJob:
    """`job` with dotted keys changed. Raises: SpecError where the result is no valid job."""
    nested: dict[str, Any] = {}
    for name, value in changes.items():
        part, _, key = name.partition(".")
        if key:
            nested[part] = replace(nested.get(part, getattr(job, part)), **{key: value})
        else:
            nested[part] = value
    return job.replace(**nested)


def _peaks(device: Device | None, stage: int | None, task: _Task) -> Ints:
    """Peaks of the jobs that differ in micro-batch, sequence length and what only adds, in any order."""
    base, changes, variants, variant_of, batch, sequence = task
    peaks = np.full(len(batch), REFUSED, dtype=np.int64)
    sequence = np.where(np.isin(sequence, _valid_lengths(base, changes, np.unique(sequence))), sequence, 0)
    valid = np.flatnonzero((sequence > 0) & (batch > 0))
    if not len(valid):
        return peaks
    used = np.unique(variant_of[valid])
    layouts = [with_knobs(base, {**changes, **variants[v], "sequence_length": _sample_length(base, changes)}) for v in used]
    points, point_of = np.unique(np.stack([batch[valid], sequence[valid]]), axis=1, return_inverse=True)
    found = np.zeros((len(used), points.shape[1]), dtype=np.int64)
    for number in fullest_stages(layouts[0]) if stage is None else [stage]:
        found = np.maximum(found, _Asked(tuple(layouts), device, number).peaks(points))
    peaks[valid] = found[np.searchsorted(used, variant_of[valid]), point_of]
    return peaks


def _valid_lengths(base: TrainingJob, changes: Mapping[str, Any], lengths: Ints) -> list[int]:
    valid: list[int] = []
    try:
        job = with_knobs(base, {**changes, "sequence_length": _sample_length(base, changes)})
    except SpecError:
        return valid
    for length in lengths.tolist():
        try:
            job.replace(sequence_length=length)
        except SpecError:
            continue
        valid.append(length)
    return valid


def _sample_length(base: TrainingJob, changes: Mapping[str, Any]) -> int:
    """A sequence length for samples that the layout can divide."""
    sizes = {name: changes.get(f"parallelism.{name}", getattr(base.parallelism, name)) for name in _SPLIT_LENGTH}
    return SAMPLE * math.prod(int(size) for size in sizes.values())


def fullest_stages(job: TrainingJob) -> list[int]:
    """The pipeline stages that can be the fullest: of those between the ends, which hold equal layers in an even split, the
    first has the most micro-batches in flight."""
    stages = job.parallelism.pipeline_parallel_size
    return list(range(stages)) if job.parallelism.pipeline_layers else sorted({0, min(1, stages - 1), stages - 1})


@dataclass(frozen=True, slots=True)
class _Asked:
    """The ledger of one stage as a function of the layout's number, micro-batch and sequence length."""

    layouts: tuple[TrainingJob, ...]
    device: Device | None
    stage: int

    def timeline(self, layout: int, batch: int, sequence: int) -> Timeline:
        job = self.layouts[layout].replace(micro_batch_size=batch, sequence_length=sequence)
        rank = self.stage * (job.parallelism.world_size // job.parallelism.pipeline_parallel_size)
        return ledger(job, device=self.device, rank=rank, step="steady")

    def one_by_one(self, points: Ints) -> Ints:
        """Peaks [num_layouts, num_points] at `points` [2, num_points], each by its ledger."""
        return np.array(
            [
                [self.timeline(layout, b, s).peak().num_bytes for b, s in points.T.tolist()]
                for layout in range(len(self.layouts))
            ],
            dtype=np.int64,
        ).reshape(len(self.layouts), -1)

    def peaks(self, points: Ints) -> Ints:
        """Peaks [num_layouts, num_points] at distinct `points`: by polynomials where that saves ledgers."""
        lengths = np.unique(points[1]).tolist()
        if len(lengths) > 1:
            # the square of the length is in the attention scores, which only some kernels keep in memory
            lengths = [self.layouts[0].sequence_length * times for times in (1, 2, 3)]
        samples = [(b * SAMPLE, s) for s in lengths for b in (1, 2)]
        if points.shape[1] * len(self.layouts) <= len(samples) + len(self.layouts) + 2:
            return self.one_by_one(points)
        sampled = [self.timeline(0, b, s) for b, s in samples]
        fitted = _Polynomials.through(sampled, samples)
        if fitted is None:
            return self.one_by_one(points)
        others = (self.timeline(layout, *samples[0]) for layout in range(1, len(self.layouts)))
        fitted = fitted.with_layouts([sampled[0], *others])
        if fitted is None or not fitted.adds(len(self.layouts) - 1, samples[-1], self.timeline(-1, *samples[-1])):
            each = [_Asked((layout,), self.device, self.stage).peaks(points) for layout in self.layouts]
            return np.concatenate(each)
        order = np.argsort(points[0] * points[1], kind="stable")
        found = np.empty((len(self.layouts), len(order)), dtype=np.int64)
        found[:, order] = self._by_ranges(points[:, order], fitted)
        return found

    def _by_ranges(self, points: Ints, fitted: _Polynomials) -> Ints:
        """Peaks at points in the order of their tokens, halved until lives are the same at all corners."""
        if points.shape[1] <= 3:
            return self.one_by_one(points)
        checked = fitted.checked({corner: self.timeline(0, *corner) for corner in _corners(points)})
        if checked is None:
            half = points.shape[1] // 2
            halves = points[:, :half], points[:, half:]
            return np.concatenate([self._by_ranges(part, fitted) for part in halves], axis=1)
        found, certain = checked.peaks(points)
        for layout, point in np.argwhere(~certain).tolist():
            found[layout, point] = self.timeline(layout, *points[:, point].tolist()).peak().num_bytes
        return found


def _corners(points: Ints) -> list[tuple[int, int]]:
    """The first and the last of `points` and, where these are not the extremes of both coordinates, points that are."""
    chosen = [0, points.shape[1] - 1]
    for coordinate in points:
        for extreme in (coordinate.min(), coordinate.max()):
            if extreme not in coordinate[chosen]:
                chosen.append(int(np.argmax(coordinate == extreme)))
    return [(int(b), int(s)) for b, s in points[:, chosen].T]


def _powers(points: Ints, exponents: Sequence[tuple[int, int]]) -> Ints:
    """[num_terms, num_points]."""
    return np.stack([points[0] ** i * points[1] ** j for i, j in exponents])


def _same_lives(one: Timeline, other: Timeline) -> bool:
    return (
        len(one.phases) == len(other.phases)
        and np.array_equal(one.born, other.born)
        and np.array_equal(one.dies, other.dies)
        and np.array_equal(one.categories, other.categories)
    )


def _rounded(sizes: Ints) -> Ints:
    return -(-sizes // UNIT) * UNIT


@dataclass(frozen=True, slots=True)
class _Polynomials:
    """Bytes of every tensor as a polynomial. `coefficients` [num_terms, num_entries] are in 1/PARTS of a byte; lives are
    those of `lives`; the tensors of `odd` are no polynomials and have at most `odd_rate` parts per token."""

    lives: Timeline
    exponents: tuple[tuple[int, int], ...]
    coefficients: Ints
    odd: npt.NDArray[np.bool_]
    odd_rate: npt.NDArray[np.float64]
    added: Ints
    """Bytes that each layout has beyond the first at each instant, [num_layouts, num_instants]."""

    @classmethod
    def through(cls, timelines: Sequence[Timeline], samples: Sequence[tuple[int, int]]) -> _Polynomials | None:
        """The polynomials through samples; None where lives differ between them."""
        if not all(_same_lives(timelines[0], other) for other in timelines[1:]):
            return None
        exponents = _EXPONENTS if len(samples) == len(_EXPONENTS) else _EXPONENTS[:2]
        powers = _powers(np.array(samples, dtype=np.int64).T, exponents)
        scale = powers.max(axis=1).astype(float)
        sizes = np.stack([timeline.num_bytes for timeline in timelines]) * PARTS
        solved = np.linalg.solve(powers.T / scale, sizes.astype(float)) / scale[:, None]
        coefficients = np.rint(solved).astype(np.int64)
        odd = (powers.T @ coefficients != sizes).any(axis=0)
        coefficients[:, odd] = 0
        nothing = np.zeros((1, len(timelines[0].phases)), dtype=np.int64)
        return cls(timelines[0], exponents, coefficients, odd, np.zeros(len(odd)), nothing)

    def with_layouts(self, timelines: Sequence[Timeline]) -> _Polynomials | None:
        """With what each layout's timeline has beyond the first one's; None where they differ in their instants."""
        if any(len(timeline.phases) != len(self.lives.phases) for timeline in timelines):
            return None
        totals = np.stack([timeline.totals for timeline in timelines])
        return replace(self, added=totals - totals[0])

    def adds(self, layout: int, point: tuple[int, int], timeline: Timeline) -> bool:
        """Whether what `layout` has beyond the first one is the same at `point`, a sample."""
        sizes = _powers(np.array(point)[:, None], self.exponents)[:, 0] @ self.coefficients
        if self.odd.any() or len(timeline.phases) != len(self.lives.phases):
            sizes = np.where(self.odd, 0, sizes)
            odd_lives = self._sums(self.odd.astype(np.int64)[None])[0] > 0
        else:
            odd_lives = np.zeros(len(self.lives.phases), dtype=bool)
        expected = self._sums(sizes[None])[0] // PARTS + self.added[layout]
        return bool(((expected == timeline.totals) | odd_lives).all())

    def checked(self, corners: Mapping[tuple[int, int], Timeline]) -> _Polynomials | None:
        """With what does not hold at `corners` marked as odd; None where lives differ."""
        if not all(_same_lives(self.lives, timeline) for timeline in corners.values()):
            return None
        odd, rate = self.odd.copy(), np.zeros(len(self.odd))
        for (batch, sequence), timeline in corners.items():
            powers = _powers(np.array([[batch], [sequence]]), self.exponents)[:, 0]
            odd |= _rounded(powers @ self.coefficients) != timeline.num_bytes * PARTS
            rate = np.maximum(rate, timeline.num_bytes * PARTS / (batch * sequence))
        return replace(self, odd=odd, odd_rate=rate * BOUND)

    def peaks(self, points: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Peak bytes [num_layouts, num_points] at `points` [2, num_points], and where they are certain."""
        coefficients = np.where(self.odd, 0, self.coefficients)
        irregular = np.flatnonzero((coefficients % UNIT).any(axis=0))
        classes, which = np.unique(coefficients[:, irregular], axis=1, return_inverse=True)
        counted = np.zeros((classes.shape[1], len(self.odd)), dtype=np.int64)
        counted[which, irregular] = 1
        # [num_rows, num_instants]: coefficients of what lives at an instant, then how many of each class do
        rows = self._sums(np.concatenate([coefficients, counted]))
        powers = _powers(points, self.exponents)
        unrounded = classes.T @ powers
        weights = np.concatenate([powers, _rounded(unrounded) - unrounded])
        more = self._sums(np.where(self.odd, np.ceil(self.odd_rate), 0).astype(np.int64)[None])[0]
        tokens = points[0] * points[1]
        shape = len(self.added), points.shape[1]
        peaks, bounds = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for instants in _alike(self.added):
            added = self.added[:, instants[:1]] * PARTS
            peaks = np.maximum(peaks, _largest(rows[:, instants], weights) + added)
            touched = instants[more[instants] > 0]
            if len(touched):
                bound = _largest(np.vstack([rows[:, touched], more[touched]]), np.vstack([weights, tokens]))
                bounds = np.maximum(bounds, bound + added)
        return peaks // PARTS, bounds <= peaks

    def _sums(self, values: Ints) -> Ints:
        """What each row of `values` [num_rows, num_entries] adds up to over what lives at each instant."""
        n = len(self.lives.phases)
        born, dies = np.minimum(self.lives.born, n), np.minimum(self.lives.dies, n)
        sums = np.zeros((len(values), n), dtype=np.int64)
        for row, of_entries in enumerate(values):
            used = np.flatnonzero(of_entries)
            changes = np.bincount(born[used], of_entries[used], n + 1) - np.bincount(dies[used], of_entries[used], n + 1)
            sums[row] = np.cumsum(changes.astype(np.int64))[:n]
        return sums


def _largest(rows: Ints, weights: Ints) -> Ints:
    """The largest of `rows`.T @ `weights` over the columns of `rows` (instants), [num_points].

    Points come in the order of their tokens, and weights are not negative. Of some neighbours at a time only the instants
    are multiplied out whose upper bound there reaches the best lower bound: a few of thousands.
    """
    rows = _undominated(rows)
    largest = np.empty(weights.shape[1], dtype=np.int64)
    positive = np.maximum(rows, 0)
    negative = rows - positive
    for start in range(0, len(largest), POINTS_AT_ONCE):
        some = weights[:, start : start + POINTS_AT_ONCE]
        least, most = some.min(axis=1), some.max(axis=1)
        kept = most @ positive + least @ negative >= (least @ positive + most @ negative).max()
        largest[start : start + POINTS_AT_ONCE] = (rows[:, kept].T @ some).max(axis=0)
    return largest


def _undominated(rows: Ints) -> Ints:
    """`rows` without the columns that are nowhere above a neighbour: no weights make them the largest."""
    while True:
        rising, falling = rows[:, :-1] <= rows[:, 1:], rows[:, 1:] <= rows[:, :-1]
        below_next = rising.all(axis=0)
        kept = np.ones(rows.shape[1], dtype=bool)
        kept[:-1] &= ~below_next
        kept[1:] &= ~falling.all(axis=0) | below_next  # of equal ones the last stays
        if kept.mean() > SHRINKS:
            return rows
        rows = rows[:, kept]


def _alike(added: Ints) -> list[Ints]:
    """Instants in a row at which the layouts differ by the same bytes."""
    changes = np.flatnonzero((added[:, 1:] != added[:, :-1]).any(axis=0)) + 1
    return np.split(np.arange(added.shape[1]), changes)
