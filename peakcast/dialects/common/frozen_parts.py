"""Parts of a vision-language model that a project's configuration freezes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from peakcast.dialects.common.translation import Settings
from peakcast.jobs.images import sees_images
from peakcast.jobs.spec import TrainingJob


def frozen_parts(settings: Settings, keys: Mapping[str, str]) -> tuple[str, ...]:
    """The frozen parts, of "vision", "projector" and "language". `keys`: part → the key that freezes it. Where no key says
    otherwise, the language model alone trains."""
    return tuple(part for part, key in keys.items() if settings.switch(key, part != "language"))


def with_frozen_parts(
    job: TrainingJob, parts: tuple[str, ...], settings: Settings, keys: Mapping[str, str], limits: Iterable[str] = ()
) -> TrainingJob:
    """`job` with `parts` frozen, for all weights and for adapters; networks without images as they are. `limits`: settings
    that are given and limit the size of images."""
    if not sees_images(job.architecture):
        for key in limits:
            settings.notes.unsupported.append(
                f"{key} is of images, and {job.architecture.name} reads text alone: the vision tower and the tokens of "
                "images are not in the number. --model takes the config.json of a network that sees images.",
                key,
                "more",
            )
        return job
    if not any(map(settings.given, keys.values())):
        settings.notes.assumptions.append(
            f"{settings.project} freezes the vision tower and the projector unless it is told not to."
        )
    return job.replace(finetuning=replace(job.finetuning, frozen=parts))
