"""What of a network `torch.compile` compiles: all of it, or its layers one by one ("regional")."""

from __future__ import annotations

from typing import Any

import torch

from peakcast.conventions import conventions
from peakcast.spec import TrainingJob


def is_compiled_whole(job: TrainingJob) -> bool:
    """Whether forward and loss are one graph, without a moment between them."""
    return job.compile and conventions(job)["compiled_regions"] == "network"


def compile_model(model: Any, inner: Any, job: TrainingJob) -> None:
    """Compile `model`, whose network is `inner`, as the stack does.

    Whole: accelerate's `prepare_model`. By layers, `huggingface`: accelerate's `compile_regions`, which also compiles each
    other module without layers (embedding, final norm, head) by itself, here by its variant that changes modules in place.
    By layers, `torch`: torchtitan's `apply_compile`: each layer and the loss.
    """
    if is_compiled_whole(job):
        model.compile()
    elif job.framework == "huggingface":
        from accelerate.utils.other import compile_regions_fsdp2

        compile_regions_fsdp2(inner)
    else:
        for layers in (part for part in inner.modules() if isinstance(part, torch.nn.ModuleList)):
            for layer in layers:
                layer.compile(fullgraph=True)
        inner.loss_function = torch.compile(inner.loss_function)
