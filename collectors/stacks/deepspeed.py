"""DeepSpeed ZeRO-1, 2 and 3, with and without offload: its engine around the Hugging Face network, as the Trainer runs it.

Source: DeepSpeed 0.19.8 `runtime/engine.py`, `runtime/zero/config.py`; accelerate `utils/deepspeed.py` for the calls.
AdamW is torch's own, which DeepSpeed accepts: its own fused kernels would have to be compiled on the machine, and keep the
same states.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from peakcast.collectors.stacks import huggingface
from peakcast.collectors.stacks.huggingface_training import MAX_GRAD_NORM, HuggingFaceTraining, causal_model
from peakcast.core.errors import CollectorError
from peakcast.jobs.conventions import conventions, replaces_linear
from peakcast.jobs.spec import Parallelism, TrainingJob

DETAILS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_reuse_distance",
    "stage3_max_live_parameters",
    "sub_group_size",
    "round_robin_gradients",
    "contiguous_gradients",
    "reduce_scatter",
)
"""Conventions that have the same names in DeepSpeed's `zero_optimization`."""


class DeepSpeedTraining:
    """A Hugging Face run whose model and optimizer are DeepSpeed's engine."""

    def __init__(self, job: TrainingJob, inner: HuggingFaceTraining, config: dict[str, Any]) -> None:
        import deepspeed

        self.job = job
        self.inner = inner
        self.engine, *_ = deepspeed.initialize(model=inner.model, optimizer=inner.optimizer, config=config)
        inner.model = self.engine  # its forward calls this
        inner.optimizer = None
        self.model: Any = self.engine.module
        self.optimizer: Any = self.engine.optimizer
        self._micro_batch = 0

    def forward(self, on_loss: Callable[[], None]) -> Any:
        """Forward of the model with labels, through the engine. Returns the loss."""
        return self.inner.forward(on_loss)

    def backward(self, loss: Any) -> None:
        """The engine's backward, which also reduces gradients. After a micro-batch that is not the last, its step updates
        nothing."""
        self._micro_batch = self._micro_batch % self.job.gradient_accumulation_steps + 1
        self.engine.backward(loss)
        if self._micro_batch < self.job.gradient_accumulation_steps:
            self.engine.step()

    def clip(self) -> None:
        """Nothing to do: the engine clips in its step."""

    def step(self) -> None:
        """The engine's step: clipping, the update of this rank's partition, and the gathering of weights."""
        self.engine.step()

    def zero_grad(self) -> None:
        """Nothing to do: the engine's step has released the gradients."""

    def facts(self) -> dict[str, Any]:
        """Settings that were really used."""
        attention = causal_model(self.model).config._attn_implementation
        return {
            "attention_implementation": attention,
            "optimizer": f"{type(self.optimizer).__name__} of {type(self.optimizer.optimizer).__name__}",
            "optimizer_fused": self.optimizer.optimizer.defaults.get("fused"),
            "optimizer_foreach": self.optimizer.optimizer.defaults.get("foreach"),
        }


def configuration(job: TrainingJob) -> dict[str, Any]:
    """The job as a DeepSpeed configuration. Buckets are of DeepSpeed's default sizes unless the job says otherwise."""
    chosen = conventions(job.replace(framework="deepspeed"))
    layout, half = job.parallelism, {"bfloat16": "bf16", "float16": "fp16"}.get(job.precision.parameters)
    zero: dict[str, Any] = {"stage": layout.zero_stage, **{name: chosen[name] for name in DETAILS}}
    zero["stage3_param_persistence_threshold"] = chosen["stage3_param_persistence_threshold"]
    if layout.zero_stage == 3 and not replaces_linear(job):
        zero["memory_efficient_linear"] = False
    if chosen["overlap_comm"] != "auto":
        zero["overlap_comm"] = chosen["overlap_comm"]
    if job.offload.optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if job.offload.parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "gradient_clipping": MAX_GRAD_NORM,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,  # as transformers 5.17 integrations/deepspeed.py sets it
        **({half: {"enabled": True}} if half else {}),
    }


def build(job: TrainingJob, device: str) -> DeepSpeedTraining:
    """The run of `job` on `device`. Stage 3 partitions each weight when it is made, unless `partitions_as_made` is false:
    transformers makes networks in that way, peft does not make its adapters so. Raises: CollectorError for jobs that cannot
    be run here."""
    check(job)
    import deepspeed
    import torch.utils._device

    _start_group()
    plain = job.replace(
        framework="huggingface",
        parallelism=Parallelism(),
        offload=replace(job.offload, parameters=False, optimizer=False),
        precision=replace(job.precision, main_parameters=None),
    )
    if job.loss.kind != "cross_entropy" and job.finetuning.method != "full" and job.parallelism.zero_stage == 3:
        plain = plain.replace(  # as in TRL's trainers (trl 1.16.0), always
            finetuning=replace(job.finetuning, adapter_dtype=job.precision.parameters),
            activation_checkpointing=replace(job.activation_checkpointing, use_reentrant=True),
        )
    config = configuration(job)
    as_made = job.parallelism.zero_stage == 3 and bool(conventions(job)["partitions_as_made"])
    splits = as_made and not job.finetuning.quantization
    # torch remembers functions as they are now, not what zero.Init puts in their places meanwhile
    torch.utils._device._device_constructors()
    importlib.import_module("torch._dynamo")  # which transformers loads with a network, and which refuses the others
    making = deepspeed.zero.Init(config_dict_or_path=config) if splits else None
    inner = huggingface.build(plain, device, making)
    if job.loss.kind != "cross_entropy":
        inner.use_deepspeed(config)
    return DeepSpeedTraining(job, inner, config)


def _start_group() -> None:
    """Start a process group, which DeepSpeed needs even for one rank, and set the variable of its launcher."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())


def check(job: TrainingJob) -> None:
    """Refuse settings that DeepSpeed would not run as the job says. Raises: CollectorError naming the parameter."""
    layout, precision = job.parallelism, job.precision
    half, loop = precision.parameters != "float32", conventions(job).get("loop", "calls")
    done: tuple[tuple[str, object, bool, str], ...] = (
        ("parallelism.zero_stage", layout.zero_stage, layout.zero_stage > 0, "1, 2 or 3 (stage 0 is DDP: huggingface)"),
        ("parallelism.sharding", layout.sharding, layout.sharding == "none", "none: the stage shards"),
        ("parallelism", layout.world_size, layout.world_size == layout.data_parallel_size, "data parallelism alone"),
        ("precision.compute", precision.compute, precision.compute == precision.parameters, "that of parameters"),
        ("precision.gradients", precision.gradients, precision.gradients == precision.parameters, "that of parameters"),
        ("precision.optimizer_states", precision.optimizer_states, precision.optimizer_states == "float32", "float32"),
        (
            "precision.main_parameters",
            precision.main_parameters,
            precision.main_parameters == "float32" or not half,
            "float32, which DeepSpeed always keeps",
        ),
        ("compile", True, not job.compile, "without it"),
        ("framework_options.loop", loop, loop == "calls", "calls: the engine is given the Trainer's calls, not its loop"),
        (
            "optimizer.name",
            job.optimizer.name,
            job.optimizer.name in ("adamw", "adam") or not job.offload.optimizer,
            "adamw or adam, or leave its states on the GPU",
        ),
        ("offload.parameters", True, not job.offload.parameters or layout.zero_stage == 3, "stage 3, or leave them there"),
    )
    for parameter, value, holds, what in done:
        if not holds:
            raise CollectorError(
                f"{parameter}={value!r} is not what DeepSpeed runs; measure {what}.", parameter=parameter, value=value
            )
