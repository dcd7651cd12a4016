"""Hugging Face transformers (and peft) as a measurable stack: a real model with random weights, a real optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformers

from peakcast.architecture import Architecture
from peakcast.collectors.frameworks import scope
from peakcast.dialects.hf_reverse import hf_config_of
from peakcast.errors import CollectorError
from peakcast.spec import TrainingJob

MAX_GRAD_NORM = 1.0


class HuggingFaceTraining:
    """One training run of a causal language model."""

    def __init__(self, job: TrainingJob, model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
        self.job = job
        self.model = model
        self.optimizer = optimizer
        self.ids = ids
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._outputs: Any = None

    def forward(self, on_loss: Callable[[], None]) -> Any:
        """The model with labels, as its users call it: the loss is part of its forward."""
        inner = self._causal_model()
        loss_function = inner.loss_function

        def announced(*arguments: Any, **keywords: Any) -> Any:
            on_loss()
            return loss_function(*arguments, **keywords)

        inner.loss_function = announced
        try:
            with self._autocast():
                outputs = self.model(input_ids=self.ids, labels=self.ids, use_cache=False)
        finally:
            inner.loss_function = loss_function
        if self.job.framework == "torch":
            self._outputs = outputs  # a plain loop keeps them until it assigns them again
        return outputs.loss

    def _causal_model(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.job.framework_options.get("autocast"):
            context: contextlib.AbstractContextManager[Any] = torch.autocast(
                "cuda", dtype=getattr(torch, self.job.precision.compute)
            )
            return context
        return contextlib.nullcontext()

    def backward(self, loss: Any) -> None:
        """Backward of the loss."""
        loss.backward()

    def clip(self) -> None:
        """As the Trainer does by default."""
        torch.nn.utils.clip_grad_norm_(self.trained, MAX_GRAD_NORM)

    def step(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Release the gradients (set_to_none is the default)."""
        self.optimizer.zero_grad()

    def facts(self) -> dict[str, Any]:
        """What was really chosen."""
        chosen = self._causal_model().config._attn_implementation
        options = self.optimizer.defaults
        return {
            "attention_implementation": chosen,
            "optimizer": type(self.optimizer).__name__,
            "optimizer_fused": options.get("fused"),
            "optimizer_foreach": options.get("foreach"),
            "transformers": transformers.__version__,
        }


def build(job: TrainingJob, device: str) -> HuggingFaceTraining:
    """A run of `job`: model on `device` in `precision.parameters`, optimizer, and one batch of random tokens."""
    scope.check(job)
    with torch.device(device):
        model = _model(job)
        # many distinct tokens: the embedding's backward and an expert router both allocate by how they are spread
        ids = torch.randint(job.architecture.vocab_size, (job.micro_batch_size, job.sequence_length))
    model.train()
    if job.activation_checkpointing.mode == "full":
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": job.activation_checkpointing.use_reentrant},
            **_every_n_layers(job),
        )
    if job.finetuning.method == "lora":
        model = _with_adapters(model, job)
    return HuggingFaceTraining(job, model, _optimizer(job, model), ids)


def _every_n_layers(job: TrainingJob) -> dict[str, int]:
    every = job.activation_checkpointing.every_n_layers
    return {} if every == 1 else {"every_n_layers": every}  # transformers 5.17 has it, some before do not


def _model(job: TrainingJob) -> Any:
    attention = {"flex": "flex_attention"}.get(job.attention, job.attention)
    config = transformers.AutoConfig.for_model(**hf_config_of(_trainable(job.architecture)))
    dtype = getattr(torch, job.precision.parameters)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)


def _trainable(architecture: Architecture) -> Architecture:
    if architecture.kind != "decoder":
        raise CollectorError(
            f"architecture={architecture.name!r} is of kind={architecture.kind!r}; only decoders are collected.",
            parameter="architecture",
            value=architecture.name,
        )
    if architecture.model_type not in transformers.CONFIG_MAPPING:
        raise CollectorError(
            f"model_type={architecture.model_type!r} is not part of transformers {transformers.__version__} (its code is "
            f"on the hub and is not run here), so {architecture.name!r} cannot be built; measure another family.",
            parameter="model_type",
            value=architecture.model_type,
        )
    return architecture


def _with_adapters(model: Any, job: TrainingJob) -> Any:
    try:
        import peft
    except ImportError as error:
        raise CollectorError(
            "finetuning.method='lora' needs peft; install it with: pip install 'peakcast[collect]'.",
            parameter="finetuning.method",
        ) from error
    tuning = job.finetuning
    targets = list(tuning.targets) or None
    if targets == ["all-linear"]:
        targets = "all-linear"  # type: ignore[assignment]
    config = peft.LoraConfig(
        r=tuning.rank or 8,
        lora_alpha=tuning.alpha or 16,
        lora_dropout=tuning.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    if job.activation_checkpointing.mode == "full":
        model.enable_input_require_grads()
    return peft.get_peft_model(model, config, autocast_adapter_dtype=tuning.adapter_dtype in (None, "float32"))


def _optimizer(job: TrainingJob, model: Any) -> torch.optim.Optimizer:
    """The optimizer with the Trainer's two groups (with and without weight decay), or one group in a plain loop."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if job.framework == "huggingface":
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
    implementation = job.optimizer.implementation
    switches = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    if job.optimizer.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if job.optimizer.name == "adamw" else torch.optim.Adam
        return kind(groups, lr=1e-5, **switches)
    if job.optimizer.name == "sgd":
        return torch.optim.SGD(groups, lr=1e-5, momentum=job.optimizer.momentum, **switches)
    if job.optimizer.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=1e-5, foreach=implementation == "foreach")
    raise CollectorError(
        f"optimizer.name={job.optimizer.name!r} has no collector yet; measure adamw, adam, sgd or adafactor.",
        parameter="optimizer.name",
        value=job.optimizer.name,
    )
