"""DistributedDataParallel, with the arguments that the Trainer or a plain loop gives it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from peakcast.collectors.processes import gang
from peakcast.collectors.stacks import layouts
from peakcast.collectors.stacks.layouts.wrapped_model import UnwrappedModel
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob


class DataParallel(UnwrappedModel):
    """A DistributedDataParallel model."""

    synchronizes: bool

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """`no_sync` if the loop uses it: gradients are reduced only after the last micro-batch."""
        if self.synchronizes:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self.model.no_sync()
        return context


def wrap(model: Any, job: TrainingJob) -> DataParallel:
    """`model` with a reducer whose all-reduce does nothing."""
    chosen, split = conventions(job), job.parallelism.tensor_parallel_size > 1
    staged = job.parallelism.pipeline_parallel_size > 1
    wrapped = DistributedDataParallel(
        model,
        gradient_as_bucket_view=bool(chosen["ddp_gradient_as_bucket_view"]),
        bucket_cap_mb=chosen["ddp_bucket_cap_mib"],
        find_unused_parameters=finds_unused_parameters(job),
        # on a mesh of several dimensions DDP holds parameters' local parts, and makes DTensors of them in forward
        device_mesh=layouts.data_mesh(job) if split else None,
        process_group=layouts.data_mesh(job).get_group() if staged and not split else None,
    )
    if gang.launched():
        return _layout(wrapped, synchronizes=not chosen["accumulates_without_sync"])
    # return each bucket unchanged: the fake group's all-reduce has no result that the reducer would accept
    wrapped.register_comm_hook(None, lambda state, bucket: _unreduced(bucket))
    return _layout(wrapped, synchronizes=not chosen["accumulates_without_sync"])


def _layout(wrapped: Any, *, synchronizes: bool) -> DataParallel:
    layout = DataParallel(wrapped)
    layout.synchronizes = synchronizes
    return layout


def finds_unused_parameters(job: TrainingJob) -> bool:
    """Whether DDP looks for unused parameters: the Trainer's default (transformers 5.17 trainer.py
    `_build_accelerator_args`)."""
    return job.framework == "huggingface" and job.activation_checkpointing.mode == "none"


def _unreduced(bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
