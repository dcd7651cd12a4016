"""Images in a vision-language model's batch: the output of the library's own image processor for blank images, and the
tokens that stand for them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from peakcast.core.errors import CollectorError
from peakcast.jobs.images import reads_pixels
from peakcast.jobs.spec import TrainingJob

PLACEHOLDERS = ("image_token_id", "image_token_index")
"""Keys of configurations for the id of the token that represents a part of an image."""
ALIKE = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
    "max_image_tiles": "max_num_tiles",
}
"""Sizes of image processors -> the names that configurations use for them."""
IDEFICS_TILES = 4
"""Number of tiles along the longer side of an image, into which Idefics3 and SmolVLM cut it (`size` over
`max_image_size`)."""
SIZED_BY_CHECKPOINT = "timm_wrapper"
"""The `model_type` of towers whose image processor takes its sizes from a checkpoint and has none by itself."""
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names that processors use for the tensor that marks image tokens with 1."""


def refuse(job: TrainingJob) -> None:
    """Refuse a job with images, for loops that make batches of their own. Raises: CollectorError."""
    if job.images.per_sequence:
        raise CollectorError(
            f"images.per_sequence={job.images.per_sequence} is run with cross-entropy and a loop of calls, not with the "
            "Trainer's own loop nor preferences; leave framework_options.loop and loss.kind out.",
            parameter="images.per_sequence",
            value=job.images.per_sequence,
        )


def with_images(batch: Mapping[str, torch.Tensor], job: TrainingJob, model: Any, device: str) -> dict[str, torch.Tensor]:
    """`batch` with `job.images` in every sequence. Their tokens come first, and one text token comes before each image.

    Raises: CollectorError when the images do not fit in the sequence, or the library has no rule for the network's
    images.
    """
    seen = inputs_of(job, model)
    tokens = _features_of_image(job, model, seen, device)
    check_fit(job, tokens)
    found = dict(batch)
    found["input_ids"] = _with_placeholders(batch["input_ids"], job, model.config, tokens)
    found["labels"] = found["input_ids"].clone()
    accepted = inspect.signature(model.forward).parameters
    for name in TOKEN_TYPES:
        if name in accepted:
            found[name] = _placeholders(job, tokens, found["input_ids"].device).to(torch.long)
            break
    if "cross_attention_mask" in accepted:  # every token attends to every tile
        tiles = seen["aspect_ratio_mask"].shape[1:] if "aspect_ratio_mask" in seen else (job.images.per_sequence,)
        found["cross_attention_mask"] = torch.ones((*found["input_ids"].shape, *tiles), dtype=torch.long, device=device)
    return found | _on_device(seen, job.micro_batch_size, device)


def check_fit(job: TrainingJob, tokens: int) -> None:
    """Check that the tokens of `job.images` fit in a sequence of `tokens`. Raises: CollectorError."""
    images = job.images
    needed = images.per_sequence * (tokens + 1)
    if needed > job.sequence_length:
        raise CollectorError(
            f"images.per_sequence={images.per_sequence} does not fit: {images} pixels are {tokens:,} tokens each, which "
            f"with a token of text before each need {needed:,} of sequence_length={job.sequence_length:,}; raise the "
            "length to at least as many, or give fewer or smaller images.",
            parameter="images.per_sequence",
            value=images.per_sequence,
        )


def inputs_of(job: TrainingJob, model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Name -> value of the network's arguments for the images of one sequence. Raises: CollectorError."""
    processor = image_processor_of(model.config)
    blank = np.zeros((*job.images.size, 3), dtype=np.uint8)
    with _disable_current_modes():
        try:
            made = processor(images=[[blank] * job.images.per_sequence], return_tensors="np")
        except Exception as error:  # processors reject sizes with errors of any class
            raise CollectorError(
                f"images.height={job.images.size[0]}: {type(processor).__name__} refuses {job.images}: {error}; give "
                "another size.",
                parameter="images.height",
                value=job.images.size[0],
            ) from error
    accepted = inspect.signature(model.forward).parameters
    return {name: np.asarray(value) for name, value in made.items() if name in accepted}


def image_processor_of(config: Any) -> Any:
    """The image processor of the network's family, with its class's defaults and the sizes that the configuration has.

    Raises: CollectorError if the family has none in this library.
    """
    classes = _processor_classes(config)
    if not classes:
        raise CollectorError(
            f"model_type={config.model_type!r} has no image processor in the installed transformers; leave the images out.",
            parameter="images.per_sequence",
        )
    for each in classes:
        with contextlib.suppress(ImportError):  # it needs torchvision
            return each(**_told(each(), config))
    raise CollectorError(
        f"{classes[0].__name__} needs a package that is missing here; install it with: pip install pillow torchvision",
        parameter="images.per_sequence",
    )


def _processor_classes(config: Any) -> list[Any]:
    """Classes of image processors for `config`, those with fewest dependencies first: Pillow's before torchvision's. If a
    vision tower has its own image processor, that one is used (Pixtral's, as a tower of Llava)."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

    parts = [part for part in (getattr(config, "vision_config", None), config) if part is not None]
    owners = [type(part) for part in parts if getattr(part, "model_type", "") != SIZED_BY_CHECKPOINT]
    owners += _with_the_same_processor(config)
    found = next((IMAGE_PROCESSOR_MAPPING[owner] for owner in owners if owner in IMAGE_PROCESSOR_MAPPING), None)
    if found is None:
        return []
    by_backend = found if isinstance(found, Mapping) else dict(zip(("pil", "torchvision"), found, strict=False))
    classes = [by_backend[name] for name in ("pil", "torchvision") if by_backend.get(name) is not None]
    return [_own_module_has(each) or each for each in classes]


def _with_the_same_processor(config: Any) -> list[type]:
    """Configuration classes of families whose inputs the same processor prepares, such as Qwen3-VL's for its mixture of
    experts."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES as PROCESSORS

    own = PROCESSORS.get(config.model_type)
    families = [family for family, name in PROCESSORS.items() if name == own and own is not None]
    return [CONFIG_MAPPING[family] for family in families if family in CONFIG_MAPPING]


def _own_module_has(named: Any) -> Any:
    """The class with the name of `named` from the family's own module. If torchvision is missing, the library exports a
    placeholder under this name, although only videos of the family need torchvision (5.17: SmolVLM)."""
    if not getattr(named, "is_dummy", False):
        return None
    family = named.__name__.partition("ImageProcessor")[0].lower()
    with contextlib.suppress(ImportError, AttributeError):
        module = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
        return getattr(module, named.__name__)
    return None


def _told(processor: Any, config: Any) -> dict[str, Any]:
    """Sizes that checkpoints write into both of their files, `config.json` and `preprocessor_config.json`."""
    vision = getattr(config, "vision_config", None) or config
    found: dict[str, Any] = {}
    for ours, theirs in ALIKE.items():
        told = next((size for part in (vision, config) if isinstance(size := getattr(part, theirs, None), int)), None)
        if told is not None and hasattr(processor, ours):
            found[ours] = _square(told) if _is_pair(getattr(processor, ours)) else told
    pinpoints = getattr(config, "image_grid_pinpoints", None)
    if pinpoints and hasattr(processor, "image_grid_pinpoints"):
        found["image_grid_pinpoints"] = [list(one) for one in pinpoints]
    side = getattr(vision, "image_size", None)
    side = side[0] if isinstance(side, (list, tuple)) else side
    size = getattr(processor, "size", None)
    if not isinstance(side, int) or size is None:
        return found
    if hasattr(processor, "max_image_size") and hasattr(processor, "do_image_splitting"):
        return {**found, "max_image_size": {"longest_edge": side}, "size": {"longest_edge": IDEFICS_TILES * side}}
    longest, shortest = _has(size, "longest_edge"), _has(size, "shortest_edge")
    if _is_pair(size):
        found["size"] = _square(side)
    elif longest != shortest:
        found["size"] = {"longest_edge" if longest else "shortest_edge": side}
    if getattr(processor, "do_center_crop", False):
        found["crop_size"] = _square(side)
    return found


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _is_pair(size: Any) -> bool:
    return _has(size, "height") and _has(size, "width")


def _has(size: Any, name: str) -> bool:
    found = size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)
    return bool(found)


def tokens_of_image(job: TrainingJob, batch: Mapping[str, torch.Tensor], config: Any) -> int:
    """How many tokens of `with_images`' batch stand for one image; 0 without images among the words."""
    if not job.images.per_sequence or reads_pixels(job.architecture):
        return 0
    return int((batch["input_ids"][0] == _placeholder_of(config)).sum().item()) // job.images.per_sequence


def _features_of_image(job: TrainingJob, model: Any, seen: Mapping[str, np.ndarray[Any, Any]], device: str) -> int:
    """Number of placeholder tokens for one image: as many as the features that the network makes of it. Networks that read
    images by cross attention have one."""
    features_of = getattr(model, "get_image_features", None)
    if features_of is None:
        return 1
    accepted = inspect.signature(features_of).parameters
    given = {name: value for name, value in _on_device(seen, 1, device).items() if name in accepted}
    with torch.no_grad(), _evaluating(model):
        made = features_of(**given)
    features = [one for one in tree_iter(getattr(made, "pooler_output", made)) if isinstance(one, torch.Tensor)]
    return sum(int(one.numel() // one.shape[-1]) for one in features) // job.images.per_sequence


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _on_device(seen: Mapping[str, np.ndarray[Any, Any]], times: int, device: str) -> dict[str, torch.Tensor]:
    """The arguments of one sequence repeated for `times` sequences, on `device`. Integers keep their values; pixels are
    random, with the right shape."""
    found = {}
    for name, value in seen.items():
        shape = (value.shape[0] * times, *value.shape[1:])
        if value.dtype.kind == "f":
            found[name] = torch.randn(shape, device=device)  # zeros are padding to some networks
        else:
            found[name] = torch.tensor(np.concatenate([value] * times).tolist(), device=device)
    return found


def _with_placeholders(ids: torch.Tensor, job: TrainingJob, config: Any, tokens: int) -> torch.Tensor:
    placeholder = _placeholder_of(config)
    text = torch.where(ids == placeholder, ids - 1, ids) if placeholder else ids.clamp_min(1)
    return torch.where(_placeholders(job, tokens, ids.device), placeholder, text)


def _placeholder_of(config: Any) -> int:
    placeholder = next((found for name in PLACEHOLDERS if (found := getattr(config, name, None)) is not None), None)
    if placeholder is None:
        raise CollectorError(
            f"model_type={config.model_type!r} names no token that stands for images ({' or '.join(PLACEHOLDERS)}); leave "
            "the images out.",
            parameter="images.per_sequence",
        )
    return int(placeholder)


def _placeholders(job: TrainingJob, tokens: int, device: torch.device) -> torch.Tensor:
    """[micro_batch_size, sequence_length] booleans: true for the tokens that stand for images."""
    position = torch.arange(job.sequence_length, device=device)
    each = tokens + 1
    row = (position < job.images.per_sequence * each) & (position % each != 0)
    return row.expand(job.micro_batch_size, -1).contiguous()
