"""What of a network `torch.compile` compiles: all of it, or its layers one by one ("regional")."""

from __future__ import annotations

from typing import Any

import torch

from peakcast.conventions import conventions
from peakcast.spec import TrainingJob


def is_compiled_whole(job: TrainingJob) -> bool:
    """Whether forward and loss are one graph, without a moment between them."""
    return job.compile and conventions(job)["compiled_regions"] == "network"


def compile_layers(model: Any, job: TrainingJob) -> Any:
    """`model` with its layers compiled, each with its checkpointing, as the stack does it.

    `huggingface`: accelerate's `compile_regions`, which also compiles each other module without layers (embedding, final
    norm, head) by itself. `torch`: torchtitan's `apply_compile`, which compiles the layers and the loss.
    """
    if job.framework == "huggingface":
        from accelerate.utils import compile_regions

        return compile_regions(model)
    for layers in [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]:
        for number, layer in enumerate(layers):
            layers[number] = torch.compile(layer, fullgraph=True)
    model.loss_function = torch.compile(model.loss_function)
    return model
