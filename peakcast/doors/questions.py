"""A question: one job, one GPU type, one rank; the job may be given in any form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from peakcast import catalog
from peakcast.catalog import Device
from peakcast.catalog.constants import own_constants
from peakcast.core.bounded import is_file
from peakcast.core.errors import SpecError, near_misses
from peakcast.core.units import GIB
from peakcast.core.versions import check_versions
from peakcast.dialects.common.asked_versions import NO_VERSIONS, AskedVersions, with_versions
from peakcast.dialects.common.foreign import foreign
from peakcast.dialects.common.pasted import documents
from peakcast.dialects.common.text import ENDINGS
from peakcast.dialects.common.translation import Translation
from peakcast.dialects.opening import is_text, opened
from peakcast.dialects.translate import NOTHING, ReadOptions, companions, translated
from peakcast.jobs.spec import MOST_RANKS, TrainingJob

MOST_HOST_GIB = 2**20
"""No node has more host memory; a larger value is in another unit by mistake."""
FORMS = ("job", "megatron", "huggingface")
"""Forms in which a job can be given: peakcast's own, Megatron-LM's command line, Hugging Face's objects."""
_KEYS = {
    "megatron": ("arguments", "num_gpus", "env", "versions"),
    "huggingface": ("config", "training_arguments", "peft", "deepspeed", "fsdp", "num_gpus", "versions"),
}

Rank = Literal["worst", "last"] | int | str | None
"""The rank of an answer: the worst (None means the same), the last (world size − 1), or a number (also as text)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A job with the assumptions made in reading it, the GPU type, and the rank (None: the worst)."""

    translation: Translation
    device: Device
    rank: int | None = None

    @property
    def job(self) -> TrainingJob:
        """The job asked about."""
        return self.translation.job


def question(
    job: object,
    gpu: str | Device,
    rank: Rank = None,
    *,
    host_memory_gib: float | None = None,
    gpus_per_node: int | None = None,
    versions: AskedVersions = NO_VERSIONS,
) -> Question:
    """The question about `job`, given in any form that `translation_of` reads, with these `versions`. Nodes have
    `gpus_per_node` GPUs (None: 8) and `host_memory_gib` of memory (None: not known). Raises: SpecError or CatalogError."""
    device = on_node(gpu if isinstance(gpu, Device) else catalog.gpu(gpu), host_memory_gib, gpus_per_node)
    translation = translation_of(job, ReadOptions(versions=versions))
    return Question(translation=translation, device=device, rank=rank_number(rank, translation.job))


def on_node(device: Device, host_memory_gib: float | None, gpus_per_node: int | None) -> Device:
    """`device` in a node with this host memory and number of GPUs (None leaves what it has), and with what `peakcast
    collect constants` has read on this machine. Raises: SpecError; RecordError for a damaged file of readings."""
    if device.constants is None:
        device = replace(device, constants=own_constants(device.name))
    if host_memory_gib is not None:
        plain = isinstance(host_memory_gib, (int, float)) and not isinstance(host_memory_gib, bool)
        if not plain or not 0 < host_memory_gib <= MOST_HOST_GIB:
            raise SpecError(
                f"host_memory_gib={host_memory_gib!r} must be a number above 0 and at most {MOST_HOST_GIB:,}, the GiB of "
                "host memory of a node, such as 2048.",
                parameter="host_memory_gib",
                value=host_memory_gib,
            )
        device = replace(device, host_memory_bytes=int(host_memory_gib * GIB))
    if gpus_per_node is not None:
        if isinstance(gpus_per_node, bool) or not isinstance(gpus_per_node, int) or not 1 <= gpus_per_node <= MOST_RANKS:
            raise SpecError(
                f"gpus_per_node={gpus_per_node!r} must be a whole number from 1 to {MOST_RANKS:,}, such as 8.",
                parameter="gpus_per_node",
                value=gpus_per_node,
            )
        device = replace(device, gpus_per_node=gpus_per_node)
    return device


def translation_of(job: object, options: ReadOptions = NOTHING) -> Translation:
    """Read `job` as a `TrainingJob`. It may be a TrainingJob, its mapping, a mapping with one of `FORMS` as its only key, a
    configuration of another project (its file, its text or its mapping, recognised by its content), or the name of an
    architecture, which is then trained with all defaults. `options`: other files that belong to it, the number of GPUs,
    another model; a text may contain other files itself, each after a line of `---` (see `documents`).

    Raises: SpecError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    return with_versions(_read(job, options), options.versions)


def _read(job: object, options: ReadOptions) -> Translation:
    from peakcast.dialects.common.job_file import read_job

    if isinstance(job, Translation):
        return job
    if isinstance(job, TrainingJob):
        return Translation(job=job)
    if isinstance(job, (str, Path)) and not is_configuration(job):
        job = {"architecture": str(job)}
    if isinstance(job, str) and is_text(job):
        (_, job), *others = documents(job)
        options = replace(options, files=(*options.files, *others))
    pasted = opened(job, companions(options.files)) if isinstance(job, (str, Path, Mapping)) else None
    values = pasted.values if pasted is not None else job
    if isinstance(values, Mapping) and len(values) == 1:
        ((form, value),) = values.items()
        if form == "job":
            return translation_of(value, options)
        if form in FORMS:
            return _translate(form, value, options)
    if pasted is None or (not options and "architecture" in pasted.values and not foreign(pasted.values, {}, "")):
        return read_job(values, options.versions)  # type: ignore[arg-type]
    return translated(pasted, options)


def is_configuration(name: str | Path) -> bool:
    """Whether `name` is the path of a file or the text of a configuration, rather than the name of an architecture."""
    if isinstance(name, Path) or is_text(name):
        return True
    return Path(name).suffix.lower() in ENDINGS or is_file(name)


def rank_number(rank: Rank, job: TrainingJob) -> int | None:
    """The number of the requested rank; None for the worst. Raises: SpecError."""
    world_size = job.parallelism.world_size
    if rank is None or rank == "worst":
        return None
    if rank == "last":
        return world_size - 1
    number = int(rank) if isinstance(rank, str) and rank.isascii() and rank.isdigit() and len(rank) < 10 else rank
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < world_size:
        raise SpecError(
            f"rank={rank!r} must be 'worst', 'last' or a number from 0 to {world_size - 1}, the ranks of this job.",
            parameter="rank",
            value=rank,
        )
    return number


def _translate(form: str, value: object, options: ReadOptions) -> Translation:
    known = _KEYS[form]
    if not isinstance(value, Mapping):
        raise SpecError(f"{form}={value!r} must be a mapping with {', '.join(known)}.", parameter=form, value=value)
    for key in value:
        if key not in known:
            raise SpecError(
                f"{form}.{key} is not a known key{near_misses(str(key), known) or '; known: ' + ', '.join(known)}",
                parameter=f"{form}.{key}",
                value=value[key],
            )
    if known[0] not in value:
        raise SpecError(f"{form}.{known[0]} is required and missing; add it.", parameter=f"{form}.{known[0]}")
    if options.num_gpus is not None:
        value = {**value, "num_gpus": options.num_gpus}
    if options.versions:
        value = {**value, "versions": options.versions.of(form, check_versions(value.get("versions") or {}))}
    if form == "megatron":
        from peakcast.dialects.megatron.job import from_megatron

        return from_megatron(**value)
    from peakcast.dialects.huggingface.job import from_huggingface

    return from_huggingface(**value)
