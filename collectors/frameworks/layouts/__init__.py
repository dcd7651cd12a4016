"""Data-parallel layouts as the libraries make them: one small module per stack, all with `wrap(model, job) -> Layout`.

A run stands for one rank of many: its process group is torch's own fake one, whose collectives return at once and
move nothing (`torch.testing._internal.distributed.fake_pg`), so what NCCL itself allocates is missing and rows say so.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Protocol

from peakcast.collectors import gang
from peakcast.errors import CollectorError
from peakcast.spec import TrainingJob

STACKS = {
    "none": "peakcast.collectors.frameworks.layouts.ddp",
    "no_shard": "peakcast.collectors.frameworks.layouts.ddp",
    "fsdp1": "peakcast.collectors.frameworks.layouts.fsdp1",
    "fsdp2": "peakcast.collectors.frameworks.layouts.fsdp2",
    "hsdp": "peakcast.collectors.frameworks.layouts.fsdp2",
}
"""`parallelism.sharding` -> module. HSDP is FSDP2 on a mesh of two dimensions."""


class Layout(Protocol):
    """A model wrapped for data parallelism, and what the training loop does differently because of it."""

    model: Any

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Around a micro-batch that is not the last of its step."""

    def clip(self, parameters: list[Any], max_norm: float) -> None:
        """Gradient clipping over all ranks."""


class Alone:
    """One rank: nothing is wrapped."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Nothing differs."""
        return contextlib.nullcontext()

    def clip(self, parameters: list[Any], max_norm: float) -> None:
        """As the Trainer does by default."""
        import torch

        torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def start_group(job: TrainingJob, rank: int = 0) -> None:
    """Make this process `rank` of the job's ranks, with collectives that do nothing; the rank that it is, with real ones,
    where torchrun has started it. One rank needs no group, but for Megatron, which asks its groups for everything."""
    if job.parallelism.world_size == 1 and job.framework != "megatron":
        return
    import torch
    import torch.distributed as dist

    if gang.launched():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=rank, world_size=job.parallelism.world_size, store=FakeStore())


def wrap(model: Any, job: TrainingJob) -> Layout:
    """`model` in the job's layout. Raises: CollectorError for one that has no collector."""
    layout = job.parallelism
    if layout.world_size == 1:
        return Alone(model)
    if layout.zero_stage or layout.world_size != layout.data_parallel_size:
        raise CollectorError(
            f"parallelism of {layout.world_size} ranks (zero_stage={layout.zero_stage}) has no collector yet; measure data "
            f"parallelism with sharding {', '.join(STACKS)}.",
            parameter="parallelism",
            value=layout.world_size,
        )
    stack: Any = importlib.import_module(STACKS[layout.sharding])
    wrapped: Layout = stack.wrap(model, job)
    return wrapped


def mesh(job: TrainingJob, shards: int) -> Any:
    """A device mesh over the job's ranks: [ranks], or [ranks / shards, shards] where only some of them share a model."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import init_device_mesh

    ranks = job.parallelism.data_parallel_size
    with unset_fake_temporarily():  # a mesh keeps a real tensor of ranks
        if shards == ranks:
            return init_device_mesh(_device_type(), (ranks,), mesh_dim_names=("shard",))
        return init_device_mesh(_device_type(), (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))


def _device_type() -> str:
    """Of the mesh: fake ranks stand for GPUs, real ones may be on the CPU."""
    import torch

    return "cpu" if gang.launched() and not torch.cuda.is_available() else "cuda"
