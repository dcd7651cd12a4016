"""`Images`: the images that a vision-language model gets with its text, in the terms of people who prepare data."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.fields import require_at_most, require_not_negative, require_positive
from peakcast.jobs.architecture import Architecture

MOST_PIXELS = 2**15
"""Most pixels of a side of an image."""
MOST_IMAGES = 2**10
"""Most images of a sequence."""
USUAL_SIDE = 224
"""Pixels of a side of the images of networks whose configuration has no size: what their image processors crop to
(transformers 5.17 models/resnet, models/convnext)."""
RGB = 3
IMAGE_CLASSIFIER = "ForImageClassification"
"""What the names of classes end in that put images into classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of each sequence, all of one size. The network's processor decides how many tokens stand for one; these
    tokens are part of `sequence_length`."""

    per_sequence: int = 0
    """0: a step with text only, in which the vision tower does not run."""
    height: int | None = None
    """Height of an image in pixels before the processor resizes it."""
    width: int | None = None
    """Width in pixels; null means `height`."""

    def __post_init__(self) -> None:
        require_not_negative(self, "per_sequence", where="images.")
        require_positive(self, "height", "width", where="images.")
        require_at_most(MOST_IMAGES, self, "per_sequence", where="images.")
        require_at_most(MOST_PIXELS, self, "height", "width", where="images.")
        if self.per_sequence and self.height is None:
            raise SpecError(
                f"images.height is missing and images.per_sequence={self.per_sequence} needs it; give the images' height "
                "in pixels, and images.width where they are not square.",
                parameter="images.height",
            )
        if self.height is None and self.width is not None:
            raise SpecError(
                f"images.width={self.width} is given without images.height; give both, or the height of square images.",
                parameter="images.width",
                value=self.width,
            )

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        height = self.height or 0
        return height, self.width or height

    def __str__(self) -> str:
        """In the words of answers: "2 images of 448 x 448"."""
        count = f"{self.per_sequence} image{'' if self.per_sequence == 1 else 's'}"
        return f"{count} of {self.size[0]} x {self.size[1]}"


def sees_images(architecture: Architecture) -> bool:
    """Whether the network has a part for images, according to its configuration."""
    return architecture.kind == "multimodal" or '"vision_config":' in architecture.configuration


def sees_only_images(architecture: Architecture) -> bool:
    """Whether a network without rules of its own puts images into classes and reads no words, such as ViT: its batches are
    images, one a sequence, and no tensor depends on `sequence_length`. A network that compares can be trained so, without
    its part for captions."""
    alone = compares_images(architecture.model_type) and IMAGE_CLASSIFIER in architecture.configuration
    return alone or classifies_images(architecture.model_type)


def classifies_images(model_type: object) -> bool:
    """Whether the networks of a family put images into classes."""
    return model_type in _families()["classify"]


def compares_images(model_type: object) -> bool:
    """Whether the networks of a family compare images with captions, such as CLIP: each sequence is a caption, and has one
    image."""
    return model_type in _families()["compare"]


def reads_pixels(architecture: Architecture) -> bool:
    """Whether a network is given an image for each sequence, of one size, whatever else it reads."""
    return classifies_images(architecture.model_type) or compares_images(architecture.model_type)


def pixels_of_image(images: Images, architecture: Architecture) -> tuple[int, int, int]:
    """(channels, height, width) of the images of a network that `reads_pixels`: the size that is asked for, else that of
    its configuration or image processor."""
    config = json.loads(architecture.configuration or "{}")
    parts = [part for part in (config.get("vision_config"), config) if isinstance(part, Mapping)]
    channels = int(next((part["num_channels"] for part in parts if part.get("num_channels")), RGB))
    if images.per_sequence:
        return channels, *images.size
    side = _families()["crops"].get(architecture.model_type) or next(
        (part["image_size"] for part in parts if part.get("image_size")), USUAL_SIDE
    )
    return (channels, int(side[0]), int(side[1])) if isinstance(side, list) else (channels, int(side), int(side))


@cache
def _families() -> dict[str, Any]:
    return tomllib.loads(files("peakcast.catalog").joinpath("image_networks.toml").read_text(encoding="utf-8"))


def check_images(images: Images, architecture: Architecture, *, whole_rows: bool) -> None:
    """Refuse images for a network that cannot use them. Raises: SpecError."""
    if not images.per_sequence:
        if images.height is not None:
            raise SpecError(
                f"images.height={images.height} is the size of images, and images.per_sequence=0 has none; say how many "
                "each sequence has.",
                parameter="images.per_sequence",
                value=0,
            )
        return
    if reads_pixels(architecture) and images.per_sequence > 1:
        raise SpecError(
            f"images.per_sequence={images.per_sequence} must be 1: {architecture.name!r} reads one image for each of "
            "micro_batch_size; raise that instead.",
            parameter="images.per_sequence",
            value=images.per_sequence,
        )
    if not architecture.configuration:
        raise SpecError(
            f"images.per_sequence={images.per_sequence} needs a network that sees images, and {architecture.name!r} reads "
            "text alone; give the config.json of a vision-language model, or leave the images out.",
            parameter="images.per_sequence",
            value=images.per_sequence,
        )
    if not whole_rows:
        raise SpecError(
            f"images.per_sequence={images.per_sequence} is counted in training batches of full rows; use batch.form: rows "
            "without batch.shortest_sequence, and task: train.",
            parameter="images.per_sequence",
            value=images.per_sequence,
        )
