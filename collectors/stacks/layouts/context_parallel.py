"""Context parallelism: `torch.distributed.tensor.experimental.context_parallel`, which gives every rank its part of each
sequence and replaces attention by a ring over all of them, as accelerate drives it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

from peakcast.collectors.stacks import layouts
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob


def inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`batch` with the tensors that a part of it is not enough to compute: labels of the next tokens, and positions
    (transformers 5.17 trainer.py `_prepare_context_parallel_inputs`)."""
    ids, labels = batch["input_ids"], batch["labels"].clone()
    following = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    return {**batch, "labels": labels, "shift_labels": following, "position_ids": positions}


def sharing(batch: dict[str, torch.Tensor], job: TrainingJob) -> contextlib.AbstractContextManager[None]:
    """Context around the forward and the backward of `batch`, within which `batch` holds only this rank's part."""
    set_rotate_method(str(conventions(job)["context_parallel_rotation"]))
    buffers = list(batch.values())
    ring: Any = layouts.mesh(job)["context"]
    entered: contextlib.AbstractContextManager[None] = context_parallel(
        ring, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    )
    return entered
