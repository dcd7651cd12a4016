"""Networks that no rank ever holds whole: made in host memory without values, split, and only then filled on the GPU.

If a rank that keeps an eighth of a network made all of it on the GPU, its peak would be before the first step, where no
real run has it; a network of 70 billion parameters would run out of memory. Libraries also avoid this: accelerate and
torchtitan shard weights that are on the CPU or on no device, and transformers reads only each rank's part of a
checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor

from peakcast.jobs.spec import TrainingJob

DEVIATION = 0.02
"""Standard deviation of the weights: initializer_range's usual value. With zeros, a router would send all tokens to the
same experts."""


def is_spread(job: TrainingJob) -> bool:
    """Whether a rank holds only a part of the weights. False in a trace, whose tensors are fake and counted from its first
    step on."""
    layout = job.parallelism
    sharded = layout.data_parallel_size > 1 and layout.sharding in ("fsdp1", "fsdp2", "hsdp")
    split = layout.tensor_parallel_size * layout.pipeline_parallel_size > 1
    return (sharded or split) and detect_fake_mode() is None


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """A context in which networks are made in host memory whose pages are never written, which costs neither memory nor
    time."""
    from transformers.initialization import no_init_weights  # missing in releases before 5

    with torch.device("cpu"), no_init_weights():
        yield


def unmade(model: Any, job: TrainingJob) -> Any:
    """`model` with weights on no device (`meta`) if FSDP2 can shard them there, as torchtitan does; otherwise all of a
    large network would be copied through the GPU. Not done for tied weights, which would come apart, nor for adapters and
    offloaded shards, for which accelerate has its own way."""
    plain = job.finetuning.method == "full" and not job.offload.parameters and not job.architecture.tie_word_embeddings
    if plain and job.parallelism.data_parallel_size > 1 and job.parallelism.sharding in ("fsdp2", "hsdp"):
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad))
    return model


def settle(model: Any, job: TrainingJob, device: str) -> None:
    """Move what wrapping has left in host memory to `device`, and fill every weight with values, in place."""
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
