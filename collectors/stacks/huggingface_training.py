"""The training loop of a Hugging Face (or plain PyTorch) network, its phases as separate calls."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate.utils.operations import convert_to_fp32

from peakcast.collectors.stacks import layouts
from peakcast.collectors.stacks.batches import batch_of
from peakcast.collectors.stacks.optimizers import LEARNING_RATE, build_optimizer
from peakcast.collectors.stacks.parts.compiled import is_compiled_whole
from peakcast.core.versions import release
from peakcast.jobs.conventions import conventions
from peakcast.jobs.lengths import lengths_change, steps
from peakcast.jobs.spec import TrainingJob

MAX_GRAD_NORM = 1.0
NEFTUNE_NOISE_ALPHA = 5.0
LABEL_SMOOTHING = 0.1


class HuggingFaceTraining:
    """One training run of a causal language model."""

    def __init__(self, job: TrainingJob, model: Any, layout: layouts.WrappedModel, batch: dict[str, torch.Tensor]) -> None:
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
        """The scaler that accelerate makes for fp16=True: gradients are fp32, and the loss is scaled."""
        self._micro_batch = 0
        self._steps = steps(job, dist.get_rank() if dist.is_initialized() else 0)
        self._lengths: tuple[TrainingJob, ...] = ()
        """Jobs with the lengths of the current step's micro-batches, if lengths change."""
        self._around = contextlib.ExitStack()
        """Contexts that a micro-batch enters before its forward and leaves after its backward."""

    def forward(self, on_loss: Callable[[], None]) -> Any:
        """Call the model with labels, so that its forward includes the loss. Returns the loss."""
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
            outputs = self.model(**self.batch, **self._switches(), **self._positions())
        if conventions(self.job).get("trainer") and conventions(self.job).get("autocast"):
            outputs = convert_to_fp32(outputs)  # accelerate's prepare_model: convert_outputs_to_fp32
        if not conventions(self.job)["outputs_dropped"]:
            self._outputs = outputs  # a plain loop keeps them until it assigns them again
        return outputs.loss

    def _switches(self) -> dict[str, bool]:
        """The Trainer trains without a cache since transformers 5 (5.17 trainer.py: `config.use_cache = args.use_cache`);
        before, networks decide, and GPT-BigCode keeps one while it checkpoints."""
        switched_off = self.job.architecture.kind in ("decoder", "hybrid") and release(transformers.__version__) >= (5,)
        return {"use_cache": False} if switched_off else {}

    def _draw_lengths(self) -> None:
        """If lengths change from step to step: make a new batch for each micro-batch."""
        if not lengths_change(self.job):
            return
        if self._micro_batch == 1:
            self._lengths = next(self._steps)
        with self.batch["input_ids"].device:
            self.batch = {}
            self.batch = batch_of(self._lengths[self._micro_batch - 1])

    def _share_sequences(self) -> None:
        """Under context parallelism: make a new batch for each micro-batch and keep only this rank's part of it."""
        if self.job.parallelism.context_parallel_size == 1:
            return
        from peakcast.collectors.stacks.layouts import context_parallel

        self.batch = {}
        with torch.device("cuda"):
            self.batch = context_parallel.inputs(batch_of(self.job))
        self._around.enter_context(context_parallel.sharing(self.batch, self.job))

    def _positions(self) -> dict[str, Any]:
        """Positions to pass to the model. Under sequence parallelism the model sees only a part of the sequence, and would
        count that part's positions from 0."""
        if not self.job.parallelism.sequence_parallel or "position_ids" in self.batch:
            return {}
        return {"position_ids": torch.arange(self.job.sequence_length, device=self.batch["input_ids"].device)[None]}

    def _accumulation(self) -> contextlib.AbstractContextManager[Any]:
        """The layout's context around a micro-batch that is not the last of its step."""
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
        """A context that decides where autograd stores saved tensors."""
        if self.job.offload.activations and self.job.activation_checkpointing.mode == "none":
            context: contextlib.AbstractContextManager[Any] = torch.autograd.graph.save_on_cpu(pin_memory=True)
            return context
        return contextlib.nullcontext()

    def backward(self, loss: Any) -> None:
        """Backward of the loss; for LOMO its own, which updates parameters on the way (accelerate `lomo_backward`)."""
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
        """Clip gradients as the Trainer does by default."""
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
        """Settings that were really used."""
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


def causal_model(model: Any) -> Any:
    """The network inside peft's wrapper, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextlib.contextmanager
def announcing_loss(model: Any, job: TrainingJob, on_loss: Callable[[], None]) -> Iterator[None]:
    """A context in which the network's forward calls `on_loss()` when the loss begins. A network compiled as a whole
    cannot."""
    if is_compiled_whole(job):
        yield
        return
    inner = causal_model(model)
    loss_function = getattr(inner, "loss_function", None)

    def announced(*arguments: Any, **keywords: Any) -> Any:
        on_loss()
        assert loss_function is not None
        return loss_function(*arguments, **keywords)

    before = _module_before_loss(inner, job)
    announcement = before.register_forward_hook(lambda *_: on_loss()) if before is not None else None
    try:
        with _calling(inner, announced) if loss_function is not None else contextlib.nullcontext():
            yield
    finally:
        if announcement is not None:
            announcement.remove()


@contextlib.contextmanager
def _calling(inner: Any, loss_function: Callable[..., Any]) -> Iterator[None]:
    """A context in which the network calls this `loss_function`. It is the class's property, which cannot be set in older
    releases (transformers 4.48.1 modeling_utils.py, `PreTrainedModel.loss_function`)."""
    own, kind = inner.loss_function, type(inner)
    if getattr(getattr(kind, "loss_function", None), "fset", True) is not None:
        inner.loss_function = loss_function
        try:
            yield
        finally:
            inner.loss_function = own
    else:
        with mock.patch.object(kind, "loss_function", property(lambda _: loss_function)):
            yield


def _module_before_loss(inner: Any, job: TrainingJob) -> Any:
    """The module after which the loss begins, where the model does not call its `loss_function`."""
    if job.architecture.head != "language_model":
        return None if _calls_loss_function(inner) else getattr(inner, "classifier", getattr(inner, "score", None))
    if job.loss.fused_linear_cross_entropy:
        return inner.base_model
    own_loss = job.architecture.kind in ("encoder", "encoder_decoder", "undescribed", "multimodal")
    own_loss = own_loss or not _calls_loss_function(inner)
    return inner.get_output_embeddings() if own_loss else None


def _calls_loss_function(inner: Any) -> bool:
    """Whether the network's forward calls its `loss_function`: since transformers 4.46, GPT-BigCode's and others' later
    (4.48.1 modeling_gpt_bigcode.py, `GPTBigCodeForCausalLM.forward` makes a CrossEntropyLoss)."""
    forwards = [inspect.unwrap(vars(kind)["forward"]) for kind in type(inner).__mro__ if "forward" in vars(kind)]
    codes = [getattr(forward, "__code__", None) for forward in forwards]
    return any(code is not None and "loss_function" in code.co_names for code in codes)
