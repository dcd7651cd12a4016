"""What the training loops of libraries with networks of their own have in common (`dialects/common/own_networks.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from peakcast.collectors.stacks.batches import random_tokens
from peakcast.collectors.stacks.optimizers import build_optimizer
from peakcast.core.errors import CollectorError
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import Offload, Parallelism, TrainingJob


class OwnTraining:
    """One training run on one GPU, its phases as separate calls. The library's loops clip no gradients unless they are told
    to."""

    def __init__(self, job: TrainingJob, model: Any, device: str) -> None:
        self.job = job
        self.model = model
        self.optimizer = build_optimizer(job, model)
        with torch.device(device):
            self.batch = {name: random_tokens(job, job.sequence_length) for name in ("tokens", "labels")}

    def forward(self, on_loss: Callable[[], None]) -> Any:
        """Forward and loss; calls `on_loss()` when the loss begins. Returns the loss."""
        raise NotImplementedError

    def backward(self, loss: Any) -> None:
        """Backward of the loss."""
        loss.backward()

    def clip(self) -> None:
        """Does nothing."""

    def step(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Release the gradients."""
        self.optimizer.zero_grad()

    def facts(self) -> dict[str, Any]:
        """Settings that were really used."""
        return {"optimizer": type(self.optimizer).__name__, "network": type(self.model).__module__}


def check(job: TrainingJob, library: str) -> None:
    """Refuse what these loops do not run here. Raises: CollectorError."""
    for parameter, value, way in (
        ("parallelism", job.parallelism != Parallelism() and job.parallelism, "ask of one GPU"),
        ("task", job.task != "train" and job.task, "ask of training"),
        ("compile", job.compile, "ask without it"),
        ("attention", job.attention != "sdpa" and job.attention, "ask of sdpa"),
        ("offload", job.offload != Offload() and job.offload, "leave it out"),
        ("batch.form", job.batch.form != "rows" and job.batch.form, "ask of full rows"),
        ("loss.kind", job.loss.kind != "cross_entropy" and job.loss.kind, "ask of the cross entropy"),
        ("loss.fused_linear_cross_entropy", job.loss.fused_linear_cross_entropy, "ask without it"),
        ("finetuning.quantization", job.finetuning.quantization, "ask without it"),
        ("finetuning.frozen", job.finetuning.frozen, "leave it out"),
        ("finetuning.modules_to_save", job.finetuning.modules_to_save, "leave it out"),
        ("activation_checkpointing.mode", job.activation_checkpointing.mode == "selective", "use full"),
        ("framework_options.optimizer_in_backward", conventions(job)["optimizer_in_backward"], "ask without it"),
    ):
        if value:
            raise CollectorError(
                f"{parameter}={value!r} is not built of {library}'s own networks here; {way}, or ask with your command "
                "(`peakcast dryrun`).",
                parameter=parameter,
                value=value,
            )


def unlike(job: TrainingJob, library: str, what: object) -> CollectorError:
    """The error that says that this library has no such network, with `what` is missing."""
    return CollectorError(
        f"{library} as installed has no network like {job.architecture.name!r} ({what}); ask with your command "
        "(`peakcast dryrun`).",
        parameter="architecture",
        value=job.architecture.name,
    )
