"""LitGPT's own networks in its own step.

Source: litgpt 0.4.2 and 0.5.13 finetune/full.py and lora.py (`main`, `fit`): the module that Lightning's Fabric wraps, on
one device.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from peakcast.collectors.stacks import own
from peakcast.core.errors import CollectorError
from peakcast.dialects.common.litgpt_targets import OF_QKV, PROJECTIONS, litgpt_targets
from peakcast.dialects.common.own_networks import LITGPT
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.networks.undescribed import configuration_of

SIZES = ("n_embd", "n_head", "n_query_groups", "intermediate_size", "mlp_class_name")
"""Fields by which a network of `litgpt.config.configs` is found."""
HEAD_CHUNK = 128
"""finetune/lora.py `model(input_ids, lm_head_chunk_size=128)`."""


def build(job: TrainingJob, device: str) -> LitGptTraining:
    """The run of `job`, whose architecture has LitGPT's own configuration, on `device`. Raises: CollectorError."""
    own.check(job, LITGPT)
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricModule

    precision = _precision(job)
    with precision.module_init_context(), torch.device(device):
        model = _network(job)
    model.train()
    if job.activation_checkpointing.mode != "none":
        _checkpoint(model)
    model.max_seq_length = job.sequence_length
    strategy = SingleDeviceStrategy(device=torch.device(device), precision=precision)
    return LitGptTraining(job, precision.convert_module(model), device, lambda inner: _FabricModule(inner, strategy))


class LitGptTraining(own.OwnTraining):
    """The loop of `fit`: its variables refer to the logits until it assigns them again."""

    def __init__(self, job: TrainingJob, model: Any, device: str, wrap: Callable[[Any], Any]) -> None:
        super().__init__(job, model, device)
        self._wrapped = wrap(model)
        self._logits: Any = None
        self._loss: Any = None

    def forward(self, on_loss: Callable[[], None]) -> Any:
        """The loss of the network's logits, a chunk after the other; with adapters, these are made in chunks too."""
        from litgpt.utils import chunked_cross_entropy

        tokens, labels = self.batch["tokens"], self.batch["labels"]
        if self.job.finetuning.method == "full":
            self._logits = self._wrapped(tokens)
            on_loss()
            self._loss = chunked_cross_entropy(self._logits[..., :-1, :], labels[..., 1:])
            return self._loss
        self._logits = self._wrapped(tokens, lm_head_chunk_size=HEAD_CHUNK)
        on_loss()
        self._logits[-1] = self._logits[-1][..., :-1, :]
        self._loss = chunked_cross_entropy(self._logits, labels[..., 1:])
        return self._loss

    def backward(self, loss: Any) -> None:
        """`fabric.backward`, of the mean over micro-batches."""
        (loss / self.job.gradient_accumulation_steps).backward()


def _precision(job: TrainingJob) -> Any:
    """Fabric's plugin for `--precision`."""
    from lightning.fabric.plugins import HalfPrecision, MixedPrecision, Precision

    weights, compute = job.precision.parameters, job.precision.compute
    halves: dict[str, Literal["bf16-true", "16-true"]] = {"bfloat16": "bf16-true", "float16": "16-true"}
    if weights in halves and compute == weights:
        return HalfPrecision(halves[weights])
    if weights == "float32" and compute == "bfloat16":
        return MixedPrecision("bf16-mixed", "cuda")
    if weights == compute == "float32":
        return Precision()
    raise CollectorError(
        f"precision.compute={compute!r} with weights in {weights} is none of LitGPT's that are built here: bf16-true, "
        "16-true, bf16-mixed, 32-true.",
        parameter="precision.compute",
        value=compute,
    )


def _network(job: TrainingJob) -> Any:
    """The job's network with random weights, and with LitGPT's adapters if it has some."""
    told, adapts = configuration_of(job.architecture), job.finetuning.method != "full"
    if not adapts:
        from litgpt import model as networks

        return networks.GPT(_config(networks.Config, told, job))
    from litgpt import lora

    tuning = job.finetuning
    sizes = {"lora_r": tuning.rank or 8, "lora_alpha": int(tuning.alpha or 16), "lora_dropout": tuning.dropout}
    model = lora.GPT(_config(lora.Config, told, job, {**sizes, **_switches(job)}))
    lora.mark_only_lora_as_trainable(model)
    return model


def _switches(job: TrainingJob) -> dict[str, bool]:
    """LitGPT's switches for the projections that the job names. Raises: CollectorError for one without a switch."""
    targets = set(job.finetuning.targets)
    if targets == {"all-linear"}:
        return {name: name != "lora_head" for name in PROJECTIONS}
    reached = {name: set(litgpt_targets([name], job.architecture)) for name in PROJECTIONS}
    if left := targets - set().union(*reached.values()):
        raise CollectorError(
            f"finetuning.targets={sorted(left)} have no adapters in LitGPT; use {', '.join(PROJECTIONS)}.",
            parameter="finetuning.targets",
            value=sorted(left),
        )
    parts = str(conventions(job)["adapted_of_qkv"])
    return {name: bool(found & targets) and OF_QKV.get(name, "") in parts for name, found in reached.items()}


def _config(kind: Any, told: Mapping[str, Any], job: TrainingJob, more: Mapping[str, Any] | None = None) -> Any:
    """LitGPT's `Config` of a network. What it does not say follows from the network of the same sizes that LitGPT lists."""
    from litgpt.config import configs

    fields = {field.name for field in dataclasses.fields(kind)}
    known = {name: value for name, value in told.items() if name != "sliding_window_size"}  # before 0.5 there were none
    if missing := known.keys() - fields:
        raise own.unlike(job, LITGPT, ", ".join(sorted(missing)))
    listed: Mapping[str, Any] = next((one for one in configs if _is_like(kind, one, told)), {})
    unsaid = {"name", "hf_config", "vocab_size", "padding_multiple", "n_layer"}
    rest = {name: value for name, value in listed.items() if name not in unsaid}
    own_values = {name: value for name, value in told.items() if name in fields}
    return kind(**{**rest, "vocab_size": told["padded_vocab_size"], **own_values, **(more or {})})


def _is_like(kind: Any, listed: Mapping[str, Any], told: Mapping[str, Any]) -> bool:
    """Whether a listed network has these sizes, and windows if these have."""
    made = kind(**{name: value for name, value in listed.items() if name in inspect.signature(kind).parameters})
    alike = all(getattr(made, name) == told[name] for name in SIZES)
    return alike and bool(getattr(made, "sliding_window_size", None)) == bool(told.get("sliding_window_size"))


def _checkpoint(model: Any) -> None:
    """Checkpoints of blocks, as Lightning's FSDPStrategy makes them for `activation_checkpointing_policy={Block}`."""
    from litgpt.model import Block
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))
