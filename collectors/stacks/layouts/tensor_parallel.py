"""Tensor parallelism: transformers' own plan (`huggingface`), or torch's `parallelize_module` as torchtitan applies it to
transformers' networks (torchtitan `experiments/transformers_modeling_backend/infra/parallelize.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from peakcast.collectors.stacks.layouts.wrapped_model import UnwrappedModel
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

MATRIX = "_proj"
"""How the names of a layer's matrices end."""


class TrainersTensorParallel(UnwrappedModel):
    """A model with both DTensor parameters and plain ones, which torch's clipping does not accept together."""

    def clip(self, parameters: list[Any], max_norm: float) -> None:
        """The Trainer's own clipping for such a mixture; it works without a Trainer."""
        from transformers import Trainer

        Trainer._mixed_mesh_grad_norm(None, self.model, max_norm)


class Replicated(ParallelStyle):  # type: ignore[misc]
    """A module that every rank holds and computes as a whole, with DTensor parameters, because clipping and foreach do not
    accept a mixture (torchtitan `distributed/tensor_parallel.py` NoParallel)."""

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        def enter(_: Any, arguments: Any, mesh: Any) -> Any:
            x, *others = arguments
            whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
            return (whole, *others)

        return distribute_module(module, device_mesh, None, enter, lambda _, output, mesh: output.to_local())


def shard(model: Any, job: TrainingJob, mesh: Any) -> None:
    """Split the parameters of `model` over `mesh` [tensor_parallel_size], and add the exchanges that its modules need."""
    if job.framework == "huggingface":
        from transformers.distributed import DistributedConfig

        model.maybe_distribute_model(model, DistributedConfig(tp_size=job.parallelism.tensor_parallel_size), mesh)
    else:
        parallelize_module(model, mesh, _ends(job, model), src_data_rank=None)
        adapts = job.finetuning.method != "full"
        for layer in model.model.layers:
            plan = _layer(job, layer)
            now = {name: style for name, style in plan.items() if not (adapts and name.endswith(MATRIX))}
            parallelize_module(layer, mesh, now, src_data_rank=None)
    model.tie_weights()
    _part_from_whole(model)


def shard_adapted(model: Any, job: TrainingJob, mesh: Any) -> None:
    """Split the matrices of `model`'s layers, which have adapters: with a matrix split by outputs, lora_B is split; by
    inputs, lora_A (torchtitan 0.3 components/lora.py). Under transformers' plan peft splits adapters itself."""
    if job.framework == "huggingface":
        return
    rest = SequenceParallel(use_local_output=True) if job.parallelism.sequence_parallel else Replicated()
    for layer in model.get_base_model().model.layers:
        plan: dict[str, Any] = {}
        for name, style in _layer(job, layer).items():
            if not name.endswith(MATRIX):
                continue
            if not hasattr(layer.get_submodule(name), "base_layer"):
                plan[name] = style
                continue
            inner, outer = (Replicated(), style) if isinstance(style, ColwiseParallel) else (style, rest)
            plan |= {f"{name}.base_layer": style, f"{name}.lora_A.default": inner, f"{name}.lora_B.default": outer}
        parallelize_module(layer, mesh, plan, src_data_rank=None)
    _part_from_whole(model)


def _part_from_whole(model: Any) -> None:
    """Make each local part a tensor of its own. It is a view of the whole tensor, which no real rank ever holds."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter._local_tensor = parameter._local_tensor.detach().clone()


def _stream(job: TrainingJob) -> Any:
    """The placement of the residual stream on the ranks: sharded or replicated."""
    return Shard(1) if job.parallelism.sequence_parallel else Replicate()


def _norm(job: TrainingJob) -> ParallelStyle:
    return SequenceParallel() if job.parallelism.sequence_parallel else Replicated()


def _ends(job: TrainingJob, model: Any) -> dict[str, Any]:
    """Plans for the embedding, norm and head that `model` has: a pipeline stage may have none."""
    stream, split = _stream(job), bool(conventions(job).get("loss_parallel"))
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "model.norm": _norm(job),
        "lm_head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1) if split else Replicate(), use_local_output=not split
        ),
    }
    return {name: style for name, style in plan.items() if not isinstance(model.get_submodule(name), torch.nn.Identity)}


def _layer(job: TrainingJob, layer: Any) -> dict[str, Any]:
    stream = _stream(job)
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan["self_attn.o_proj"] = RowwiseParallel(output_layouts=stream)
    plan["mlp.down_proj"] = RowwiseParallel(output_layouts=stream)
    for name in ("q_norm", "k_norm"):
        if hasattr(layer.self_attn, name):  # over the heads, of which each rank has its own
            plan[f"self_attn.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    plan |= {name: _norm(job) for name in ("input_layernorm", "post_attention_layernorm")}
    if job.parallelism.sequence_parallel:
        whole = Replicate()
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,))
    return plan
