"""Axolotl's ranks that share a sequence (ring-flash-attn) or a layer (the Trainer's tensor parallelism)."""

from __future__ import annotations

from dataclasses import replace

from peakcast.dialects.translation import Settings
from peakcast.spec import Batch, TrainingJob


def divided(job: TrainingJob, settings: Settings) -> TrainingJob:
    """`job` with the ranks that share a sequence or a layer taken from its replicas. Raises: SpecError."""
    key = "context_parallel_size" if settings.given("context_parallel_size") else "sequence_parallel_degree"
    context, tensor = settings.integer(key) or 1, settings.integer("tensor_parallel_size") or 1
    ranks = job.parallelism.world_size
    if ranks % (context * tensor):
        name = key if context > 1 else "tensor_parallel_size"
        raise settings.refuse(
            name, f"makes groups of {context * tensor} GPUs, which do not divide the {ranks} of the run; say --num-gpus"
        )
    if context * tensor == 1:
        return job
    layout = replace(
        job.parallelism,
        data_parallel_size=ranks // (context * tensor),
        context_parallel_size=context,
        tensor_parallel_size=tensor,
    )
    return job.replace(parallelism=layout, batch=job.batch if context == 1 else Batch())
