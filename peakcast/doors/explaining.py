"""The implementation of `api.explain`: reads the question, chooses the source of the timeline, writes the files asked
for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from peakcast import catalog
from peakcast.answers.explanation import Explanation
from peakcast.catalog import Device
from peakcast.core.errors import SpecError
from peakcast.core.findings import Finding, ordered
from peakcast.dialects.common.translation import Translation
from peakcast.doors.destinations import output_errors
from peakcast.doors.questions import Rank, on_node, rank_number, translation_of
from peakcast.doors.recipe_files import read_recipe_file, recipe_from
from peakcast.doors.recording import ensure_recipe
from peakcast.explaining.explain import explain, of_module
from peakcast.explaining.picture import check_picture_path, write_picture
from peakcast.explaining.snapshot import write_snapshot
from peakcast.explaining.traced_layers import by_layer
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.recorded.covering import no_recipe
from peakcast.models.recipes.shelf import wants_recipe
from peakcast.networks.undescribed import for_tracing
from peakcast.timelines.timeline import Timeline


def explanation(
    job: object,
    gpu: str | Device | None,
    rank: Rank,
    *,
    against: object = None,
    trace: bool = False,
    module: str | None = None,
    recipe: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """The explanation asked for. `progress` as in `api.predict`. Raises: SpecError, CatalogError, CollectorError or
    RecordError."""
    if recipe is not None:
        return _by_recipe(Path(recipe), job, gpu, rank, against, trace=trace)
    device = catalog.gpu(gpu) if isinstance(gpu, str) else gpu
    device = on_node(device, None, None) if device is not None else None
    if module is not None:
        return _of_module(module, device, against)
    with for_tracing() if trace else contextlib.nullcontext():
        translation = translation_of(job)
    if trace and translation.job.architecture.kind == "undescribed":
        return _undescribed(translation.job, device, against)
    ensure_recipe(translation.job, progress)
    return _of_job(translation, device, rank, against, trace=trace)


def _of_module(module: str, device: Device | None, against: object) -> Explanation:
    """The explanation of a traced module, given as "FILE.py:FUNCTION"."""
    from peakcast.collectors.tracing.module import trace_module

    if against is not None:
        raise SpecError("against cannot be used with module: a module is no job; leave one out.", parameter="against")
    return of_module(by_layer(trace_module(module, device.name if device else None)["steady"]), module, device)


def _of_job(
    translation: Translation, device: Device | None, rank: Rank, against: object, *, trace: bool
) -> Explanation:
    """The explanation of a job that has been read, beside the job `against` if there is one."""
    other = translation_of(against) if against is not None else None
    try:
        found = explain(
            translation.job,
            device,
            rank_number(rank, translation.job),
            other.job if other is not None else None,
            source="trace" if trace else "ledger",
            timeline_of=partial(_traced, device) if trace else None,
        )
    except NotImplementedError as error:
        raise SpecError(f"this job cannot be explained: {error}", parameter="job") from error
    recorded = not trace and wants_recipe(translation.job) and not no_recipe(translation.job)
    return replace(
        found,
        source="recipe" if recorded else found.source,
        allocator=translation.job.allocator,
        assumptions=tuple(dict.fromkeys((*translation.assumptions, *found.assumptions))),
        findings=ordered((*translation.findings, *found.findings)),
    )


def _by_recipe(
    path: Path, job: object, gpu: str | Device | None, rank: Rank, against: object, *, trace: bool
) -> Explanation:
    """The explanation of `job` (None: the job that was saved with the recipe) from the recipe in the file at `path`."""
    if trace:
        raise SpecError("trace and recipe contradict each other; give one of them.", parameter="trace", value=trace)
    kept = read_recipe_file(path)
    translation = translation_of(kept.job if job is None else job)
    with recipe_from(kept, path, translation.job) as said:
        found = explanation(translation, gpu, rank, against=against)
    return replace(found, assumptions=(said, *found.assumptions))


def _undescribed(job: TrainingJob, device: Device | None, against: object) -> Explanation:
    """The explanation of a network that only transformers knows, from its trace alone."""
    name = job.architecture.name
    if against is not None:
        raise SpecError(f"against cannot be used with {name!r}, which is only traced; leave it out.", parameter="against")
    found = of_module(_traced(device, job, 0), name, device)
    sentence = f"model_type={job.architecture.model_type!r} is not known to the ledger: this is the trace alone."
    finding = Finding("not_modelled", "architecture", "either", sentence)
    return replace(found, findings=(*found.findings, finding))


def _traced(device: Device | None, job: TrainingJob, rank: int) -> Timeline:
    from peakcast.collectors.tracing.trace import trace_job

    return by_layer(trace_job(job, rank=rank, gpu=device.name if device else None)["steady"])


def write(found: Explanation, picture: Path | None, snapshot: Path | None) -> Explanation:
    """Write the files asked for, and return `found` with their names. Raises: SpecError or RecordError."""
    written = []
    if picture is not None:
        check_picture_path(Path(picture))
        capacity = catalog.gpu(found.gpu).cuda_memory_bytes if found.gpu else None
        where = f" on {found.gpu}" if found.gpu else ""
        title = f"{found.architecture}{where}, rank {found.rank}: one steady step, by the {found.source}"
        with output_errors(Path(picture)):
            write_picture(found.timeline, Path(picture), title, capacity)
        written.append(str(picture))
    if snapshot is not None:
        with output_errors(Path(snapshot)):
            write_snapshot(found.timeline, Path(snapshot), found.allocator)
        written.append(str(snapshot))
    return replace(found, written=tuple(written))
