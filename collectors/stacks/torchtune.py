"""torchtune's own networks in its own step.

Source: torchtune 0.6.1 recipes/full_finetune_single_device.py and lora_finetune_single_device.py (`_setup_model`,
`_loss_step`, `train`), models/*/_component_builders.py.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from peakcast.collectors.stacks import own
from peakcast.core.errors import CollectorError
from peakcast.dialects.common.own_networks import BUILDER, TORCHTUNE
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.networks.undescribed import configuration_of

IGNORED = -100
"""The label of tokens that count for no loss (torchtune/data/_common.py CROSS_ENTROPY_IGNORE_IDX)."""
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
MLP, OUTPUT = {"gate_proj", "up_proj", "down_proj"}, "lm_head"
"""Projections by Llama's names, and torchtune's (`lora_attn_modules`, `apply_lora_to_mlp`, `apply_lora_to_output`)."""


def build(job: TrainingJob, device: str) -> TorchtuneTraining:
    """The run of `job`, whose architecture has the arguments of torchtune's function, on `device`. Raises:
    CollectorError."""
    own.check(job, TORCHTUNE)
    from torchtune import modules, training

    _check_precision(job)
    with training.set_default_dtype(getattr(torch, job.precision.parameters)), torch.device(device):
        model = _network(job)
    model.train()
    if job.finetuning.method != "full":
        from torchtune.modules.peft import get_adapter_params, set_trainable_params

        set_trainable_params(model, get_adapter_params(model))
    if job.activation_checkpointing.mode != "none":
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    return TorchtuneTraining(job, model, device)


class TorchtuneTraining(own.OwnTraining):
    """The loop of `train`."""

    def __init__(self, job: TrainingJob, model: Any, device: str) -> None:
        super().__init__(job, model, device)
        from torchtune.modules.loss import CEWithChunkedOutputLoss

        asked = conventions(job)
        chunks = int(asked["logits_chunks"]) if asked["loss_kernel"] == "chunked_logits" else 0
        self._loss = CEWithChunkedOutputLoss(chunks) if chunks else torch.nn.CrossEntropyLoss(ignore_index=IGNORED)
        if chunks:
            model.set_num_output_chunks(chunks)
        self._ignored = torch.full((job.micro_batch_size, 1), IGNORED, device=device)
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=device)

    def forward(self, on_loss: Callable[[], None]) -> Any:
        """The loss of whole logits or of chunks of them; the logits are released before backward."""
        self._num_tokens = (self.batch["labels"] != IGNORED).sum()
        logits = self.model(tokens=self.batch["tokens"])
        on_loss()
        labels = torch.hstack((self.batch["labels"][..., 1:], self._ignored))
        if not isinstance(logits, list):
            labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
        return self._loss(logits, labels)

    def backward(self, loss: Any) -> None:
        """Backward of the sum over tokens."""
        (loss * self._num_tokens).backward()

    def clip(self) -> None:
        """Divide the gradients by the number of tokens."""
        from torchtune import training

        training.scale_grads(self.model, 1 / self._num_tokens)


def _check_precision(job: TrainingJob) -> None:
    if job.precision.compute != job.precision.parameters:
        raise CollectorError(
            f"precision.compute={job.precision.compute!r} with weights in {job.precision.parameters} is not torchtune's, "
            "which computes in the dtype of the weights.",
            parameter="precision.compute",
            value=job.precision.compute,
        )


def _network(job: TrainingJob) -> Any:
    """The job's network with random weights, and with torchtune's adapters if it has some."""
    told = configuration_of(job.architecture)
    name, adapters = str(told.pop(BUILDER)), _adapters(job)
    try:
        module = importlib.import_module(f"torchtune.models.{name}._component_builders")
    except ImportError as error:
        raise own.unlike(job, TORCHTUNE, error) from error
    function = getattr(module, f"lora_{name}" if adapters else name)
    accepted = inspect.signature(function).parameters
    if adapters.get("apply_lora_to_output") and "apply_lora_to_output" not in accepted:
        raise own.unlike(job, TORCHTUNE, "apply_lora_to_output")
    return function(**{name: value for name, value in {**told, **adapters}.items() if name in accepted})


def _adapters(job: TrainingJob) -> dict[str, Any]:
    """torchtune's arguments for the adapters that the job names; empty without adapters. Raises: CollectorError."""
    tuning = job.finetuning
    if tuning.method == "full":
        return {}
    targets = {*ATTENTION, *MLP} if tuning.targets == ("all-linear",) else set(tuning.targets)
    left = targets - {*ATTENTION, *MLP, OUTPUT}
    if left or (targets & MLP and not targets >= MLP):
        raise CollectorError(
            f"finetuning.targets={sorted(left or targets & MLP)} have no adapters of their own in torchtune; use "
            f"{', '.join(ATTENTION)}, {OUTPUT}, and {', '.join(sorted(MLP))} together.",
            parameter="finetuning.targets",
            value=sorted(targets),
        )
    return {
        "lora_attn_modules": [theirs for ours, theirs in ATTENTION.items() if ours in targets],
        "apply_lora_to_mlp": bool(targets & MLP),
        "apply_lora_to_output": OUTPUT in targets,
        "lora_rank": tuning.rank or 8,
        "lora_alpha": float(tuning.alpha or 16),
        "lora_dropout": tuning.dropout,
    }
