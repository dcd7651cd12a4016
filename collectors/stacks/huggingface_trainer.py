"""transformers' own Trainer as a measurable stack (`framework_options: {loop: trainer}`). The `huggingface` stack makes the
Trainer's calls itself; this one checks it, as the rows of both can be compared.

The Trainer makes its optimizer, its batches and every call; nothing of it is replaced. Its callbacks report the phases, and
so does a subclass that reports when a loss is computed and when a backward has run.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import tempfile
from typing import Any

import torch
import transformers

from peakcast.collectors.stacks import unsupported
from peakcast.collectors.stacks.batches import labels_of, with_mask
from peakcast.collectors.stacks.checkpointing import checkpoint_arguments
from peakcast.collectors.stacks.huggingface_model import model_of, with_adapters
from peakcast.collectors.stacks.huggingface_training import (
    LABEL_SMOOTHING,
    MAX_GRAD_NORM,
    NEFTUNE_NOISE_ALPHA,
    announcing_loss,
    causal_model,
)
from peakcast.collectors.stacks.optimizers import LEARNING_RATE
from peakcast.collectors.stacks.steps.stepping import Follower
from peakcast.core.errors import CollectorError
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import Batch, Offload, TrainingJob
from peakcast.timelines.timeline import Phase

OPTIM = {
    ("adamw", "foreach"): "adamw_torch",
    ("adamw", "fused"): "adamw_torch_fused",
    ("sgd", "foreach"): "sgd",
    ("adagrad", "foreach"): "adagrad",
    ("rmsprop", "foreach"): "rmsprop",
    ("adafactor", "foreach"): "adafactor",
    ("adamw_8bit", "foreach"): "adamw_bnb_8bit",
    ("paged_adamw_8bit", "foreach"): "paged_adamw_8bit",
    ("paged_adamw_32bit", "foreach"): "paged_adamw_32bit",
    ("lion_8bit", "foreach"): "lion_8bit",
}
"""(name, implementation) -> `TrainingArguments.optim`; foreach is PyTorch's default on a GPU."""
STEPS_AT_MOST = 1000


class Tokens(torch.utils.data.Dataset):  # type: ignore[misc,type-arg]
    """Sequences of random tokens, each made when it is asked for."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    def __len__(self) -> int:
        return STEPS_AT_MOST * self.job.gradient_accumulation_steps * self.job.micro_batch_size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(self.job.architecture.vocab_size, (self.job.sequence_length,))
        return with_mask({"input_ids": ids, "labels": labels_of(self.job, ids)}, self.job)


class Followed(transformers.Trainer):  # type: ignore[misc]
    """A Trainer that reports when it computes a loss and when a backward has run. It changes nothing."""

    job: TrainingJob
    follower: Follower

    def compute_loss(self, model: Any, *arguments: Any, **keywords: Any) -> Any:
        """The Trainer's own, reported."""
        self.follower.begin(Phase.FORWARD)
        with announcing_loss(self.model, self.job, lambda: self.follower.begin(Phase.LOSS)):
            loss = super().compute_loss(model, *arguments, **keywords)
        self.follower.loss_made(loss)
        self.follower.begin(Phase.BACKWARD)
        return loss

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """The Trainer's own, reported."""
        loss = super().training_step(*arguments, **keywords)
        if self.accelerator.sync_gradients:  # last micro-batch: clipping is next
            self.follower.gradients_made()
            self.follower.begin(Phase.GRADIENT_CLIPPING)
        return loss


class Telling(transformers.TrainerCallback):  # type: ignore[misc]
    """Reports the beginning and end of steps, and of the optimizer's."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The step's batches are on the GPU."""
        self.follower.step_begins()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Gradients have been clipped."""
        self.follower.begin(Phase.OPTIMIZER_STEP)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Optimizer states exist, and gradients do still."""
        self.follower.states_made()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Gradients have been released."""
        self.follower.step_ends()


class TrainerTraining:
    """One training run that the Trainer drives."""

    def __init__(self, job: TrainingJob, trainer: Followed, folder: Any) -> None:
        self.job = job
        self.trainer = trainer
        self.model: Any = trainer.model
        self._folder = folder

    @property
    def optimizer(self) -> Any:
        """The Trainer's optimizer, which accelerate wraps when training begins."""
        return self.trainer.optimizer

    @property
    def scaler(self) -> Any:
        """accelerate's loss scaler, for fp16."""
        return self.trainer.accelerator.scaler

    def drive(self, num_steps: int, follower: Follower) -> None:
        """`Trainer.train`, for `num_steps` steps."""
        self.trainer.follower, self.trainer.args.max_steps = follower, num_steps
        self.trainer.add_callback(Telling(follower))
        self.trainer.train()
        self._folder.cleanup()

    def facts(self) -> dict[str, Any]:
        """Settings that were really used."""
        optimizer = self.optimizer
        return {
            "loop": f"transformers.Trainer {transformers.__version__}",
            "attention_implementation": causal_model(self.model).config._attn_implementation,
            "optimizer": type(optimizer).__name__,
            "optimizer_fused": optimizer.defaults.get("fused"),
            "optimizer_foreach": optimizer.defaults.get("foreach"),
            "transformers": transformers.__version__,
        }


def build(job: TrainingJob, device: str) -> TrainerTraining:
    """The Trainer of `job`, its model on `device`. Raises: CollectorError for jobs that it does not run here."""
    unsupported.check(job)
    check(job)
    with torch.device(device):
        model = model_of(job)
    if job.finetuning.method != "full":
        model = with_adapters(model, job)
    os.environ["ACCELERATE_TORCH_DEVICE"] = device  # its own default; a trace has no GPU from which it could see that
    _without_namesake_of_datasets()
    folder = tempfile.TemporaryDirectory(prefix="peakcast-trainer-")
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    asked = {name: value for name, value in training_arguments(job).items() if name in known}  # transformers 4 has no
    # train_sampling_strategy; rows are all alike, so their order does not matter
    arguments = transformers.TrainingArguments(output_dir=folder.name, use_cpu=device == "cpu", **asked)
    trainer = Followed(model=model, args=arguments, train_dataset=Tokens(job))
    trainer.job = job
    trainer.create_optimizer()
    return TrainerTraining(job, trainer, folder)


def _without_namesake_of_datasets() -> None:
    """Hide the folder `datasets/` of a source checkout on PYTHONPATH. Python would import it in place of Hugging Face's
    library of that name, which the Trainer imports to check the type of its data."""
    found = importlib.util.find_spec("datasets")
    if found is not None and found.origin is None:  # a folder without code
        importlib.import_module("transformers.trainer").is_datasets_available = lambda: False  # type: ignore[attr-defined]


def training_arguments(job: TrainingJob) -> dict[str, Any]:
    """The job as `TrainingArguments`, without the device and the number of steps."""
    autocast = bool(conventions(job).get("autocast"))
    checkpointed = job.activation_checkpointing.mode == "full"
    return {
        "per_device_train_batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "optim": OPTIM[job.optimizer.name, job.optimizer.implementation],
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": MAX_GRAD_NORM,
        "bf16": autocast and job.precision.compute == "bfloat16",
        "fp16": autocast and job.precision.compute == "float16",
        "gradient_checkpointing": checkpointed,
        "gradient_checkpointing_kwargs": checkpoint_arguments(job) if checkpointed else None,
        "neftune_noise_alpha": NEFTUNE_NOISE_ALPHA if conventions(job).get("neftune") else None,
        "label_smoothing_factor": LABEL_SMOOTHING if conventions(job).get("smooths_labels") else 0.0,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def check(job: TrainingJob) -> None:
    """Refuse jobs for which the Trainer would need other arguments. Raises: CollectorError naming the parameter."""
    checkpointing, optimizer = job.activation_checkpointing, (job.optimizer.name, job.optimizer.implementation)
    rules: tuple[tuple[str, object, bool, str], ...] = (
        ("parallelism", f"{job.parallelism.world_size} ranks", job.parallelism.world_size == 1, "one GPU"),
        ("batch", job.batch, job.batch == Batch(), "full rows"),
        ("optimizer", "/".join(optimizer), optimizer in OPTIM, " or ".join(map("/".join, OPTIM))),
        ("optimizer.momentum", job.optimizer.momentum, not job.optimizer.momentum, "0"),
        (
            "activation_checkpointing",
            checkpointing.mode if checkpointing.mode == "selective" else f"every {checkpointing.every_n_layers} layers",
            checkpointing.mode != "selective" and checkpointing.every_n_layers == 1,
            "full checkpointing of every layer, or none",
        ),
        ("offload", job.offload, job.offload == Offload(), "nothing offloaded"),
        ("compile", job.compile, not job.compile, "false"),
        ("loss.kind", job.loss.kind, job.loss.kind == "cross_entropy", "cross_entropy"),
        (
            "framework_options.loss_kernel",
            conventions(job)["loss_kernel"],
            conventions(job)["loss_kernel"] != "tiles",
            "the Trainer's own loss",
        ),
        ("precision.compute", job.precision.compute, job.precision.compute != "float8", "bfloat16"),
        ("finetuning.quantization", job.finetuning.quantization, job.finetuning.quantization is None, "null"),
        ("loss.fused_linear_cross_entropy", True, not job.loss.fused_linear_cross_entropy, "false"),
        ("framework_options.liger_kernels", True, not conventions(job).get("liger_kernels"), "without them"),
    )
    for parameter, value, holds, done in rules:
        if not holds:
            raise CollectorError(
                f"{parameter}={value!r} is not run with framework_options.loop='trainer'; measure {done}, or leave the "
                "option out: the stack then makes the Trainer's calls itself.",
                parameter=parameter,
                value=value,
            )
