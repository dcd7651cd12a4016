"""TRL's trainers as a measurable stack: their own losses and heads, called on networks and batches that are made here.

A trainer's `__init__` needs a tokenizer and a data set, which leave no tensor in a step. It is not called: the attributes
that a loss reads are set here instead. `tests/collectors/test_preference.py` compares them with a real trainer's.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import OffloadPolicy

from peakcast.collectors.machine.packages import imported
from peakcast.collectors.stacks import layouts
from peakcast.collectors.stacks.batches import random_tokens
from peakcast.collectors.stacks.checkpointing import checkpoint_arguments
from peakcast.collectors.stacks.huggingface_model import model_of
from peakcast.collectors.stacks.huggingface_training import HuggingFaceTraining, causal_model
from peakcast.core.errors import CollectorError
from peakcast.jobs.conventions import conventions, release
from peakcast.jobs.parallelism import Sharding
from peakcast.jobs.spec import Parallelism, TrainingJob

TRL = (1, 15)
"""The first release in which no trainer computes whole logits (`add_fused_lm_head`), the only form that is run here."""
TRAINERS = {
    "dpo": ("dpo_trainer", "DPOTrainer"),
    "reward": ("reward_trainer", "RewardTrainer"),
    "kto": ("kto_trainer", "KTOTrainer"),
    "grpo": ("grpo_trainer", "GRPOTrainer"),
    "cross_entropy": ("sft_trainer", "SFTTrainer"),
}
"""loss.kind -> module and class in `trl.trainer`; for cross entropy, with the convention loss_kernel = "tiles"."""
OUTPUTS = {
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "kto": ("log_probs", "entropy", "mean_logits"),
    "grpo": ("log_probs", "entropy"),
    "cross_entropy": ("log_probs", "entropy", "is_top1"),
}
"""Outputs that a trainer asks of the policy's head, by loss.kind; the reference's head gives log-probabilities only."""


class PreferenceTraining(HuggingFaceTraining):
    """One training run of a TRL trainer."""

    def __init__(self, job: TrainingJob, model: Any, layout: layouts.WrappedModel, reference: Any) -> None:
        super().__init__(job, model, layout, {})
        self.batch = preference_batch(job)
        self.reference = reference
        network = causal_model(model)
        for one in (model, *([reference] if reference is not None else [])):
            if job.loss.kind not in ("grpo", "cross_entropy"):  # each trainer's default `disable_dropout`
                _trl("utils", job).disable_dropout_in_model(one)
        if job.loss.kind in OUTPUTS:
            _trl("utils", job).add_fused_lm_head(network, outputs=OUTPUTS[job.loss.kind])
        for prepared in (model, *([reference] if reference is not None else [])):
            if job.framework_options.get("autocast"):  # as accelerate's prepare_model: one context for each
                prepared.forward = torch.autocast("cuda", dtype=getattr(torch, job.precision.compute))(prepared.forward)
        self.trainer = _trainer(job, model, reference)

    def forward(self, on_loss: Callable[[], None]) -> Any:
        """The trainer's loss. The loss phase is everything after the policy's last layer, including the reference's
        forward."""
        network = causal_model(self._unwrapped)
        # KTO runs the network without a graph beforehand
        announcement = network.base_model.register_forward_hook(lambda *_: on_loss() if torch.is_grad_enabled() else None)
        self._micro_batch = self._micro_batch % self.job.gradient_accumulation_steps + 1
        try:
            with self._accumulation(), self._saves():
                return self.trainer.compute_loss(self.model, dict(self.batch))
        finally:
            announcement.remove()

    def use_deepspeed(self, config: dict[str, Any]) -> None:
        """Make the reference an engine of its own; only stage 3 shards it."""
        plugin = SimpleNamespace(deepspeed_config=config)
        integration = importlib.import_module("transformers.integrations.deepspeed")
        self._known = integration.HfDeepSpeedConfig(config)  # transformers refers to it weakly: TRL asks for the stage
        if self.reference is not None:
            accelerator: Any = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
            self.reference = importlib.import_module("trl.models").prepare_deepspeed(self.reference, accelerator)
            self.trainer.ref_model = self.reference

    def facts(self) -> dict[str, Any]:
        """Settings that were really used."""
        return {**super().facts(), "trl": importlib.import_module("trl").__version__}


def training_of(
    job: TrainingJob,
    model: Any,
    layout: layouts.WrappedModel,
    device: str,
    making: contextlib.AbstractContextManager[Any] | None = None,
) -> PreferenceTraining:
    """The run of `job` with its network `model`. The reference is made here, within the context `making`. Raises:
    CollectorError without TRL."""
    _check(job)
    reference = None
    if job.reference == "model":
        with making or contextlib.nullcontext(), torch.device(device):
            reference = model_of(job)
        reference.eval()  # as from_pretrained leaves it
        if job.loss.kind in OUTPUTS:
            _trl("utils", job).add_fused_lm_head(reference)
        reference = _sharded(reference, job)
    with torch.device(device):
        return PreferenceTraining(job, model, layout, reference)


def _sharded(reference: Any, job: TrainingJob) -> Any:
    """The reference sharded as `prepare_fsdp` does it; with FSDP2 it is one group."""
    if job.parallelism.sharding not in ("fsdp2", "hsdp"):
        return reference
    from peakcast.collectors.stacks.layouts import data_mesh
    from peakcast.collectors.stacks.layouts.fsdp2 import mixed_precision

    mesh = data_mesh(job)
    plugin = SimpleNamespace(
        fsdp_version=2,
        reshard_after_forward=bool(conventions(job)["fsdp_reshard_after_forward"]),
        cpu_offload=OffloadPolicy(),
        mixed_precision_policy=mixed_precision(job),
        ignored_modules=None,
    )
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cuda"),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
    )
    return importlib.import_module("trl.models").prepare_fsdp(reference, accelerator)


def preference_batch(job: TrainingJob) -> dict[str, torch.Tensor]:
    """The batch that the trainer's collator makes: all chosen sequences, then all rejected ones. Each has full length, and
    all its tokens but the first are the answer."""
    ids = random_tokens(job, job.sequence_length)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if job.loss.kind == "grpo":
        return _generated(ids, job)
    if job.loss.kind == "cross_entropy":
        return {**batch, "labels": ids.clone()}
    if job.loss.kind == "kto":
        batch |= {f"KL_{name}": torch.ones_like(ids) for name in ("input_ids", "attention_mask", "completion_mask")}
        batch["label"] = torch.arange(len(ids)) % 2 == 0
    if job.loss.kind in OUTPUTS:
        batch["completion_mask"] = torch.ones_like(ids)
    if job.reference == "precomputed" and job.loss.kind == "kto":
        batch |= {"ref_logps": torch.zeros(len(ids)), "ref_KL_logps": torch.zeros(len(ids))}
    elif job.reference == "precomputed":
        pairs = job.micro_batch_size // 2
        batch |= {"ref_chosen_logps": torch.zeros(pairs), "ref_rejected_logps": torch.zeros(pairs)}
    return batch


def _generated(ids: torch.Tensor, job: TrainingJob) -> dict[str, torch.Tensor]:
    """The fields of a batch of completions that GRPO's step reads; prompts have one token."""
    prompt, completion = ids[:, :1].clone(), ids[:, 1:].clone()
    batch = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": completion}
    batch |= {"completion_mask": torch.ones_like(completion), "advantages": torch.zeros(len(ids))}
    batch["num_items_in_batch"] = torch.tensor(completion.numel())
    if job.reference != "none":
        batch["ref_per_token_logps"] = torch.zeros(completion.shape)
    return batch


_DEFAULT_ARGUMENTS: dict[str, Any] = {
    "max_length": None,
    "center_rewards_coefficient": None,
    "use_bias_correction_kl": False,
    "delta": None,
    "loss_type": "nll",
    "average_tokens_across_devices": False,
}
_DEFAULT_ATTRIBUTES: dict[str, Any] = {
    "aux_loss_enabled": False,
    "calculate_KL": True,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "use_vllm": False,
    "_entropy_bonus_enabled": False,
    "compute_loss_func": None,
    "label_smoother": None,
    "ld_alpha": None,
    "f_divergence_type": "reverse_kl",
    "label_smoothing": 0.0,
    "use_weighting": False,
    "_total_train_tokens": 0,
    "_tp_size": 1,
}
"""Of the arguments and attributes of a trainer, those that its loss reads and that have their defaults in every job."""


def _trainer(job: TrainingJob, model: Any, reference: Any) -> Any:
    """The trainer with the attributes that its loss reads."""
    module, name = TRAINERS[job.loss.kind]
    trainer = object.__new__(getattr(_trl(module, job), name))
    accumulation = job.gradient_accumulation_steps
    trainer.__dict__ |= {
        **_DEFAULT_ATTRIBUTES,
        "model": model,
        "ref_model": reference,
        "accelerator": _OneProcess(model),
        "args": SimpleNamespace(
            **_DEFAULT_ARGUMENTS,
            gradient_checkpointing_kwargs=checkpoint_arguments(job),
            steps_per_generation=accumulation,
            report_to=[],
        ),
        "state": SimpleNamespace(global_step=0),
        "precompute_ref_logps": job.reference == "precomputed",
        "loss_types": ["sigmoid"],
        "loss_type": {"kto": "kto", "grpo": "dapo"}.get(job.loss.kind),
        "loss_weights": [1.0],
        "beta": 0.0 if job.loss.kind == "grpo" and job.reference == "none" else 0.1,
        "current_gradient_accumulation_steps": accumulation,
        "_metrics": {"train": defaultdict(list)},
    }
    return trainer


class _OneProcess:
    """The `Accelerator`'s methods that a loss calls, for a single process."""

    def __init__(self, model: Any) -> None:
        self.device = next(model.parameters()).device
        self.autocast = contextlib.nullcontext
        self.num_processes, self.is_main_process = 1, True
        self.parallelism_config = None

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor

    def unwrap_model(self, model: Any) -> Any:
        return model


def _done(job: TrainingJob) -> tuple[Parallelism, ...]:
    """The layouts in which the loss was run. A reference that FSDP1 would shard too was not."""
    ranks = job.parallelism.data_parallel_size
    shardings: tuple[Sharding, ...] = ("none", "fsdp2") if job.reference == "model" else ("none", "fsdp1", "fsdp2")
    return tuple(Parallelism(data_parallel_size=ranks, sharding=sharding) for sharding in shardings)


KINDS = ("decoder", "multimodal", "undescribed")
"""Kinds of networks that read the batches of tokens that are made here."""


def _check(job: TrainingJob) -> None:
    """Refuse jobs that cannot be run with TRL's losses. Raises: CollectorError."""
    rules = (
        ("framework", job.framework != "huggingface", job.framework, "framework: huggingface"),
        ("architecture.kind", job.architecture.kind not in KINDS, job.architecture.kind, "a decoder"),
        ("architecture.moe", job.architecture.moe is not None, True, "a dense network (experts' balance is a loss too)"),
        ("batch.form", job.batch.form != "rows", job.batch.form, "full rows"),
        (
            "parallelism",
            job.parallelism not in _done(job),
            job.parallelism.world_size,
            "one GPU, or several with DDP or FSDP2, or with FSDP1 without a reference network",
        ),
        ("compile", job.compile, True, "it without torch.compile"),
        (  # of a mask without values a trace takes everything
            "loss.completion_length",
            job.loss.completion_length is not None,
            job.loss.completion_length,
            "all tokens but the first",
        ),
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


def _trl(module: str, job: TrainingJob) -> Any:
    """A module of `trl.trainer`. Raises: CollectorError that says what to install."""
    package = imported("trl", "trl", parameter="loss.kind", value=job.loss.kind)
    if release(package.__version__) < TRL:
        raise CollectorError(
            f"trl={package.__version__} makes whole logits; the releases that are run here begin with "
            f"{'.'.join(map(str, TRL))}: pip install -U trl.",
            parameter="trl",
            value=package.__version__,
        )
    return imported(f"trl.trainer.{module}", "trl", parameter="loss.kind", value=job.loss.kind)
