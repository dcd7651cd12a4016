"""What a project's configuration says of a vision-language model: the parts that it freezes, and how large images are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from peakcast.dialects.common.translation import Settings
from peakcast.jobs.images import MOST_PIXELS, Images, sees_images
from peakcast.jobs.spec import TrainingJob


def frozen_parts(settings: Settings, keys: Mapping[str, str]) -> tuple[str, ...]:
    """The frozen parts, of "vision", "projector" and "language". `keys`: part → the key that freezes it. Where no key says
    otherwise, the language model alone trains."""
    return tuple(part for part, key in keys.items() if settings.switch(key, part != "language"))


PIXELS_OF_A_TOKEN = 28**2
"""Of an image of Qwen2-VL and its like (transformers 5.17 models/qwen2_vl/image_processing_qwen2_vl.py: patches of 14 × 14,
four of which become one token). Other networks have fewer tokens."""


def with_frozen_parts(
    job: TrainingJob,
    parts: tuple[str, ...],
    settings: Settings,
    keys: Mapping[str, str],
    limits: Mapping[str, int | None] | None = None,
) -> TrainingJob:
    """`job` with `parts` frozen, for all weights and for adapters, and with an image in each sequence if its size is
    limited; a network without images is returned unchanged. `limits`: setting that limits the size of images -> most
    pixels, or None if the setting has another meaning."""
    if not sees_images(job.architecture):
        for key in limits or {}:
            settings.notes.unsupported.append(
                f"{key} is a setting of images, but {job.architecture.name} reads text only: the vision tower and the "
                "tokens of images are not in the number. Give the config.json of the network that reads images: --model.",
                key,
                "more",
            )
        return job
    if not any(map(settings.given, keys.values())):
        settings.notes.assumptions.append(
            f"{settings.project} freezes the vision tower and the projector by default."
        )
    job = job.replace(finetuning=replace(job.finetuning, frozen=parts))
    return _with_an_image(job, limits or {}, settings)


def _with_an_image(job: TrainingJob, limits: Mapping[str, int | None], settings: Settings) -> TrainingJob:
    """`job` with one image in each sequence, of the size that it may have at most."""
    key, pixels = next(((key, pixels) for key, pixels in limits.items() if pixels), ("", 0))
    side = min(math.isqrt(pixels), MOST_PIXELS)
    whole_rows = job.task == "train" and job.batch.form == "rows" and not job.batch.shortest_sequence
    if not whole_rows or job.loss.kind != "cross_entropy" or not 0 < side**2 < job.sequence_length * PIXELS_OF_A_TOKEN:
        return job
    settings.notes.assumptions.append(
        f"each sequence is assumed to have one image, as large as {key} allows, {side} x {side}; --images-per-sequence "
        "sets how many. Text alone needs less: --set images.per_sequence=0 --set images.height=null."
    )
    return job.replace(images=Images(per_sequence=1, height=side))
