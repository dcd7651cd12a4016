"""A question: one job, one GPU type, one rank, however the job was written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peakcast import catalog
from peakcast.catalog import Device
from peakcast.dialects.translation import Translation
from peakcast.errors import SpecError, near_misses
from peakcast.spec import TrainingJob

FORMS = ("job", "megatron", "huggingface")
"""The ways to write a job down: ours, Megatron-LM's command line, Hugging Face's objects."""
_KEYS = {
    "megatron": ("arguments", "num_gpus", "env"),
    "huggingface": ("config", "training_arguments", "peft", "deepspeed", "fsdp", "num_gpus"),
}
_FILE_ENDINGS = (".yaml", ".yml", ".json")

Rank = Literal["worst", "last"] | int | str | None
"""Which rank an answer is of: the worst (None means the same), the last (world size − 1), or a number (also as text)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: a job with what reading it took for granted, where it runs, and of which rank (None: the worst)."""

    translation: Translation
    device: Device
    rank: int | None = None

    @property
    def job(self) -> TrainingJob:
        """The job asked about."""
        return self.translation.job


def question(job: object, gpu: str | Device, rank: Rank = None) -> Question:
    """The question about `job`, written in any way that `translation_of` reads. Raises: SpecError or CatalogError."""
    device = gpu if isinstance(gpu, Device) else catalog.gpu(gpu)
    translation = translation_of(job)
    return Question(translation=translation, device=device, rank=rank_number(rank, translation.job))


def translation_of(job: object) -> Translation:
    """`job` read as a `TrainingJob`: one, its mapping, a mapping with one of `FORMS` as its only key, the path of a file
    with such a mapping, or the catalog name of an architecture, which then trains with every default.

    Raises: SpecError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    from peakcast.dialects.job_file import job_from_mapping

    if isinstance(job, (str, Path)):
        job = mapping_named(job)
    if isinstance(job, Mapping) and len(job) == 1:
        ((form, value),) = job.items()
        if form == "job":
            return translation_of(value)
        if form in FORMS:
            return _translate(form, value)
    return Translation(job=job if isinstance(job, TrainingJob) else job_from_mapping(job))  # type: ignore[arg-type]


def mapping_named(name: str | Path) -> Mapping[str, Any]:
    """The mapping in the file called `name`, or that of a job which trains the catalog's architecture of that name."""
    from peakcast.dialects.job_file import read_mapping

    path = Path(name)
    if isinstance(name, Path) or path.suffix.lower() in _FILE_ENDINGS or path.is_file():
        return read_mapping(path)
    return {"architecture": name}


def rank_number(rank: Rank, job: TrainingJob) -> int | None:
    """The number of the rank asked for, None for the worst. Raises: SpecError."""
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


def _translate(form: str, value: object) -> Translation:
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
    if form == "megatron":
        from peakcast.dialects.megatron import from_megatron

        return from_megatron(**value)
    from peakcast.dialects.huggingface import from_huggingface

    return from_huggingface(**value)
