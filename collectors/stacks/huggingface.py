"""Hugging Face transformers (and peft) as a measurable stack: a real model with random weights, a real optimizer."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from typing import Any

import torch

from peakcast.collectors.machine.packages import imported
from peakcast.collectors.stacks import frozen, images, layouts, spreading, unsupported
from peakcast.collectors.stacks.batches import batch_of, random_tokens
from peakcast.collectors.stacks.checkpointing import checkpoint_arguments, every_n_layers
from peakcast.collectors.stacks.huggingface_model import in_float8, model_of, with_adapters
from peakcast.collectors.stacks.huggingface_training import NEFTUNE_NOISE_ALPHA, HuggingFaceTraining, causal_model
from peakcast.collectors.stacks.parts.compiled import compile_layers, is_compiled_whole
from peakcast.collectors.stacks.parts.skipped_layers import without_skipped
from peakcast.core.errors import CollectorError
from peakcast.jobs.conventions import conventions
from peakcast.jobs.images import reads_pixels
from peakcast.jobs.spec import TrainingJob

_BEFORE_LIGER: dict[str, dict[str, Any]] = {}
"""Module name -> the attributes of its modelling code before Liger replaced some of them."""


def build(job: TrainingJob, device: str, making: contextlib.AbstractContextManager[Any] | None = None) -> Any:
    """A run of `job`: model on `device` in `precision.parameters`, optimizer, and one batch of random tokens. `making`: a
    context in which the network, but not its adapters, is made."""
    unsupported.check(job)
    if (loop := conventions(job).get("loop", "calls")) != "calls" or job.loss.kind != "cross_entropy":
        images.refuse(job)
    if loop != "calls":
        return _with_trainer(job, device, str(loop))
    if job.parallelism.pipeline_parallel_size > 1:
        return _in_stages(job, device)
    _without_liger_kernels()
    spread = spreading.is_spread(job)
    first = "cpu" if job.finetuning.quantization else device
    with making or contextlib.nullcontext(), spreading.untouched() if spread else torch.device(first):
        model = without_skipped(model_of(job, padded=making is None))
    if spread:
        model.tie_weights()
        spreading.unmade(model, job)
    with torch.device(device):
        batch = batch_of(job)
    if job.images.per_sequence and not reads_pixels(job.architecture):
        batch = images.with_images(batch, job, model, device)
    if job.finetuning.quantization:
        from peakcast.collectors.stacks.quantized import quantize

        model = quantize(model, job, device)
    if job.precision.compute == "float8":
        model = in_float8(model, job)
    model = _prepared(model, job)
    layout = layouts.wrap(model, job)
    if spread:
        spreading.settle(layout.model, job, device)
    if job.loss.kind != "cross_entropy" or conventions(job)["loss_kernel"] == "tiles":
        from peakcast.collectors.stacks import preference

        return preference.training_of(job, model, layout, device, making)
    training = HuggingFaceTraining(job, model, layout, batch)
    if is_compiled_whole(job):
        training.model.compile()  # last, as accelerate's prepare_model does: what the layout has wrapped
    return training


def _prepared(model: Any, job: TrainingJob) -> Any:
    """The network before the layout wraps it: with tensor parallelism, kernels, checkpoints, adapters, noise and layers
    that are compiled by themselves."""
    _with_liger_kernels(model, job)
    model.train()
    layouts.split(model, job)  # first, as from_pretrained and torchtitan do: later hooks on the embedding see whole tensors
    if job.activation_checkpointing.mode != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_arguments(job), **every_n_layers(job))
    if job.finetuning.frozen and job.finetuning.method == "full":
        frozen.freeze(model, job)
    if job.finetuning.method != "full":
        model = with_adapters(model, job)
        layouts.split_adapted(model, job)
    if job.framework_options.get("neftune"):
        embeddings = causal_model(model).get_input_embeddings()  # as transformers' activate_neftune does
        embeddings.neftune_noise_alpha = NEFTUNE_NOISE_ALPHA
        module = "transformers.integrations.neftune"
        module = module if importlib.util.find_spec(module) else "transformers.trainer_utils"  # transformers 4
        neftune = importlib.import_module(module)
        embeddings.register_forward_hook(neftune.neftune_post_forward_hook)
    if job.compile and not is_compiled_whole(job):
        model = compile_layers(model, job)
    return model


def _with_trainer(job: TrainingJob, device: str, loop: str) -> Any:
    if loop != "trainer":
        raise CollectorError(
            f"framework_options.loop={loop!r} must be calls or trainer.", parameter="framework_options.loop", value=loop
        )
    from peakcast.collectors.stacks import huggingface_trainer

    return huggingface_trainer.build(job, device)


def _in_stages(job: TrainingJob, device: str) -> Any:
    from peakcast.collectors.stacks import pipeline

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


def _with_liger_kernels(model: Any, job: TrainingJob) -> None:
    """Install Liger's kernels if the job asks for them, as `TrainingArguments.use_liger_kernel` does."""
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
    others = inspect.signature(apply).parameters.keys() - {"model", "cross_entropy", "fused_linear_cross_entropy"}
    switches = {} if kernels else dict.fromkeys(others, False)  # its defaults: all kernels that the family has
    code = sys.modules[type(causal_model(model)).__module__]
    _BEFORE_LIGER.setdefault(code.__name__, dict(vars(code)))
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=loss, **switches)


def _without_liger_kernels() -> None:
    """Restore the library's own classes, so that a process that builds several networks builds each from unchanged code.
    Liger replaces classes, and a part that it would leave unchanged in a new process may otherwise stay replaced."""
    for name, before in _BEFORE_LIGER.items():
        vars(sys.modules[name]).update(before)
    _BEFORE_LIGER.clear()
