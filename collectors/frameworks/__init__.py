"""Stacks that can be measured: one small module each, all with `build(job, device) -> Training`.

A stack that is not installed says what to install; the rest of a grid goes on.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from peakcast.errors import CollectorError
from peakcast.spec import TrainingJob

STACKS = {
    "huggingface": ("peakcast.collectors.frameworks.huggingface", "'peakcast[collect]'"),
    "torch": ("peakcast.collectors.frameworks.huggingface", "'peakcast[collect]'"),
    "deepspeed": ("peakcast.collectors.frameworks.deepspeed", "deepspeed"),
    "megatron": ("peakcast.collectors.frameworks.megatron_core", "--no-deps megatron-core"),  # needs torch only
}
"""framework -> module, and what to install. A plain torch loop trains the same networks, and keeps the model's outputs as
plain loops do."""


class Training(Protocol):
    """One training run, its phases as separate calls so that each can be measured."""

    job: TrainingJob
    model: Any
    optimizer: Any

    def forward(self, on_loss: Any) -> Any:
        """Forward and loss; calls `on_loss()` when the loss begins. Returns the loss."""

    def backward(self, loss: Any) -> None:
        """Backward of the loss."""

    def clip(self) -> None:
        """Gradient clipping."""

    def step(self) -> None:
        """The optimizer's step."""

    def zero_grad(self) -> None:
        """Release the gradients."""

    def facts(self) -> dict[str, Any]:
        """What was really chosen: attention implementation, optimizer path."""


INFERENCE = "peakcast.collectors.frameworks.huggingface_inference"


def build(job: TrainingJob, device: str) -> Training:
    """The training run of `job` on `device` with random weights. Raises: CollectorError when the stack cannot."""
    training: Training = _made(job, STACKS.get(job.framework, ("", ""))[0], "build", device)
    return training


def build_inference(job: TrainingJob, device: str) -> Any:
    """The generation of `job` on `device`: its `generate(on_forward)` runs it. Raises: CollectorError when it cannot."""
    return _made(job, INFERENCE, "build_inference", device)


def _made(job: TrainingJob, module: str, function: str, device: str) -> Any:
    if not module:
        raise CollectorError(
            f"framework={job.framework!r} has no collector yet; measure with one of {', '.join(STACKS)}.",
            parameter="framework",
            value=job.framework,
        )
    try:
        return getattr(importlib.import_module(module), function)(job, device)
    except ImportError as error:
        package = STACKS[job.framework][1]
        raise CollectorError(
            f"framework={job.framework!r} needs a package that is not installed ({error}); "
            f"install it with: pip install {package}.",
            parameter="framework",
            value=job.framework,
        ) from error
