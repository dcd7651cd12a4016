"""TRL's trainers as a measurable stack: their own losses and heads, called on networks and batches that are made here.

A trainer's `__init__` wants a tokenizer and a data set, of which no tensor is left in a step; what it sets that a loss
asks for is set here instead. `tests/collectors/test_preference.py` holds both beside each other.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from peakcast.collectors.frameworks import layouts
from peakcast.collectors.frameworks.batches import random_tokens
from peakcast.collectors.frameworks.checkpointing import checkpoint_arguments
from peakcast.collectors.frameworks.huggingface import HuggingFaceTraining, causal_model
from peakcast.collectors.frameworks.huggingface_model import model_of
from peakcast.conventions import release
from peakcast.errors import CollectorError
from peakcast.spec import Parallelism, TrainingJob

TRL = (1, 15)
"""The release from which on no trainer makes whole logits (`add_fused_lm_head`); the only form that is run here."""
TRAINERS = {"dpo": ("dpo_trainer", "DPOTrainer"), "reward": ("reward_trainer", "RewardTrainer")}
"""loss.kind -> module and class in `trl.trainer`."""
OUTPUTS = {"dpo": ("log_probs", "entropy", "mean_logits", "is_top1")}
"""What a trainer asks of the policy's head; of a reference's, log-probabilities alone."""
NO_MODEL_INPUTS = ("completion_mask",)


class PreferenceTraining(HuggingFaceTraining):
    """One training run of a TRL trainer."""

    def __init__(self, job: TrainingJob, model: Any, layout: layouts.Layout, reference: Any) -> None:
        super().__init__(job, model, layout, {})
        self.batch = batch_of(job)
        self.reference = reference
        network = causal_model(model)
        for one in (model, *([reference] if reference is not None else [])):
            _trl("utils").disable_dropout_in_model(one)  # the default of each trainer's `disable_dropout`
        if job.loss.kind in OUTPUTS:
            add_head = _trl("utils").add_fused_lm_head
            add_head(network, outputs=OUTPUTS[job.loss.kind])
            if reference is not None:
                add_head(reference)
        for prepared in (model, *([reference] if reference is not None else [])):
            if job.framework_options.get("autocast"):  # as accelerate's prepare_model: a context of its own for each
                prepared.forward = torch.autocast("cuda", dtype=getattr(torch, job.precision.compute))(prepared.forward)
        self.trainer = _trainer(job, model, reference)

    def forward(self, on_loss: Callable[[], None]) -> Any:
        """The trainer's loss; what follows the policy's last layer belongs to it, the reference's forward too."""
        network = causal_model(self._unwrapped)
        announcement = network.base_model.register_forward_hook(lambda *_: on_loss())
        self._micro_batch = self._micro_batch % self.job.gradient_accumulation_steps + 1
        try:
            with self._accumulation(), self._saves():
                return self.trainer.compute_loss(self.model, dict(self.batch))
        finally:
            announcement.remove()

    def facts(self) -> dict[str, Any]:
        """What was really chosen."""
        return {**super().facts(), "trl": importlib.import_module("trl").__version__}


def training_of(job: TrainingJob, model: Any, layout: layouts.Layout, device: str) -> PreferenceTraining:
    """The run of `job`, whose network has been made; the reference is made here. Raises: CollectorError without TRL."""
    _check(job)
    reference = None
    if job.reference == "model":
        with torch.device(device):
            reference = model_of(job)
        reference.eval()  # as from_pretrained leaves it
    with torch.device(device):
        return PreferenceTraining(job, model, layout, reference)


def batch_of(job: TrainingJob) -> dict[str, torch.Tensor]:
    """What the trainer's collator makes: all chosen sequences, then all rejected ones, each full and all of it an answer,
    but for its first token."""
    ids = random_tokens(job, job.sequence_length)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if job.loss.kind in OUTPUTS:
        batch["completion_mask"] = torch.ones_like(ids)
    if job.reference == "precomputed":
        pairs = job.micro_batch_size // 2
        batch |= {"ref_chosen_logps": torch.zeros(pairs), "ref_rejected_logps": torch.zeros(pairs)}
    return batch


def _trainer(job: TrainingJob, model: Any, reference: Any) -> Any:
    """The trainer with what its loss asks for, as its configuration's defaults have it."""
    module, name = TRAINERS[job.loss.kind]
    trainer = object.__new__(getattr(_trl(module), name))
    trainer.__dict__ |= {
        "model": model,
        "ref_model": reference,
        "accelerator": _OneProcess(model),
        "args": SimpleNamespace(
            gradient_checkpointing_kwargs=checkpoint_arguments(job), max_length=None, center_rewards_coefficient=None
        ),
        "aux_loss_enabled": False,
        "precompute_ref_logps": job.reference == "precomputed",
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "beta": 0.1,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "label_smoothing": 0.0,
        "use_weighting": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return trainer


class _OneProcess:
    """What an `Accelerator` answers a loss of one process."""

    def __init__(self, model: Any) -> None:
        self.device = next(model.parameters()).device
        self.autocast = contextlib.nullcontext

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    gather_for_metrics = gather

    def unwrap_model(self, model: Any) -> Any:
        return model


def _check(job: TrainingJob) -> None:
    """Refuse what is not run with TRL's losses. Raises: CollectorError."""
    rules = (
        ("framework", job.framework != "huggingface", job.framework, "framework: huggingface"),
        ("architecture.kind", job.architecture.kind != "decoder", job.architecture.kind, "a decoder"),
        ("architecture.moe", job.architecture.moe is not None, True, "a dense network (experts' balance is a loss too)"),
        ("batch.form", job.batch.form != "rows", job.batch.form, "full rows"),
        (
            "parallelism",
            job.parallelism != Parallelism(data_parallel_size=job.parallelism.data_parallel_size),
            job.parallelism.world_size,
            "one GPU, or several with DDP",
        ),
        ("compile", job.compile, True, "it without torch.compile"),
        ("offload.activations", job.offload.activations, True, "it without offload"),
        ("loss.fused_linear_cross_entropy", job.loss.fused_linear_cross_entropy, True, "TRL's own head"),
    )
    for parameter, refused, value, done in rules:
        if refused:
            raise CollectorError(
                f"{parameter}={value!r} has no collector yet with loss.kind={job.loss.kind!r}; measure {done}.",
                parameter=parameter,
                value=value,
            )


def _trl(module: str) -> Any:
    """A module of `trl.trainer`. Raises: CollectorError that says what to install."""
    try:
        package = importlib.import_module("trl")
    except ImportError as error:
        raise CollectorError(
            "loss.kind other than cross_entropy runs TRL's own losses; install it with: pip install trl.",
            parameter="loss.kind",
        ) from error
    if release(package.__version__) < TRL:
        raise CollectorError(
            f"trl={package.__version__} makes whole logits; the releases that are run here begin with "
            f"{'.'.join(map(str, TRL))}: pip install -U trl.",
            parameter="trl",
            value=package.__version__,
        )
    return importlib.import_module(f"trl.trainer.{module}")
