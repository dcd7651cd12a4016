"""Translates a configuration of any dialect, with the files and settings that come with it, into a job."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from peakcast.core.bounded import is_folder
from peakcast.core.errors import PeakcastError, SpecError, near_misses
from peakcast.dialects.common.asked_versions import NO_VERSIONS, AskedVersions, with_versions
from peakcast.dialects.common.foreign import foreign
from peakcast.dialects.common.pasted import Document, Pasted, mapping_of_file, mapping_of_text
from peakcast.dialects.common.translation import AlternativeReading, Notes, Translation
from peakcast.dialects.recognise import DIALECTS, HUGGING_FACE_PARTS, Recognised, dialect_of, keys_of, recognised
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.spec import TrainingJob


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What the question gives with a configuration: other files, number of GPUs, another model, the dialect, versions."""

    files: tuple[str | Path | Document, ...] = ()
    num_gpus: int | None = None
    model: str | None = None
    dialect: str | None = None
    versions: AskedVersions = NO_VERSIONS

    def __bool__(self) -> bool:
        """Whether anything is given that only makes sense with a configuration; versions can be given for any job."""
        return bool(self.files or self.num_gpus is not None or self.model is not None or self.dialect is not None)


NOTHING = ReadOptions()
FEWEST_UNKNOWN = 6
"""Training arguments with at least this many unknown keys are treated as another program's, if most of their keys are
unknown."""


def translated(pasted: Pasted, options: ReadOptions = NOTHING) -> Translation:
    """The job of an `opened` configuration and `options`. Raises: SpecError or CatalogError naming the file or the key."""
    notes = Notes()
    notes.assumptions += pasted.remarks
    pasted = _with_options(pasted, options)
    if options.dialect is None and (sentence := foreign(keys_of(pasted.values), pasted.values, pasted.program)):
        raise SpecError(f"{pasted.where} {sentence}", parameter="job")
    forced = _named(options.dialect)
    found = [Recognised(forced, "", True)] if forced else recognised(pasted.values, pasted.program)
    name = found[0].name if found else None
    if name not in HUGGING_FACE_PARTS and pasted.model is None and "hf_config" in pasted.companions:
        pasted = replace(pasted, model=pasted.companions["hf_config"], used={"hf_config"})
    of_a_job = {field.name for field in fields(TrainingJob)}.intersection(pasted.values)
    if name is None and not pasted.program and of_a_job and 2 * len(of_a_job) >= len(pasted.values):
        name = "job"
    if name is None:
        raise _not_recognised(pasted)
    if name != "job":
        notes.assumptions.insert(0, _read_as(pasted, name, found))
    try:
        job = notes.include(_reader(name)(pasted))
    except SpecError as error:
        raise pasted.explained(error) from None
    if name == "training" and forced is None and _mostly_unknown(pasted, notes):
        raise _not_recognised(pasted)
    notes.others += _other_readings(pasted, name, found[1:], job)
    if name not in HUGGING_FACE_PARTS:
        _note_unused(pasted, options, notes)
    return with_versions(_with_allocator(notes.finish(job), pasted), options.versions)


def _with_options(pasted: Pasted, options: ReadOptions) -> Pasted:
    """`pasted` with what the question gives beside it, without files that are in `pasted` already since its launch script
    names them."""
    given = companions(options.files)
    read = [given[name] for name in pasted.used if name in given]
    given = {name: values for name, values in given.items() if name in pasted.used or values not in read}
    return replace(
        pasted,
        companions={**given, **{name: values for name, values in pasted.companions.items() if values}},
        num_gpus=pasted.num_gpus if options.num_gpus is None else options.num_gpus,
        model=options.model or pasted.model,
        versions=options.versions,
    )


def _mostly_unknown(pasted: Pasted, notes: Notes) -> bool:
    """Whether so few keys of `pasted` are known that it is another program's, which has some of the Trainer's by chance."""
    unknown = len(set(notes.unknown).intersection(map(str, pasted.values)))
    return unknown >= FEWEST_UNKNOWN and 2 * unknown > len(pasted.values)


def _not_recognised(pasted: Pasted) -> SpecError:
    """The error for a configuration of no known dialect."""
    module = "." in pasted.program and not pasted.program.endswith((".py", ".sh"))
    command = f"python -m {pasted.program}" if module else pasted.program
    return SpecError(
        f"{pasted.where} is not recognised (its keys: {_some(pasted.values)}). "
        + (f"Run it on fake tensors: peakcast dryrun -- {command} ... " if pasted.program else "")
        + f"{'Or give' if pasted.program else 'Give'} the model and the step as a job (--model, --micro-batch-size, "
        "--sequence-length, --sharding and the like); if peakcast reads such files, say what it is by --dialect.",
        parameter="job",
    )


def _other_readings(
    pasted: Pasted, name: str, others: Sequence[Recognised], job: TrainingJob
) -> Iterator[AlternativeReading]:
    """The readings of `pasted` as a configuration of each of the dialects `others`, without those that also give `job`, its
    reading as dialect `name`."""
    for other in others:
        with contextlib.suppress(PeakcastError):
            read = _reader(other.name)(pasted)
            way_out = f"Say which by --dialect {name} or --dialect {other.name}."
            if read.job != job:
                yield AlternativeReading(DIALECTS[other.name].title, read.job, way_out)


def _note_unused(pasted: Pasted, options: ReadOptions, notes: Notes) -> None:
    """Note the files of the question that the configuration has not read."""
    used = [pasted.companions[name] for name in pasted.used]
    for given in map(_read, options.files):
        if given.values not in used:
            notes.warnings.append(
                f"{given.where} is given with {pasted.where}, which does not use it; it is left out.", given.where
            )


def _with_allocator(read: Translation, pasted: Pasted) -> Translation:
    """`read` with expandable segments, if the environment of the launch script asks for them."""
    setting = "".join(pasted.env.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if "expandable_segments:true" not in setting.lower().replace(" ", ""):
        return read
    return read.changed(lambda job: job.replace(allocator=Allocator(expandable_segments=True)))


def _read_as(pasted: Pasted, name: str, found: Sequence[Recognised]) -> str:
    """The sentence that says which dialect was assumed, from what, and how certain that is."""
    title = f"{pasted.where} is read as {DIALECTS[name].title}"
    if not found or not found[0].rests_on:
        return f"{title}, as asked." if found else f"{title}."
    if found[0].sure:
        return f"{title}, by {found[0].rests_on}."
    return f"{title}, by {found[0].rests_on} alone, which other projects have too; --dialect says what it is."


def _reader(name: str) -> Callable[[Pasted], Translation]:
    module, _, function = DIALECTS[name].reader.partition(":")
    reader: Callable[[Pasted], Translation] = getattr(importlib.import_module(f"peakcast.dialects.{module}"), function)
    return reader


def _named(dialect: str | None) -> str | None:
    if dialect is not None and dialect not in DIALECTS:
        raise SpecError(
            f"dialect={dialect!r} must be one of {', '.join(DIALECTS)}{near_misses(dialect, DIALECTS)}".rstrip("?") + ".",
            parameter="dialect",
            value=dialect,
        )
    return dialect


class Companion(NamedTuple):
    """Another file of the same run."""

    where: str
    """Its name in messages."""
    name: str
    """The name by which a configuration may refer to it."""
    values: Mapping[str, Any]


def companions(files: Sequence[str | Path | Document]) -> dict[str, Mapping[str, Any]]:
    """Other files by their dialect and by their names. Raises: SpecError if one is not recognised or comes twice."""
    found: dict[str, Mapping[str, Any]] = {}
    for where, file_name, values in map(_read, files):
        name = dialect_of(values)
        if name in found and name in HUGGING_FACE_PARTS:
            title = DIALECTS[name].title
            raise SpecError(f"{where} is {title}, and another was given already; keep one.", parameter="with")
        if name is None:
            keys = _some(values)
            raise SpecError(f"{where} is not recognised (its keys: {keys}).", parameter="with")
        found[name] = values
        found[file_name] = values
    return found


def _read(file: str | Path | Document) -> Companion:
    if isinstance(file, Document):
        where = file.name or "the text after ---"
        return Companion(where, file.name, mapping_of_text(file.text, where, Path(file.name).suffix))
    path = Path(file)
    path = path / "config.json" if is_folder(path) else path
    return Companion(str(path), path.name, mapping_of_file(path))


def _some(values: Mapping[str, Any]) -> str:
    keys = [str(key)[:40] for key in values]
    return ", ".join(keys[:8]) + (", ..." if len(keys) > 8 else "") if keys else "none"
