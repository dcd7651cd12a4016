"""Stacks that can be measured: one small module each, all with `build(job, device) -> Training`.

A stack that is not installed says what to install; the rest of a grid goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Protocol

from peakcast.core.errors import CollectorError
from peakcast.dialects.common.own_networks import LITGPT, TORCHTUNE, as_trained_by_library, library_of, own_network
from peakcast.jobs.lengths import at_its_longest, lengths_change
from peakcast.jobs.spec import TrainingJob

STACKS = {
    "huggingface": ("peakcast.collectors.stacks.huggingface", "'peakcast[collect]'"),
    "torch": ("peakcast.collectors.stacks.huggingface", "'peakcast[collect]'"),
    "deepspeed": ("peakcast.collectors.stacks.deepspeed", "deepspeed"),
    "megatron": ("peakcast.collectors.stacks.megatron_core", "--no-deps megatron-core"),  # needs torch only
}
"""framework -> its module, and what to install for it. A plain torch loop trains the same networks, and keeps the model's
outputs until the next step, as plain loops do."""
PACKAGES = {"huggingface": ("transformers", "accelerate", "peft"), "deepspeed": ("deepspeed",), "megatron": ("megatron",)}
"""framework -> the packages that this installs."""


OWN = {LITGPT: "peakcast.collectors.stacks.litgpt", TORCHTUNE: "peakcast.collectors.stacks.torchtune"}
"""Library with networks of its own -> the module that builds them, in its own loop."""


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
        """Settings that were really used: attention implementation, optimizer path."""


INFERENCE = "peakcast.collectors.stacks.huggingface_inference"


def build(job: TrainingJob, device: str, *, longest: bool = False) -> Training:
    """The training run of `job` on `device` with random weights. `longest`: if lengths change from step to step, every step
    is of the longest. Raises: CollectorError when the stack cannot run the job."""
    _check_lengths(job)
    asked = at_its_longest(job) if longest else job
    training: Training = _made(as_trained_by_library(asked), _module(job), "build", device)
    return training


def _module(job: TrainingJob) -> str:
    """The module that builds the job's stack; "" if there is none."""
    own = "" if own_network(job) is None else OWN.get(library_of(job), "")
    return own or STACKS.get(job.framework, ("", ""))[0]


def _check_lengths(job: TrainingJob) -> None:
    """Refuse lengths that change in three cases: ranks that share a sequence need one length, pipeline stages are told the
    shapes of their inputs beforehand, and torch.compile would compile each length anew."""
    layout = job.parallelism
    shared = layout.tensor_parallel_size * layout.pipeline_parallel_size * layout.context_parallel_size > 1
    one_length = shared or job.compile or job.framework == "megatron" or job.architecture.kind != "decoder"
    if lengths_change(job) and one_length:
        raise CollectorError(
            f"batch.shortest_sequence={job.batch.shortest_sequence} has no collector under tensor, pipeline and context "
            "parallelism, with compile, in Megatron, nor of what is no decoder; leave it out: lengths are then the same.",
            parameter="batch.shortest_sequence",
            value=job.batch.shortest_sequence,
        )


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
        raise CollectorError(
            f"framework={job.framework!r} needs a package that is not installed ({error}); {_way_out(job, error)}.",
            parameter="framework",
            value=job.framework,
        ) from error


def _way_out(job: TrainingJob, error: ImportError) -> str:
    """How to install what is missing: the stack's packages, else the one that the error names."""
    missing = (error.name or "").partition(".")[0]
    if own_network(job) is not None and missing == library_of(job):
        return f"install it with: pip install {missing}"
    brought = PACKAGES.get(job.framework, PACKAGES["huggingface"])
    if missing in brought or not all(importlib.util.find_spec(package) for package in brought):
        return f"install it with: pip install {STACKS[job.framework][1]}"
    return f"install it with: pip install {missing}" if missing else "install what it names"
