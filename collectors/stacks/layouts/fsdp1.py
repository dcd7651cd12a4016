"""FullyShardedDataParallel (FSDP1), wrapped layer by layer as accelerate does it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.checkpoint import checkpoint

from peakcast.collectors.processes import gang
from peakcast.collectors.stacks.layouts.wrapped_model import NoSyncModel
from peakcast.jobs.conventions import conventions, mixes_precision
from peakcast.jobs.spec import TrainingJob


class FSDP1Model(NoSyncModel):
    """An FSDP1 model. Under `no_sync` it keeps unsharded gradients."""

    def clip(self, parameters: list[Any], max_norm: float) -> None:
        """FSDP1's own clipping, over shards."""
        self.model.clip_grad_norm_(max_norm)


def wrap(model: Any, job: TrainingJob) -> FSDP1Model:
    """`model` with each decoder layer as a unit, and apart from it each adapter matrix (peft
    `fsdp_auto_wrap_policy`) unless asked otherwise, or each module; the rest is the root unit."""
    chosen = conventions(job)
    mixed = mixed_precision_dtypes(job)
    prefetch = chosen["fsdp1_backward_prefetch"]
    strategy = ShardingStrategy.FULL_SHARD if chosen["fsdp_reshard_after_forward"] else ShardingStrategy.SHARD_GRAD_OP
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=_policy(model, job),
        mixed_precision=mixed and MixedPrecision(param_dtype=mixed[0], reduce_dtype=mixed[1], buffer_dtype=mixed[0]),
        backward_prefetch=BackwardPrefetch[prefetch] if prefetch else None,
        forward_prefetch=bool(chosen["fsdp1_forward_prefetch"]),
        use_orig_params=bool(chosen["fsdp1_use_orig_params"]),
        cpu_offload=CPUOffload(offload_params=job.offload.parameters),
        device_id=torch.device(f"cuda:{gang.local_rank()}"),
    )
    if chosen.get("checkpoints_around_units"):
        _checkpoint_around_units(wrapped, decoder_layer_classes(model), job)
    layout = FSDP1Model(wrapped)
    layout.synchronizes = not chosen["accumulates_without_sync"]
    return layout


def _checkpoint_around_units(wrapped: Any, layers: set[type], job: TrainingJob) -> None:
    """Checkpoint as transformers did before 4.53: the model checkpoints the call of each layer, which is by then an FSDP
    unit."""
    for unit in wrapped.modules():
        layer: Any = getattr(unit, "module", None)
        if isinstance(unit, FullyShardedDataParallel) and type(layer) in layers and layer.gradient_checkpointing:
            layer.gradient_checkpointing = False
            unit.forward = functools.partial(_checkpointed, unit.forward, job.activation_checkpointing.use_reentrant)


def _checkpointed(forward: Any, use_reentrant: bool, *arguments: Any, **keywords: Any) -> Any:
    return checkpoint(functools.partial(forward, **keywords), *arguments, use_reentrant=use_reentrant)


def _policy(model: Any, job: TrainingJob) -> Any:
    units = conventions(job).get("fsdp1_units")
    if units == "modules":
        return lambda module, recurse, nonwrapped_numel: True
    if job.finetuning.method != "full" and units != "layers_with_adapters":
        from peft.utils.other import fsdp_auto_wrap_policy

        return fsdp_auto_wrap_policy(model)
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=decoder_layer_classes(model))


def decoder_layer_classes(model: Any) -> set[type]:
    """The classes of layers that the model says must not be split."""
    names = set(model._no_split_modules or ())
    return {type(module) for module in model.modules() if type(module).__name__ in names}


def mixed_precision_dtypes(job: TrainingJob) -> tuple[torch.dtype, torch.dtype] | None:
    """(dtype of gathered parameters, dtype of reduced gradients), or None without mixed precision."""
    if not mixes_precision(job):
        return None
    compute = getattr(torch, job.precision.wide_compute)
    reduced = conventions(job)["fsdp_reduce_dtype"]
    return compute, compute if reduced == "compute" else getattr(torch, reduced)
