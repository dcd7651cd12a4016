"""The inputs of a network of transformers: full rows of random tokens, padded rows, or sequences joined into one row."""

from __future__ import annotations

from typing import Any

import torch

from peakcast.core.errors import CollectorError
from peakcast.jobs.audio import hears, sound_shape
from peakcast.jobs.conventions import conventions
from peakcast.jobs.images import compares_images, pixels_of_image, sees_only_images
from peakcast.jobs.spec import TrainingJob


def batch_of(job: TrainingJob) -> dict[str, Any]:
    """The model's arguments by name: random tokens, which are also a decoder's labels; an encoder-decoder has labels of its
    own. Networks that see images or hear, and have no rules of their own, get an image or sound for each sequence."""
    if hears(job.architecture):
        sound = torch.randn(job.micro_batch_size, *sound_shape(job.architecture))
        return {"input_features": sound, "labels": random_tokens(job, job.decoder_sequence_length or job.sequence_length)}
    if sees_only_images(job.architecture):
        classes = torch.randint(job.architecture.num_labels, (job.micro_batch_size,))
        return {"pixel_values": _pixels(job), "labels": classes}
    if compares_images(job.architecture.model_type):
        ids = random_tokens(job, job.sequence_length)
        return with_mask({"input_ids": ids, "pixel_values": _pixels(job), "return_loss": True}, job)
    if job.batch.form == "padding_free":
        return _joined(job)
    ids = random_tokens(job, job.sequence_length)
    if job.batch.form == "masked":
        return {"input_ids": ids, "labels": labels_of(job, ids), "attention_mask": _padding(job, ids)}
    if job.architecture.kind == "encoder_decoder" or job.decoder_sequence_length:
        batch = {"input_ids": ids, "labels": random_tokens(job, job.decoder_sequence_length or job.sequence_length)}
    else:
        batch = {"input_ids": ids, "labels": labels_of(job, ids)}
    return with_mask(batch, job)


def _pixels(job: TrainingJob) -> torch.Tensor:
    """[micro_batch_size, channels, height, width] random pixels, as image processors return them: float32."""
    return torch.randn(job.micro_batch_size, *pixels_of_image(job.images, job.architecture))


def with_mask(batch: dict[str, Any], job: TrainingJob) -> dict[str, Any]:
    """`batch` with the mask of ones that collators send along under the Trainer. transformers drops it unless it makes a
    mask anyway, because a window slides, which then has a part for each sequence (5.17 masking_utils.py `sdpa_mask`)."""
    return batch | ({"attention_mask": torch.ones_like(batch["input_ids"])} if conventions(job).get("trainer") else {})


def labels_of(job: TrainingJob, ids: torch.Tensor) -> torch.Tensor:
    """The tokens, of which collators make a new tensor; for a classifier the class of each sequence, or of each token."""
    head = job.architecture.head
    if head == "language_model":
        return ids.clone()
    return torch.randint(job.architecture.num_labels, ids.shape[:-1] if head == "sequence_classifier" else ids.shape)


def _joined(job: TrainingJob) -> dict[str, torch.Tensor]:
    """All sequences in one row, each with positions from 0, as `DataCollatorWithFlattening` joins them."""
    ids = torch.randint(job.architecture.vocab_size, (1, job.num_tokens))
    positions = torch.cat([torch.arange(length) for length in sequence_lengths(job)])
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions[None]}


def _padding(job: TrainingJob, ids: torch.Tensor) -> torch.Tensor:
    """A mask with as many ones as there are tokens; the rest of each row is padding. If a row has no padding, its last
    token is masked all the same, because transformers treats a mask of ones as none (5.17 masking_utils.py
    `_ignore_causal_mask_sdpa`)."""
    found = sequence_lengths(job)
    if sum(found) == ids.numel():
        found[-1] -= 1
    lengths = torch.tensor(found, device=ids.device)
    return (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()


def sequence_lengths(job: TrainingJob) -> list[int]:
    """Number of tokens, without padding, of each sequence of a micro-batch. The first is as long as possible, as rows are
    padded to the longest; the others share the rest."""
    others = job.micro_batch_size - 1
    longest = min(job.sequence_length, job.num_tokens - others)
    if longest < 1:
        raise CollectorError(
            f"batch.num_tokens={job.num_tokens} is fewer than the {job.micro_batch_size} sequences of a micro-batch, which "
            "have one each at least; raise it.",
            parameter="batch.num_tokens",
            value=job.num_tokens,
        )
    rest = job.num_tokens - longest
    return [longest, *(rest // others + (index < rest % others) for index in range(others))]


def random_tokens(job: TrainingJob, length: int) -> torch.Tensor:
    """[micro_batch_size, length] random tokens, many of them distinct: how much the embedding's backward and a router
    allocate depends on their spread."""
    return torch.randint(job.architecture.vocab_size, (job.micro_batch_size, length))
