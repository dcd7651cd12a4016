"""`Images`: the images that a vision-language model gets with its text, in the terms of people who prepare data."""

from __future__ import annotations

from dataclasses import dataclass

from peakcast.core.errors import SpecError
from peakcast.core.fields import require_at_most, require_not_negative, require_positive
from peakcast.jobs.architecture import Architecture

MOST_PIXELS = 2**15
"""Most pixels of a side of an image."""
MOST_IMAGES = 2**10
"""Most images of a sequence."""


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
