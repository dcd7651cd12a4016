"""Which part of a network `torch.compile` compiles: all of it, or its layers one by one ("regional")."""

from __future__ import annotations

from typing import Any

import torch

from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob


def is_compiled_whole(job: TrainingJob) -> bool:
    """Whether the network is compiled in one call, with its loss, so that nothing separates their phases."""
    regions = conventions(job)["compiled_regions"]
    return job.compile and (regions == "network" or (regions == "network_in_parts" and job.framework == "huggingface"))


def compiles_shards(job: TrainingJob) -> bool:
    """Whether each layer is a graph by itself, which is sharded: gathers and reductions then run around the compiled graph,
    outside it. torchtitan and accelerate compile the layers one by one before; hooks of FSDP2 also divide a network that
    accelerate compiles in one call."""
    sharded = job.parallelism.sharding in ("fsdp2", "hsdp") and job.parallelism.num_replicas > 1
    return job.compile and conventions(job)["compiled_regions"] != "network" and sharded


def compiles_replica(job: TrainingJob) -> bool:
    """Whether a network that DDP has wrapped is compiled in one call, as accelerate does it: Dynamo makes a graph of what
    each of DDP's buckets has the weights of (torch 2.13 _dynamo/backends/distributed.py, DDPOptimizer)."""
    layout = job.parallelism
    alone = layout == type(layout)(data_parallel_size=layout.data_parallel_size)
    return is_compiled_whole(job) and job.framework == "huggingface" and alone


def outermost_layers(model: Any, classes: tuple[type, ...]) -> list[Any]:
    """The layers of `model` that are compiled one by one. If a wrapper runs its hooks around a compiled layer, as
    torchtitan's `fully_shard` of a compiled block does, this is the wrapper."""
    found, inner = [], set[int]()
    for module in model.modules():
        within = getattr(module, "_orig_mod", module)
        if isinstance(within, classes) and id(module) not in inner:
            found.append(module)
            inner.add(id(within))
    return found


def compile_layers(model: Any, job: TrainingJob) -> Any:
    """Return `model` with its layers compiled, each with its checkpointing, in the stack's way.

    `huggingface`: accelerate's `compile_regions`, which also compiles each other module without layers (embedding, final
    norm, head) by itself. Before FSDP2 it compiles in place, hooks that are added later break the graph, and checkpointing
    is around it. `torch`: torchtitan's `apply_compile`, or torchtune's `compile_model`, whose checkpoints are around what
    is compiled in place. The loss is compiled if the release does that, or alone.
    """
    chosen = conventions(job)
    if job.framework == "huggingface":
        from accelerate.utils.other import compile_regions, compile_regions_fsdp2

        return compile_regions_fsdp2(model) if compiles_shards(job) else compile_regions(model)
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    for layers in lists if chosen["compiled_regions"] == "layers" else ():
        for number, layer in enumerate(layers):
            if chosen["checkpoints_around_compiled"]:
                layer.compile()
            else:
                layers[number] = torch.compile(layer, fullgraph=True)
    if chosen["compiles_loss"]:
        model.loss_function = torch.compile(model.loss_function)
    return model
