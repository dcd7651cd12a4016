"""Hugging Face transformers (and peft) as a measurable stack: a real model with random weights, a real optimizer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.integrations.neftune import neftune_post_forward_hook

from peakcast.collectors.frameworks import layouts, scope, spreading
from peakcast.collectors.frameworks.batches import batch_of, random_tokens
from peakcast.collectors.frameworks.checkpointing import checkpoint_arguments, every_n_layers
from peakcast.collectors.frameworks.compiled import compile_layers, is_compiled_whole
from peakcast.collectors.frameworks.huggingface_model import in_float8, model_of, with_adapters
from peakcast.collectors.frameworks.optimizers import LEARNING_RATE, build_optimizer
from peakcast.collectors.packages import imported
from peakcast.conventions import conventions
from peakcast.errors import CollectorError
from peakcast.lengths import lengths_change, steps
from peakcast.spec import TrainingJob

MAX_GRAD_NORM = 1.0
NEFTUNE_NOISE_ALPHA = 5.0


class HuggingFaceTraining:
    """One training run of a causal language model."""

    def __init__(self, job: TrainingJob, model: Any, layout: layouts.Layout, batch: dict[str, torch.Tensor]) -> None:
        self.job = job
        self.layout = layout
        self.model = layout.model
        self.optimizer = build_optimizer(job, self.model)
        self.batch = batch
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._unwrapped = model
        self._outputs: Any = None
        half = job.framework_options.get("autocast") and job.precision.compute == "float16"
        self.scaler = torch.amp.GradScaler("cuda") if half else None
        """As accelerate makes one for fp16=True: gradients are fp32, the loss is scaled."""
        self._micro_batch = 0
        self._steps = steps(job, dist.get_rank() if dist.is_initialized() else 0)
        self._lengths: tuple[TrainingJob, ...] = ()
        """Of the step at hand, where they change."""
        self._around = contextlib.ExitStack()
        """What a micro-batch enters before its forward and leaves after its backward."""

    def forward(self, on_loss: Callable[[], None]) -> Any:
        """The model with labels, as its users call it: the loss is part of its forward."""
        self._micro_batch = self._micro_batch % self.job.gradient_accumulation_steps + 1
        self._draw_lengths()
        self._share_sequences()
        with (
            announcing_loss(self._unwrapped, self.job, on_loss),
            self._accumulation(),
            self._autocast(),
            self._saves(),
            self.layout.computing_loss(),
        ):
            switches = {"use_cache": False} if self.job.architecture.kind in ("decoder", "hybrid") else {}
            outputs = self.model(**self.batch, **switches, **self._positions())
        if self.job.framework == "torch":
            self._outputs = outputs  # a plain loop keeps them until it assigns them again
        return outputs.loss

    def _draw_lengths(self) -> None:
        """Where lengths change from step to step: a batch of its own for each micro-batch."""
        if not lengths_change(self.job):
            return
        if self._micro_batch == 1:
            self._lengths = next(self._steps)
        with self.batch["input_ids"].device:
            self.batch = {}
            self.batch = batch_of(self._lengths[self._micro_batch - 1])

    def _share_sequences(self) -> None:
        """Under context parallelism: a batch of its own for each micro-batch, of which only this rank's part stays."""
        if self.job.parallelism.context_parallel_size == 1:
            return
        from peakcast.collectors.frameworks.layouts import context

        self.batch = {}
        with torch.device("cuda"):
            self.batch = context.inputs(batch_of(self.job))
        self._around.enter_context(context.sharing(self.batch, self.job))

    def _positions(self) -> dict[str, Any]:
        """Sequence parallelism hides the length of the sequence from the model, which would count a part's positions."""
        if not self.job.parallelism.sequence_parallel or "position_ids" in self.batch:
            return {}
        return {"position_ids": torch.arange(self.job.sequence_length, device=self.batch["input_ids"].device)[None]}

    def _accumulation(self) -> contextlib.AbstractContextManager[Any]:
        """What the layout does around a micro-batch that is not the last of its step."""
        last = self._micro_batch == self.job.gradient_accumulation_steps
        return contextlib.nullcontext() if last else self.layout.accumulating()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.job.framework_options.get("autocast"):
            context: contextlib.AbstractContextManager[Any] = torch.autocast(
                "cuda", dtype=getattr(torch, self.job.precision.compute)
            )
            return context
        return contextlib.nullcontext()

    def _saves(self) -> contextlib.AbstractContextManager[Any]:
        """Where what autograd keeps is held."""
        if self.job.offload.activations and self.job.activation_checkpointing.mode == "none":
            context: contextlib.AbstractContextManager[Any] = torch.autograd.graph.save_on_cpu(pin_memory=True)
            return context
        return contextlib.nullcontext()

    def backward(self, loss: Any) -> None:
        """Backward of the loss; LOMO's own, which updates on the way (accelerate `lomo_backward`)."""
        with self._accumulation(), self.layout.computing_loss():
            self._backward(loss)
        self._around.close()

    def _backward(self, loss: Any) -> None:
        if hasattr(self.optimizer, "fused_backward"):
            self.optimizer.fused_backward(loss, LEARNING_RATE)
        elif self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()

    def clip(self) -> None:
        """As the Trainer does by default."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.layout.clip(self.trained, MAX_GRAD_NORM)

    def step(self) -> None:
        """The optimizer's step."""
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not hasattr(self.optimizer, "fused_backward"):
            self.optimizer.step()

    def zero_grad(self) -> None:
        """Release the gradients (set_to_none is the default)."""
        self.optimizer.zero_grad()

    def facts(self) -> dict[str, Any]:
        """What was really chosen."""
        chosen = causal_model(self._unwrapped).config._attn_implementation
        options = self.optimizer.defaults
        return {
            "attention_implementation": chosen,
            "optimizer": type(self.optimizer).__name__,
            "optimizer_fused": options.get("fused"),
            "optimizer_foreach": options.get("foreach"),
            **({"compiled": "inductor"} if self.job.compile else {}),
            "transformers": transformers.__version__,
        }


def build(job: TrainingJob, device: str, making: contextlib.AbstractContextManager[Any] | None = None) -> Any:
    """A run of `job`: model on `device` in `precision.parameters`, optimizer, and one batch of random tokens. `making`:
    what is around the making of the network, adapters apart."""
    scope.check(job)
    if (loop := conventions(job).get("loop", "calls")) != "calls":
        return _with_trainer(job, device, str(loop))
    if job.parallelism.pipeline_parallel_size > 1:
        return _in_stages(job, device)
    spread = spreading.is_spread(job)
    first = "cpu" if job.finetuning.quantization else device
    with making or contextlib.nullcontext(), spreading.untouched() if spread else torch.device(first):
        model = model_of(job)
    if spread:
        model.tie_weights()
        spreading.unmade(model, job)
    with torch.device(device):
        batch = batch_of(job)
    if job.finetuning.quantization:
        from peakcast.collectors.frameworks.quantized import quantize

        model = quantize(model, job, device)
    if job.precision.compute == "float8":
        model = in_float8(model)
    _with_liger_kernels(model, job)
    model.train()
    if job.activation_checkpointing.mode != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_arguments(job), **every_n_layers(job))
    layouts.split(model, job)
    if job.finetuning.method != "full":
        model = with_adapters(model, job)
    if job.framework_options.get("neftune"):
        embeddings = causal_model(model).get_input_embeddings()  # as transformers' activate_neftune does
        embeddings.neftune_noise_alpha = NEFTUNE_NOISE_ALPHA
        embeddings.register_forward_hook(neftune_post_forward_hook)
    if job.compile and not is_compiled_whole(job):
        model = compile_layers(model, job)
    layout = layouts.wrap(model, job)
    if spread:
        spreading.settle(layout.model, job, device)
    if job.loss.kind != "cross_entropy":
        from peakcast.collectors.frameworks import preference

        return preference.training_of(job, model, layout, device, making)
    training = HuggingFaceTraining(job, model, layout, batch)
    if is_compiled_whole(job):
        training.model.compile()  # last, as accelerate's prepare_model does: what the layout has wrapped
    return training


def _with_trainer(job: TrainingJob, device: str, loop: str) -> Any:
    if loop != "trainer":
        raise CollectorError(
            f"framework_options.loop={loop!r} must be calls or trainer.", parameter="framework_options.loop", value=loop
        )
    from peakcast.collectors.frameworks import huggingface_trainer

    return huggingface_trainer.build(job, device)


def _in_stages(job: TrainingJob, device: str) -> Any:
    from peakcast.collectors.frameworks import pipeline

    spread = spreading.is_spread(job)

    def new_network() -> Any:
        with spreading.untouched() if spread else torch.device(device):
            network = model_of(job)
        if spread:
            spreading.unmade(network, job)
        network.train()
        if job.activation_checkpointing.mode != "none":
            kept = checkpoint_arguments(job)
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kept, **every_n_layers(job))
        return network

    sequences = job.micro_batch_size * job.gradient_accumulation_steps

    def draw() -> torch.Tensor:
        with torch.device(device):
            return random_tokens(job.replace(micro_batch_size=sequences), job.sequence_length)

    return pipeline.build(job, new_network, draw, (lambda stage: spreading.settle(stage, job, device)) if spread else None)


def causal_model(model: Any) -> Any:
    """The network itself, out of peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextlib.contextmanager
def announcing_loss(model: Any, job: TrainingJob, on_loss: Callable[[], None]) -> Iterator[None]:
    """Within it, the network's forward calls `on_loss()` when the loss begins; one compiled whole cannot."""
    if is_compiled_whole(job):
        yield
        return
    inner = causal_model(model)
    loss_function = inner.loss_function

    def announced(*arguments: Any, **keywords: Any) -> Any:
        on_loss()
        return loss_function(*arguments, **keywords)

    inner.loss_function = announced
    before = _module_before_loss(inner, job)
    announcement = before.register_forward_hook(lambda *_: on_loss()) if before is not None else None
    try:
        yield
    finally:
        inner.loss_function = loss_function
        if announcement is not None:
            announcement.remove()


def _module_before_loss(inner: Any, job: TrainingJob) -> Any:
    """The module after which the loss begins, where the model does not call its `loss_function`."""
    if job.loss.fused_linear_cross_entropy:
        return inner.base_model
    own_loss = ("encoder", "encoder_decoder", "undescribed")
    return inner.get_output_embeddings() if job.architecture.kind in own_loss else None


def _with_liger_kernels(model: Any, job: TrainingJob) -> None:
    """Liger's kernels where the job asks for them, patched in as `TrainingArguments.use_liger_kernel` does."""
    kernels, loss = bool(conventions(job).get("liger_kernels")), job.loss.fused_linear_cross_entropy
    if not (kernels or loss):
        return
    asks = "loss.fused_linear_cross_entropy" if loss else "framework_options.liger_kernels"
    patch = imported("liger_kernel.transformers.monkey_patch", "liger-kernel", parameter=asks, value=True)
    apply = patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(job.architecture.model_type)
    if apply is None:
        raise CollectorError(
            f"model_type={job.architecture.model_type!r} has no Liger kernels; leave them out.", parameter="model_type"
        )
    switches = {"rope": kernels, "rms_norm": kernels, "swiglu": kernels, "geglu": kernels, "layer_norm": kernels}
    known = inspect.signature(apply).parameters
    apply(
        model=model,
        cross_entropy=False,
        fused_linear_cross_entropy=loss,
        **{name: value for name, value in switches.items() if name in known},
    )
