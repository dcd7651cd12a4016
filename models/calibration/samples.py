"""Measured rows with their baselines, from which the fit learns and by which the evaluation judges, and the rows that are
left out."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from peakcast.answers.prediction import QUANTITIES
from peakcast.core.cores import available_cores
from peakcast.core.errors import CatalogError, PeakcastError
from peakcast.core.workers import LostError, QuestionLimits, Workers
from peakcast.jobs.ranks import ranks_by_shard
from peakcast.jobs.spec import TrainingJob, canonical_json
from peakcast.measurements.records import DEVICE_MEAN, Measurement
from peakcast.models.baseline.baseline import Baseline, baseline
from peakcast.models.calibration.features import features
from peakcast.models.calibration.grouping import architecture_shape, bar_groups, layout_name, residual_group

if TYPE_CHECKING:
    from peakcast.catalog import Device

BaselineOf = Callable[[TrainingJob, "Device", int | None], Baseline]
DeviceOf = Callable[[str], "Device"]
ScopeOf = Callable[[TrainingJob], str]
Asked = tuple[TrainingJob, str, int | None]
"""A job, the name of a GPU type, and a rank."""
ENOUGH_TO_SHARE = 50
"""A process with fewer jobs takes longer to start than it saves."""
OUT_OF_MEMORY = "outcome is out_of_memory"
TRUST = {"measured": 1.0, "published": 0.5}
"""Weight of a row by provenance: one that peakcast measured, with versions, allocator and phases recorded, against one
whose run was reconstructed from what its authors wrote. Only the ratio matters, and only if both are in one fit. A
judgement."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """A measured row, the baseline of its rank, and the names it is grouped by."""

    row: Measurement
    device: Device
    baseline: Baseline
    features: dict[str, float]
    architecture: str
    """`grouping.architecture_shape`, the unit in which evidence is counted."""
    layout: str
    groups: tuple[str, ...]
    """`grouping.bar_groups`: the groups whose rows may set the error bar, finest first."""

    def measured(self, quantity: str) -> int | None:
        """Measured bytes of a quantity; None if the row has none that can be compared."""
        value: int | None = getattr(self.row, quantity)
        if self.censored and quantity == "peak_device_bytes":  # it needed more than the GPU has
            value = max(value or 0, self.device.cuda_memory_bytes)
        return value if value and self.baseline.start(quantity) > 0 else None

    def log_ratio(self, quantity: str) -> float:
        """log(measured / what the residual starts from); for a run that went out of memory, a lower bound of it."""
        return math.log((self.measured(quantity) or 1) / self.baseline.start(quantity))

    @property
    def residual_group(self) -> str:
        """`grouping.residual_group` of the row's job."""
        return residual_group(self.row.job)

    @property
    def censored(self) -> bool:
        """Whether the run went out of memory, so that measured values are lower bounds."""
        return self.row.outcome == "out_of_memory"

    @property
    def trust(self) -> float:
        """The row's weight among others in a fit (`TRUST`)."""
        return TRUST[self.row.provenance]

    @property
    def configuration(self) -> tuple[str, str, int | None, str]:
        """Equal for repeats: the same job on the same GPU type, rank and collectives."""
        return (self.row.job.config_hash, self.row.gpu, self.row.rank, self.row.collectives)


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """The samples that count, those that went out of memory (bounds for a fit), and the numbers of rows left out by
    reason."""

    samples: tuple[Sample, ...]
    left_out: dict[str, int]
    """Numbers of rows that an accuracy claim may not include, by reason; those that went out of memory are among them."""
    censored: tuple[Sample, ...] = ()


def prepare(
    rows: Iterable[Measurement],
    *,
    device_of: DeviceOf | None = None,
    baseline_of: BaselineOf | None = None,
    scope_of: ScopeOf | None = None,
) -> Samples:
    """The rows that an accuracy claim may include, each with its baseline, and the numbers of others by reason.

    A row counts if it is `measured` or `published`, finished, in scope by its record and for the ledger, unspoiled, on a
    GPU of the catalog, and has at least one of the four quantities. The three functions default to the catalog's, the
    analytical baseline's and the ledger's.
    """
    device_of = device_of or _catalog_device
    scope_of = scope_of or _ledger_scope
    compute = functools.partial(_computed, device_of, baseline_of or baseline)
    # sorted, so that the order of rows in files does not change the fit
    judged = [(row, _reason(row, scope_of)) for row in sorted(rows, key=_order)]
    counted = [row for row, reason in judged if reason in ("", OUT_OF_MEMORY)]
    baselines = _baselines({asked: None for row in counted for asked in _baselines_needed(row)}, compute)
    kept: list[Sample] = []
    censored: list[Sample] = []
    reasons: Counter[str] = Counter()
    for row, reason in judged:
        if reason in ("", OUT_OF_MEMORY):
            found = _sample_or_reason(row, baselines, device_of)
            if isinstance(found, Sample):
                (censored if reason else kept).append(found)
            else:
                reason = reason or found
        if reason:
            reasons[_kind(reason)] += 1
    return Samples(samples=tuple(kept), left_out=dict(sorted(reasons.items())), censored=tuple(censored))


def _sample_or_reason(
    row: Measurement, baselines: Mapping[Asked, Baseline | Exception], device_of: DeviceOf
) -> Sample | str:
    """The row's sample, or why it has none."""
    try:
        base, *others = (_baseline_or_raise(baselines[asked]) for asked in _baselines_needed(row))
        return _sample(row, device_of(row.gpu), _mean_device(base, others, row.job))
    except CatalogError:
        return f"GPU {row.gpu} is not in the catalog"
    except (PeakcastError, NotImplementedError, ImportError) as error:
        return f"the ledger cannot: {error}"


def _baselines_needed(row: Measurement) -> list[Asked]:
    """The baselines that a row is compared with: of its own rank and, if its device memory is a mean over all GPUs, of one
    rank from each set of equal ranks."""
    ranks = [row.rank]
    if row.environment.get(DEVICE_MEAN):
        ranks += [rank for rank in ranks_by_shard(row.job, 0) if rank != row.rank]
    return [(row.job, row.gpu, rank) for rank in ranks]


def _computed(device_of: DeviceOf, compute: BaselineOf, asked: Asked) -> Baseline:
    """The baseline of one question."""
    job, gpu, rank = asked
    return compute(job, device_of(gpu), rank)


def _baselines(asked: Iterable[Asked], compute: Callable[[Asked], Baseline]) -> dict[Asked, Baseline | Exception]:
    """Each question's baseline, or the error. Many questions are divided among as many processes as there are cores."""
    found: dict[Asked, Baseline | Exception] = {}
    waiting = list(asked)
    processes = min(available_cores(), len(waiting) // ENOUGH_TO_SHARE)
    if processes > 1:
        with Workers(compute, processes, QuestionLimits(math.inf)) as workers:
            found.update(workers.answers(waiting))
        waiting = [one for one, answer in found.items() if isinstance(answer, LostError)]
    for one in waiting:
        try:
            found[one] = compute(one)
        except (PeakcastError, NotImplementedError, ImportError) as error:
            found[one] = error
    return found


def _baseline_or_raise(answer: Baseline | Exception) -> Baseline:
    """The baseline; raises the error in its place."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def _sample(row: Measurement, device: Device, base: Baseline) -> Sample:
    """A row with its baseline, features and groups."""
    base = base if row.collectives == "nccl" else _without_communicators(base)
    return Sample(
        row=row,
        device=device,
        baseline=base,
        features=features(row.job, device, base, published=row.provenance == "published"),
        architecture=architecture_shape(row.job),
        layout=layout_name(row.job),
        groups=bar_groups(row.job),
    )


def repeat_weights(samples: Sequence[Sample]) -> list[float]:
    """1 / (number of repeats) for each sample, so that a configuration counts once however often it was run."""
    counts = Counter(sample.configuration for sample in samples)
    return [1 / counts[sample.configuration] for sample in samples]


def rows_digest(samples: Iterable[Sample]) -> str:
    """SHA-256 (hex) of the rows' keys and measured values, independent of their order."""
    facts = sorted(_order(sample.row) for sample in samples)
    return hashlib.sha256(canonical_json(facts).encode()).hexdigest()


def _without_communicators(base: Baseline) -> Baseline:
    """The baseline of a run with other collectives than NCCL's, which has none of NCCL's buffers on the GPU."""
    device_bytes = base.peak_device_bytes - base.communicator_bytes
    return replace(base, communicator_bytes=0, peak_device_bytes=device_bytes)


def _mean_device(base: Baseline, others: Sequence[Baseline], job: TrainingJob) -> Baseline:
    """The baseline with the mean of reserved and device memory over all GPUs of the job, if all other ranks are like the
    first of `others` (empty: all are like this one)."""
    if not others:
        return base
    ranks = job.parallelism.world_size
    reserved = (base.peak_reserved_bytes + (ranks - 1) * others[0].peak_reserved_bytes) // ranks
    outside = base.peak_device_bytes - base.peak_reserved_bytes
    return replace(base, peak_reserved_bytes=reserved, peak_device_bytes=reserved + outside)


def _kind(reason: str) -> str:
    """A reason's first sentence without the names and numbers of its row, so that one line stands for each kind."""
    for pattern in (r"\s*\([^()]*=[^()]*\)", r"(?<!\w)'[^']*' ?", r"[-+]\d[\d.]*% "):
        reason = re.sub(pattern, "", reason)
    return reason.split(". ")[0].rstrip(".")


def _order(row: Measurement) -> list[Any]:
    """A sort key: the row's key and its measured values."""
    return [row.key, *(getattr(row, quantity) or 0 for quantity in QUANTITIES)]


def _reason(row: Measurement, scope_of: ScopeOf) -> str:
    """Why the row does not count; "" if it does."""
    if row.provenance not in ("measured", "published"):
        return f"provenance is {row.provenance}"
    if row.outcome not in ("ok", "out_of_memory"):
        return f"outcome is {row.outcome}"
    if row.out_of_scope:
        return f"out of scope: {row.out_of_scope}"
    if row.spoiled:
        return f"spoiled: {row.spoiled[0]}"
    out_of_memory = row.outcome == "out_of_memory"
    if not out_of_memory and all(getattr(row, quantity) is None for quantity in QUANTITIES):
        return "none of the four quantities was measured"
    outside = scope_of(row.job)
    if outside:
        return f"outside the ledger: {outside}"
    return OUT_OF_MEMORY if out_of_memory else ""


def _catalog_device(name: str) -> Device:
    from peakcast import catalog

    return catalog.gpu(name)


def _ledger_scope(job: TrainingJob) -> str:
    from peakcast.models.ledger.scope.scope import out_of_scope

    return out_of_scope(job)
