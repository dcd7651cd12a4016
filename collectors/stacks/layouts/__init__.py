"""Data-parallel layouts as the libraries make them: a small module per stack, each with `wrap(model, job) -> WrappedModel`.

A run represents one rank of many: its process group is torch's own fake one, whose collectives return at once and move
nothing (`torch.testing._internal.distributed.fake_pg`), so memory that NCCL itself allocates is missing, and rows say
so.
"""

from __future__ import annotations

import importlib
from typing import Any

from peakcast.collectors.processes import gang
from peakcast.collectors.stacks.layouts.wrapped_model import UnwrappedModel, WrappedModel
from peakcast.core.errors import CollectorError
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

__all__ = ["UnwrappedModel", "WrappedModel"]

STACKS = {
    "none": "peakcast.collectors.stacks.layouts.ddp",
    "no_shard": "peakcast.collectors.stacks.layouts.ddp",
    "fsdp1": "peakcast.collectors.stacks.layouts.fsdp1",
    "fsdp2": "peakcast.collectors.stacks.layouts.fsdp2",
    "hsdp": "peakcast.collectors.stacks.layouts.fsdp2",
}
"""`parallelism.sharding` -> module. HSDP is FSDP2 on a mesh of two dimensions."""


def start_group(job: TrainingJob, rank: int = 0) -> None:
    """Start the process group: this process becomes `rank` of the job's ranks, with collectives that do nothing. If
    torchrun has started this process, it keeps its own rank and the collectives are real. One rank needs no group, except
    under Megatron, which asks its groups for everything."""
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


def wrap(model: Any, job: TrainingJob) -> WrappedModel:
    """`model`, after `split`, wrapped in the job's layout. Raises: CollectorError for a layout that has no collector."""
    layout = job.parallelism
    if layout.world_size == 1:
        return UnwrappedModel(model)
    if layout.zero_stage:
        raise CollectorError(
            f"zero_stage={layout.zero_stage} has no collector yet; measure sharding {', '.join(STACKS)}.",
            parameter="parallelism.zero_stage",
            value=layout.zero_stage,
        )
    splits_tensors = layout.tensor_parallel_size > 1
    wrapped: WrappedModel = UnwrappedModel(model)
    if splits_tensors and job.framework == "huggingface":
        from peakcast.collectors.stacks.layouts import tensor_parallel

        wrapped = tensor_parallel.TrainersTensorParallel(model)
    if layout.num_replicas > 1:
        stack: Any = importlib.import_module(STACKS[layout.sharding])
        wrapped = stack.wrap(model, job)
    wrapped.splits_loss = splits_tensors and bool(conventions(job).get("loss_parallel"))
    return wrapped


def split(model: Any, job: TrainingJob) -> None:
    """Apply the job's tensor parallelism, if any, to a network without adapters; adapters are split like their matrices."""
    if job.parallelism.tensor_parallel_size > 1:
        from peakcast.collectors.stacks.layouts import tensor_parallel

        tensor_parallel.shard(model, job, mesh(job)["tp"])


def split_adapted(model: Any, job: TrainingJob) -> None:
    """Apply the job's tensor parallelism to a network that has adapters."""
    if job.parallelism.tensor_parallel_size > 1:
        from peakcast.collectors.stacks.layouts import tensor_parallel

        tensor_parallel.shard_adapted(model, job, mesh(job)["tp"])


def mesh(job: TrainingJob) -> Any:
    """The device mesh over the job's ranks: an axis for each degree above 1, stages outermost, tensor parallelism
    innermost (torchtitan `distributed/parallel_dims.py`) and called as peft wants it."""
    return mesh_of({name: size for name, size in _degrees(job) if size > 1})


def mesh_of(degrees: dict[str, int]) -> Any:
    """A device mesh over the job's ranks with these axes (name -> size)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import init_device_mesh

    with unset_fake_temporarily():  # the mesh's tensor of ranks must be real
        return init_device_mesh(_device_type(), tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def _device_type() -> str:
    """The mesh's device type: fake ranks stand for GPUs, real ranks may be on the CPU."""
    import torch

    return "cpu" if gang.launched() and not torch.cuda.is_available() else "cuda"


def data_mesh(job: TrainingJob) -> Any:
    """The part of `mesh` over which weights are sharded: [shard], or [replicate, shard]. Ranks that share a sequence
    shard weights too (accelerate 1.15 parallelism_config.py and torchtitan: `dp_shard_cp`)."""
    whole = mesh(job)
    names = [name for name, size in _degrees(job) if size > 1 and name in ("replicate", "shard", "context")]
    inner = [name for name in names if name != "replicate"]
    if len(inner) > 1:
        whole[tuple(inner)]._flatten("shards")
        inner = ["shards"]
    return whole[tuple([name for name in names if name == "replicate"] + inner)]


def _degrees(job: TrainingJob) -> list[tuple[str, int]]:
    layout = job.parallelism
    ranks = layout.data_parallel_size
    shards = min(ranks, int(conventions(job)["shard_group_size"])) if layout.sharding == "hsdp" else ranks
    return [
        ("stage", layout.pipeline_parallel_size),
        ("replicate", ranks // shards),
        ("shard", shards),
        ("context", layout.context_parallel_size),
        ("tp", layout.tensor_parallel_size),
    ]
