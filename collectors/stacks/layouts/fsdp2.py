"""`fully_shard` (FSDP2) and, on a two-dimensional mesh, HSDP. Each decoder layer is a group; embedding, norm and head are
grouped as the stack does it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from peakcast.collectors.stacks.layouts import data_mesh, torchtitan_expert_parallel, torchtitan_experts
from peakcast.collectors.stacks.layouts.fsdp1 import decoder_layer_classes, mixed_precision_dtypes
from peakcast.collectors.stacks.layouts.wrapped_model import UnwrappedModel
from peakcast.collectors.stacks.parts.compiled import outermost_layers
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob


class FSDP2Model(UnwrappedModel):
    """An FSDP2 model."""

    synchronizes: bool

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """accelerate's `no_sync`: unsharded gradients are kept, in the dtype in which they will be reduced."""
        if self.synchronizes:
            yield
            return
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)


class SharesExperts(FSDP2Model):
    """An FSDP2 model whose experts are sharded over other ranks than its other parameters."""

    def clip(self, parameters: list[Any], max_norm: float) -> None:
        """Clip as torchtitan does: a norm for each mesh."""
        torchtitan_expert_parallel.clip(parameters, max_norm)


def wrap(model: Any, job: TrainingJob) -> FSDP2Model:
    """`model` with its parameters sharded along dimension 0."""
    chosen = conventions(job)
    common: dict[str, Any] = {
        "mesh": data_mesh(job),
        "mp_policy": mixed_precision(job),
        "offload_policy": CPUOffloadPolicy() if job.offload.parameters else OffloadPolicy(),
    }
    if integers := {weight for weight in model.parameters() if not weight.is_floating_point()}:
        common["ignored_params"] = integers  # packed weights (accelerate 1.15 `fsdp2_prepare_model`)
    # torchtitan: with pipelining each micro-batch would gather again
    reshards = bool(chosen["fsdp_reshard_after_forward"]) and job.parallelism.pipeline_parallel_size == 1
    keeps: dict[str, Any] = {"reshard_after_forward": reshards}
    divided = torchtitan_experts.are_divided(job)
    layers = outermost_layers(model, tuple(decoder_layer_classes(model)))
    for layer in layers:
        if layer is layers[-1] and chosen.get("fsdp2_last_layer_stays"):
            keeps = {"reshard_after_forward": False}
        placed = torchtitan_expert_parallel.placement(layer, job, common["mesh"]) if divided else {}
        fully_shard(layer, **common, **keeps, **placed)
    if chosen["fsdp2_units"] == "ends":
        _shard_ends(model, job, common, {"reshard_after_forward": reshards})
    fully_shard(model, **common)
    if divided:
        torchtitan_expert_parallel.prefetch(model)
    layout = SharesExperts(model) if divided else FSDP2Model(model)
    layout.synchronizes = not chosen["accumulates_without_sync"]
    return layout


def mixed_precision(job: TrainingJob) -> MixedPrecisionPolicy:
    """Dtypes in which weights are gathered, gradients reduced and outputs returned."""
    mixed = mixed_precision_dtypes(job)
    if mixed is None:
        asked = job.framework_options.get("fsdp_reduce_dtype", "compute")  # narrow weights are gathered as they are
        return MixedPrecisionPolicy(reduce_dtype=None if asked == "compute" else getattr(torch, asked))
    # accelerate sets the dtype of outputs too (FullyShardedDataParallelPlugin.set_mixed_precision)
    outputs = mixed[0] if job.framework == "huggingface" else None
    return MixedPrecisionPolicy(param_dtype=mixed[0], reduce_dtype=mixed[1], output_dtype=outputs)


def _shard_ends_of_stage(model: Any, common: dict[str, Any], keeps: dict[str, Any]) -> None:
    if list(model.model.embed_tokens.parameters()):
        fully_shard(model.model.embed_tokens, **common, **keeps)
    if list(model.lm_head.parameters()):
        fully_shard([model.model.norm, model.lm_head], **common, reshard_after_forward=False)


def _shard_ends(model: Any, job: TrainingJob, common: dict[str, Any], keeps: dict[str, Any]) -> None:
    """Shard the embedding by itself, and final norm and lm_head together, kept gathered (accelerate 1.15
    `fsdp2_prepare_model`)."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if job.parallelism.pipeline_parallel_size > 1:  # a stage has one of them at most
        _shard_ends_of_stage(model, common, keeps)
        return
    tail = [_final_norm(model), head]
    if head is not None and head.weight is embedding.weight:  # a reward model has none that accelerate finds
        tail.insert(1, embedding)
    else:
        fully_shard(embedding, **common, **keeps)
    found = [part for part in tail if part is not None]  # with adapters accelerate does not find the norm
    if found:
        fully_shard(found, **common, reshard_after_forward=False)


def _final_norm(model: Any) -> Any:
    from accelerate.utils.fsdp_utils import _find_final_norm

    return _find_final_norm(model)
