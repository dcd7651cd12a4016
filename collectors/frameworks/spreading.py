"""Networks that one rank never holds whole: made in host memory without a value, split, and only then filled on the GPU.

Made on the GPU at once, a network of which a rank keeps an eighth would have a peak before the first step that no real run
has, and one of 70 billion parameters would be out of memory. Libraries do the same: accelerate and torchtitan shard what is
on the CPU, or on no device at all, and transformers reads each rank's part of a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor

from peakcast.spec import TrainingJob

DEVIATION = 0.02
"""Of the weights: initializer_range's usual value. Zeros would send all of a router's tokens to the same experts."""


def is_spread(job: TrainingJob) -> bool:
    """Whether a rank has a part of the weights only. A trace's tensors are fake and begin when its steps do."""
    layout = job.parallelism
    sharded = layout.data_parallel_size > 1 and layout.sharding in ("fsdp1", "fsdp2", "hsdp")
    split = layout.tensor_parallel_size * layout.pipeline_parallel_size > 1
    return (sharded or split) and detect_fake_mode() is None


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Networks made here are in host memory whose pages nobody writes, so that they take neither room nor time."""
    from transformers.initialization import no_init_weights  # which releases before 5 do not have

    with torch.device("cpu"), no_init_weights():
        yield


def unmade(model: Any, job: TrainingJob) -> Any:
    """`model` with weights on no device where FSDP2 can shard them there (torchtitan does): else all of a large network
    would be copied through the GPU. Tied weights would part; adapters and offloaded shards go accelerate's way."""
    plain = job.finetuning.method == "full" and not job.offload.parameters and not job.architecture.tie_word_embeddings
    if plain and job.parallelism.data_parallel_size > 1 and job.parallelism.sharding in ("fsdp2", "hsdp"):
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad))
    return model


def settle(model: Any, job: TrainingJob, device: str) -> None:
    """Bring what wrapping has left in host memory to `device`, and give every weight a value, in place."""
    if any(parameter.is_meta for parameter in model.parameters()):
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to_empty(device=device)
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    elif not job.offload.parameters:
        model.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if local.is_floating_point():
                local.normal_(std=DEVIATION)
