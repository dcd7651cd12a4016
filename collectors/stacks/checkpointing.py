"""The arguments with which transformers is told to checkpoint: which layers, and which of their results are saved."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch

from peakcast.collectors.stacks.layouts import torchtitan_experts
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob


def every_n_layers(job: TrainingJob) -> dict[str, Any]:
    """Further arguments of `gradient_checkpointing_enable`: which layers are checkpointed, and where their inputs are
    stored."""
    every = job.activation_checkpointing.every_n_layers
    switches: dict[str, Any] = {} if every == 1 else {"every_n_layers": every}  # transformers 5.17 has both
    return {**switches, "offload": True} if job.offload.activations else switches


def checkpoint_arguments(job: TrainingJob) -> dict[str, Any]:
    """The arguments of `torch.utils.checkpoint.checkpoint`."""
    if job.activation_checkpointing.mode == "full":
        return {"use_reentrant": job.activation_checkpointing.use_reentrant}
    keep, kinds = (conventions(job)[f"selective_checkpointing_{name}"] for name in ("matmuls", "keeps"))
    repeated = torchtitan_experts.repeated_product(job)
    return {"use_reentrant": False, "context_fn": functools.partial(_keep, keep, tuple(kinds), repeated)}


def _keep(one_in: int, kinds: Collection[str], repeated: torch.Size | None = None) -> Any:
    """Contexts that save the results of one in `one_in` matrix products, and of operations of `kinds`. `repeated`: the
    shape of a matrix whose products are neither saved nor counted."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    matmuls = (aten.mm.default, aten.addmm.default)
    exchanges = torch.ops._c10d_functional
    of_kind = {
        "attention": (
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
        ),
        "flex": (torch.ops.higher_order.flex_attention,),
        "reduce_scatter": (exchanges.reduce_scatter_tensor.default,),
        "all_to_all": (exchanges.all_to_all_single.default,),
        "topk": (aten.topk.default,),
    }
    never_repeated = tuple(function for kind in kinds for function in of_kind[kind])
    counts = {True: 0, False: 0}

    def policy(context: Any, function: Any, *arguments: Any, **keywords: Any) -> Any:
        if function is aten.mm.default and arguments[1].shape == repeated:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if function in matmuls:
            counts[context.is_recompute] += 1
        every_other = function in matmuls and (counts[context.is_recompute] - 1) % one_in == 0
        kept = every_other or function in never_repeated
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
