"""The ledger of one training step of a Hugging Face (or plain PyTorch) job on one rank: blocks placed on the step's
instants.

Modules that only some jobs need (inference, encoder-decoders, DeepSpeed's ZeRO) are imported inside functions: a prediction
on the command line takes half a second, and most of that is imports.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache, partial
from typing import NamedTuple

from peakcast.catalog import Device
from peakcast.core.units import FP32
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.conventions import sums_in_float32
from peakcast.jobs.spec import Optimizer, TrainingJob
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.head import logits_bytes_kept_by_outputs
from peakcast.models.ledger.huggingface.contexts import block_context, first_context, target_context
from peakcast.models.ledger.huggingface.inputs import hold_inputs, hold_parts_of_inputs
from peakcast.models.ledger.huggingface.micro_batch import run_micro_batch
from peakcast.models.ledger.huggingface.model import hold_buffers, hold_tied_gradient
from peakcast.models.ledger.huggingface.outputs import hold_outputs_of_before
from peakcast.models.ledger.huggingface.preference import as_trained, hold_reference
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters, weights_job
from peakcast.models.ledger.layouts import layout_of
from peakcast.models.ledger.layouts.base import Layout
from peakcast.models.ledger.layouts.optimizer_step import hand_updates, place_optimizer_step
from peakcast.models.ledger.optimizers.choice import optimizer_rule
from peakcast.models.ledger.tape.columns import RecordedColumns
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.models.ledger.tape.workspaces import multiprocessors_of, training_workspaces
from peakcast.timelines.timeline import Category, Phase, Timeline


def huggingface_ledger(
    job: TrainingJob, *, device: Device | None = None, rank: int | None = None, step: str = "steady"
) -> Timeline:
    """The timeline of one step of `job` on `rank` (None: the first rank). `step`: "first" (optimizer states do not exist
    before the optimizer step) or "steady" (any later step). With a `device`, it includes what kernels and libraries
    allocate for themselves on that GPU type; without one, it has what a trace sees."""
    job = as_trained(job)
    alone = job.parallelism.world_size == 1 and not job.parallelism.zero_stage
    one = job.gradient_accumulation_steps == 1 and not sums_in_float32(job)
    if alone and one and job.task != "inference":
        return _on_one_gpu(job, device, step).timeline()
    if job.task == "inference":
        from peakcast.models.ledger.huggingface.inference import inference_ledger

        context, layout = _laid_out(job, device, rank)
        weights = tuple((t.name, t.module, t.numel * t.element_bytes) for t in layout.tensors)
        return inference_ledger(job, context, weights, device)
    if _first_step_differs(job):
        timeline, layout = _before_update(job, device, rank, step)
    else:
        before, layout = _before_any_update(job, device, rank)
        timeline, layout = before.fork(first_step=step == "first"), copy(layout)
        layout.first_step = step == "first"
    if alone:
        _optimizer_on_one_gpu(timeline, job, step)
    else:
        place_optimizer_step(timeline, job, layout, step)
    return timeline.timeline()


def _laid_out(job: TrainingJob, device: Device | None, rank: int | None) -> tuple[HFContext, Layout]:
    """The context of the network's blocks, and the layout of its tensors."""
    context = block_context(job, multiprocessors_of(device), rank or 0)
    returned = [logits_bytes_kept_by_outputs(target_context(context, job), widened=False)]
    if job.architecture.kind == "encoder_decoder":
        returned.append(context.input_bytes)  # the encoder's states
    return context, layout_of(job, stored_parameters(job), returned, rank)


def _first_step_differs(job: TrainingJob) -> bool:
    """Whether a first step runs other operations than later ones before the optimizer's part: FSDP1 makes its buffers then;
    updates in backward; compiled graphs."""
    return job.parallelism.sharding == "fsdp1" or job.compile or bool(optimizer_rule(job).updates_in_backward)


@lru_cache(maxsize=4)
def _before_any_update(job: TrainingJob, device: Device | None, rank: int | None) -> tuple[Step, Layout]:
    """`_before_update`, shared by the first step and later ones."""
    return _before_update(job, device, rank, None)


def _before_update(job: TrainingJob, device: Device | None, rank: int | None, step: str | None) -> tuple[Step, Layout]:
    """A step up to the optimizer's part of it, and the layout then. `step`: None if the first and later ones share it; what
    only later ones have is then marked as such."""
    context, layout = _laid_out(job, device, rank)
    layout.first_step = None if step is None else step == "first"
    if step is not None:
        hand_updates(job, layout, step)
    timeline = Step(hooks=layout)
    layout.hold_resident(timeline)
    if sums_in_float32(job):
        size = sum(t.numel for t in layout.tensors if t.trains) * FP32
        timeline.hold("gradients.float32", Category.GRADIENTS, size, 0)
    hold_reference(timeline, job)
    timeline.run_again(_workspaces(training_workspaces(device, job)))
    hold_inputs(timeline, job)
    hold_buffers(timeline, job)
    _micro_batches(timeline, job, context, layout, step)
    return timeline, layout


def _on_one_gpu(job: TrainingJob, device: Device | None, step: str) -> Step:
    """A step of one micro-batch on one GPU, assembled from recorded parts that similar jobs share."""
    made = _one_micro_batch(_graph_job(job), multiprocessors_of(device))
    timeline = made.step.fork(_resident(weights_job(job)), _workspaces(training_workspaces(device, job)))
    first, context = step == "first", made.context
    hold_outputs_of_before(timeline, first, job=job, context=context, start=made.start, loss=made.loss)
    _optimizer_on_one_gpu(timeline, job, step)
    return timeline


def _optimizer_on_one_gpu(timeline: Step, job: TrainingJob, step: str) -> None:
    """Add the optimizer step of a job on one GPU, and the instant at which `.grad`s are freed."""
    if optimizer_rule(job).updates_in_backward:
        place_optimizer_step(timeline, job, layout_of(job, stored_parameters(job)), step)
    else:
        timeline.run_again(_optimizer_stepped(_updated_job(job), step))
        timeline.gradients_die = timeline.now - 1  # `zero_grad` comes last


def _micro_batches(timeline: Step, job: TrainingJob, context: HFContext, layout: Layout, step: str | None) -> None:
    """Add the micro-batches that differ (`Layout.different_micro_batches`). `step`: as in `_before_update`."""
    micro_batches = min(job.gradient_accumulation_steps, layout.different_micro_batches)
    sums = sums_in_float32(job)
    shared = job.architecture.tie_word_embeddings and job.finetuning.method == "full"  # a copy of either end is its own
    adds_tied = shared and not optimizer_rule(job).updates_in_backward
    for micro_batch in range(micro_batches):
        start = timeline.now
        last = micro_batch == micro_batches - 1
        first = step == "first" and micro_batch == 0
        layout.begin_micro_batch(timeline, first=micro_batch == 0, last=last)
        found = first_context(job, context) if first else context
        loss = run_micro_batch(timeline, job, found, keeps_gradients=micro_batch == 0 or sums, last=last)
        if step is None and micro_batch == 0:
            timeline.differs(partial(hold_outputs_of_before, job=job, context=context, start=start, loss=loss))
        else:
            hold_outputs_of_before(timeline, first, job=job, context=context, start=start, loss=loss)
        ended = timeline.now
        layout.end_backward(timeline)
        if sums:
            timeline.free_gradients()
        hold_parts_of_inputs(timeline, job, start)
        if micro_batch > 0 and adds_tied and loss.gradients_die is None:
            hold_tied_gradient(timeline, loss, ended)


class _OneMicroBatch(NamedTuple):
    """A step on one GPU with one micro-batch, up to the optimizer step: the part that the first and later steps share,
    without what exists before the step."""

    step: Step
    context: HFContext
    start: int
    """The instant at which the micro-batch begins."""
    loss: BlockRun
    """The run of its head."""


@lru_cache(maxsize=8)
def _one_micro_batch(job: TrainingJob, gpu: tuple[int, int] | None) -> _OneMicroBatch:
    """The step of one micro-batch of `job`, shared by jobs whose forward and backward are the same."""
    context, timeline = block_context(job, gpu), Step()
    hold_inputs(timeline, job)
    hold_buffers(timeline, job)
    start = timeline.now
    loss = run_micro_batch(timeline, job, context, keeps_gradients=True, last=True)
    return _OneMicroBatch(timeline, context, start, loss)


@lru_cache(maxsize=1024)
def _graph_job(job: TrainingJob) -> TrainingJob:
    """The job with the settings that do not affect forward and backward replaced by defaults, so that jobs alike in all
    else share one cached result."""
    return job.replace(optimizer=Optimizer(), allocator=Allocator())


@lru_cache(maxsize=1024)
def _updated_job(job: TrainingJob) -> TrainingJob:
    """The job with the settings that affect neither its weights nor their update replaced by defaults."""
    return weights_job(job).replace(optimizer=job.optimizer)


@lru_cache(maxsize=256)
def _resident(job: TrainingJob) -> RecordedColumns:
    """The tensors that exist before the step on one GPU that holds the whole network, as a recording."""
    step = Step()
    layout_of(job, stored_parameters(job)).hold_resident(step)
    hold_reference(step, job)
    return step.record()


@lru_cache(maxsize=64)
def _workspaces(workspaces: tuple[tuple[str, str, int], ...]) -> RecordedColumns:
    """The library workspaces that exist from the step's beginning on, (name, thread, bytes) each, as a recording."""
    step = Step()
    step.hold_all(workspaces, Category.WORKSPACES)
    return step.record()


@lru_cache(maxsize=256)
def _optimizer_stepped(job: TrainingJob, step: str) -> RecordedColumns:
    """The optimizer step on one GPU that holds the whole network, as a recording."""
    recorded = Step()
    recorded.moment("before", Phase.BACKWARD)
    place_optimizer_step(recorded, job, layout_of(job, stored_parameters(job)), step)
    return recorded.record()
