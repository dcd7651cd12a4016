"""One question of the page: what was pasted or chosen, the knobs that change it, and the answer with its explanation.

Anything wrong with it becomes a `PeakcastError` whose message the page shows; sizes are limited before anything is
computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from peakcast.answers.explanation import Explanation
from peakcast.answers.prediction import Answer
from peakcast.catalog import Device
from peakcast.core.errors import SpecError
from peakcast.dialects.common.asked_versions import asked_versions
from peakcast.dialects.common.text import no_files
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.job_flags import FLAGS
from peakcast.doors.questions import Question, question, translation_of
from peakcast.explaining.advice import changed
from peakcast.jobs.spec import TrainingJob
from peakcast.searching.found import Found

LONGEST_NAME = 255
"""The longest name in a file system; no network's name is longer."""
MOST_CHARACTERS = 200_000
"""A longer text is no configuration: the longest of a real project has 20,000 characters."""
MOST_LAYERS = 1_000
MOST_STAGES = 256
"""Limits the time of an answer, which computes a ledger for each stage of a pipeline, virtual stages included; the deepest
published network has 126 layers. Data-parallel ranks are equal, so a job may have any number of them."""
MOST_GPUS = 1_024
MOST_PLANS = 10
"""Limits the time and the length of a search."""
FIELDS = {flag.name: flag.fields for flag in FLAGS}
"""Name of a knob, which is that of the command-line flag -> fields of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageState:
    """The state of the page, which is enough to ask the same question again."""

    text: str = ""
    """A pasted configuration, with other files of its run after lines of `---`, or the name of a model."""
    num_gpus: int | None = None
    """Number of GPUs of the whole run, if the launcher and not the configuration says it."""
    model: str = ""
    """The network to use instead of the one that the configuration names."""
    versions: str = ""
    """Versions of packages ("torch=2.9,transformers=4.45.2"), or the tag of NVIDIA's PyTorch image ("26.04")."""
    gpu: str = "H100-80GB"
    host_memory_gib: float | None = None
    """Host memory of a node, if the verdict is to include it."""
    gpus_per_node: int | None = None
    """Number of GPUs that share it; None: 8."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Knob -> value, for knobs that change the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A search of the page: the question whose job is laid out, and over how many GPUs; None: those of its run."""

    asked: PageState
    num_gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What the page shows."""

    asked: PageState
    job: TrainingJob
    device: Device
    prediction: Answer
    explanation: Explanation


def answered(asked: PageState) -> Answered:
    """The answer to `asked`. Raises: SpecError or CatalogError with a message for the page."""
    from peakcast.doors.answering import full_answer
    from peakcast.doors.explaining import explanation

    about = _about(asked)
    prediction = full_answer(about, progress=_refuse_to_wait)
    explained = explanation(about.job, about.device, prediction.rank)
    return Answered(asked=asked, job=about.job, device=about.device, prediction=prediction, explanation=explained)


def _refuse_to_wait(what: str) -> NoReturn:
    """Refuse `what`, which is about to begin and takes longer than the page waits. Raises: SpecError with the way out."""
    raise SpecError(
        f"this needs {what}, longer than a page should wait: run `peakcast predict` with it once, on the machine that "
        "serves this page, and ask here again.",
        parameter="architecture",
    )


def searched(question: Searched) -> Found:
    """The layouts that fit, as `peakcast search` finds them. Raises: SpecError or CatalogError with a message for the
    page."""
    from peakcast.searching.search import search
    from peakcast.searching.search_settings import SearchSettings

    about = _about(question.asked)
    num_gpus = question.num_gpus or about.job.parallelism.world_size
    if num_gpus > MOST_GPUS:
        raise SpecError(
            f"num_gpus={num_gpus:,} is more than this page searches ({MOST_GPUS:,}); ask `peakcast search` on the command "
            "line.",
            parameter="num_gpus",
            value=num_gpus,
        )
    settings = SearchSettings(
        top=MOST_PLANS, gpus_per_node=about.device.gpus_per_node, findings=about.translation.findings
    )
    return search(about.job, about.device, num_gpus, settings=settings)


def _about(asked: PageState) -> Question:
    """What is asked about, with the knobs that are set."""
    with no_files():
        read = _question(asked)
    job = _changed(read.job, asked.knobs)
    changes = tuple(
        f"{name}={value} is set on this page and replaces the value of the configuration."
        for name, value in asked.knobs.items()
        if value not in (None, "") and job != read.job
    )
    _check_sizes(job)
    translation = replace(read.translation, job=job, assumptions=(*read.translation.assumptions, *changes))
    return replace(read, translation=translation)


def _check_sizes(job: TrainingJob) -> None:
    """Refuse jobs that would take longer than seconds. Raises: SpecError."""
    layout = job.parallelism
    sizes = {
        "num_hidden_layers": (job.architecture.num_hidden_layers, MOST_LAYERS),
        "pipeline_parallel_size × virtual_pipeline_stages": (
            layout.pipeline_parallel_size * layout.virtual_pipeline_stages,
            MOST_STAGES,
        ),
    }
    for name, (size, most) in sizes.items():
        if size > most:
            raise SpecError(
                f"{name}={size:,} is more than this page answers ({most:,}); ask `peakcast predict` on the command line.",
                parameter=name,
                value=size,
            )


def _question(asked: PageState) -> Question:
    text = asked.text.strip()
    if not text:
        raise SpecError("nothing was asked; pick a model, or paste a configuration.", parameter="text")
    characters = len(text) + len(asked.model) + len(asked.versions)
    if characters > MOST_CHARACTERS:
        raise SpecError(
            f"the text has {characters:,} characters; at most {MOST_CHARACTERS:,} are read. Paste one configuration.",
            parameter="text",
        )
    versions = asked.versions.strip()
    image = versions if versions and "=" not in versions else None
    options = ReadOptions(
        num_gpus=asked.num_gpus,
        model=asked.model.strip() or None,
        versions=asked_versions(None if image else versions or None, image),
    )
    job = translation_of(_job(text), options)
    return question(job, asked.gpu, host_memory_gib=asked.host_memory_gib, gpus_per_node=asked.gpus_per_node)


def _job(text: str) -> str:
    """The job as `api` takes it: one line without structure is the name of a network, everything else the text of a
    configuration."""
    if "\n" in text or any(mark in text for mark in "{:=") or text.startswith("-"):
        return f"{text}\n"
    if len(text) > LONGEST_NAME:
        raise SpecError(
            f"the text is one word of {len(text):,} characters, which names no network; paste a configuration, or a "
            "catalog name such as llama-3.1-8b.",
            parameter="text",
        )
    return text


def _changed(job: TrainingJob, knobs: Mapping[str, Any]) -> TrainingJob:
    """`job` with the fields changed that the knobs set. Raises: SpecError."""
    changes = {name: value for name, value in knobs.items() if value not in (None, "")}
    unknown = next((name for name in changes if name not in FIELDS), None)
    if unknown is not None:
        raise SpecError(f"{unknown} is not a knob of this page.", parameter=unknown)
    fields = {path: value for name, value in changes.items() for path in FIELDS[name]}
    return changed(job, fields) if fields else job
