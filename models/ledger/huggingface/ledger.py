"""The ledger of one training step of a Hugging Face (or plain PyTorch) job on one rank: blocks placed on the step's
instants.

Modules that only some jobs need (inference, encoder-decoders, DeepSpeed's ZeRO) are imported inside functions: a prediction
on the command line takes half a second, and most of that is imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from peakcast.catalog import Device
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import Optimizer, TrainingJob
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.ends import head, logits_bytes_kept_by_outputs, tied_in_graph
from peakcast.models.ledger.huggingface.blocks.hybrid import layer_template
from peakcast.models.ledger.huggingface.blocks.kv_cache import returned_cache_bytes
from peakcast.models.ledger.huggingface.layers import Blocks, block_context, first_context, target_context
from peakcast.models.ledger.huggingface.model import (
    arguments_of_layers,
    attends_without_graph,
    hold_attention_weights,
    hold_buffers,
    hold_cast_weights,
    hold_embeddings,
    hold_for_tied_product,
    hold_leaf,
    hold_logits_of_compiling,
    hold_masks,
    hold_masks_from_host,
    hold_parts_of_inputs,
    hold_rotary_tables,
    hold_shared_inputs,
    hold_tied_gradient,
    last_readers,
    last_rotations,
    model_ends,
)
from peakcast.models.ledger.huggingface.preference import (
    as_trained,
    forward_beforehand,
    hold_reference,
    hold_whole_head,
    reference_forward,
)
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters, weights_job
from peakcast.models.ledger.layouts import layout_of
from peakcast.models.ledger.layouts.base import Layout
from peakcast.models.ledger.layouts.optimizer_step import hand_updates, place_optimizer_step
from peakcast.models.ledger.optimizers.choice import optimizer_options, optimizer_rule
from peakcast.models.ledger.tape.columns import Recording
from peakcast.models.ledger.tape.step import FOREVER, Run, Step
from peakcast.models.ledger.tape.workspaces import kernels_of, training_workspaces
from peakcast.networks.families import family_of
from peakcast.timelines.timeline import Category, Phase, Timeline

if TYPE_CHECKING:
    from peakcast.models.ledger.layouts.zero_host import HostMemory

FP32 = 4
INT64 = 8


def huggingface_ledger(
    job: TrainingJob, *, device: Device | None = None, rank: int | None = None, step: str = "steady"
) -> Timeline:
    """The timeline of one step of `job` on `rank` (None: the first rank). `step`: "first" (optimizer states do not exist
    before the optimizer step) or "steady" (any later step). With a `device`, it includes what kernels and libraries
    allocate for themselves on that GPU type; without one, it has what a trace sees."""
    job = as_trained(job)
    alone = job.parallelism.world_size == 1 and not job.parallelism.zero_stage
    if alone and job.gradient_accumulation_steps == 1 and job.task != "inference":
        return _on_one_gpu(job, device, step).timeline()
    context = block_context(job, kernels_of(device), rank or 0)
    returned = [logits_bytes_kept_by_outputs(target_context(context, job), widened=False)]
    if job.architecture.kind == "encoder_decoder":
        returned.append(context.input_bytes)  # the encoder's states
    layout = layout_of(job, stored_parameters(job), returned, rank)
    if job.task == "inference":
        from peakcast.models.ledger.huggingface.inference import inference_ledger

        weights = tuple((t.name, t.module, t.numel * t.element_bytes) for t in layout.tensors)
        return inference_ledger(job, context, weights, device)
    layout.first_step = step == "first"
    hand_updates(job, layout, step)
    timeline = Step(hooks=layout)
    layout.hold_resident(timeline)
    hold_reference(timeline, job)
    timeline.run_again(_workspaces(training_workspaces(device, job)))
    _hold_before_forward(timeline, job)
    _micro_batches(timeline, job, context, layout, step)
    if alone:
        _optimizer_on_one_gpu(timeline, job, step)
    else:
        place_optimizer_step(timeline, job, layout, step)
    return timeline.timeline()


def _on_one_gpu(job: TrainingJob, device: Device | None, step: str) -> Step:
    """A step of one micro-batch on one GPU, assembled from recorded parts that similar jobs share."""
    before, context, start, ended = _one_micro_batch(_graph_job(job), kernels_of(device))
    timeline = before.fork(_resident(weights_job(job)), _workspaces(training_workspaces(device, job)))
    if step == "steady":
        _hold_previous_outputs(timeline, job, context, start, ended)
    else:
        logits = logits_bytes_kept_by_outputs(target_context(context, job), widened=False)
        hold_logits_of_compiling(timeline, context, logits, ended)
    _optimizer_on_one_gpu(timeline, job, step)
    return timeline


def _optimizer_on_one_gpu(timeline: Step, job: TrainingJob, step: str) -> None:
    """Add the optimizer step of a job on one GPU, and the instant at which `.grad`s are freed."""
    if optimizer_rule(job).updates_in_backward:
        place_optimizer_step(timeline, job, layout_of(job, stored_parameters(job)), step)
    else:
        timeline.run_again(_optimizer_stepped(_updated_job(job), step))
        timeline.gradients_die = timeline.now - 1  # `zero_grad` comes last


def _micro_batches(timeline: Step, job: TrainingJob, context: HFContext, layout: Layout, step: str) -> None:
    """Add the micro-batches that differ: the first, which makes the gradients, and the last, which may reduce them."""
    micro_batches = min(job.gradient_accumulation_steps, 2)
    adds_tied = job.architecture.tie_word_embeddings and not optimizer_rule(job).updates_in_backward
    for micro_batch in range(micro_batches):
        start = timeline.now
        last = micro_batch == micro_batches - 1
        layout.begin_micro_batch(timeline, first=micro_batch == 0, last=last)
        found = first_context(job, context) if step == "first" and micro_batch == 0 else context
        loss = _micro_batch(timeline, job, found, keeps_gradients=micro_batch == 0, last=last)
        loss_made = loss.forward_start + loss.template.num_forward
        if step == "steady" or micro_batch > 0:
            _hold_previous_outputs(timeline, job, context, start, loss_made)
        else:
            logits = logits_bytes_kept_by_outputs(target_context(context, job), widened=False)
            hold_logits_of_compiling(timeline, context, logits, loss_made)
        ended = timeline.now
        layout.end_backward(timeline)
        hold_parts_of_inputs(timeline, job, start)
        if micro_batch > 0 and adds_tied and loss.gradients_die is None:
            hold_tied_gradient(timeline, loss, ended)


@lru_cache(maxsize=8)
def _one_micro_batch(job: TrainingJob, gpu: tuple[int, int] | None) -> tuple[Step, HFContext, int, int]:
    """A step on one GPU with one micro-batch, up to the optimizer step: the part that the first and later steps share,
    without what exists before the step. Returns the step, its context, the instant at which the micro-batch starts, and the
    instant at which its loss exists."""
    context, timeline = block_context(job, gpu), Step()
    _hold_before_forward(timeline, job)
    start = timeline.now
    loss = _micro_batch(timeline, job, context, keeps_gradients=True, last=True)
    return timeline, context, start, loss.forward_start + loss.template.num_forward


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
def _resident(job: TrainingJob) -> Recording:
    """What exists on one GPU that holds the whole network before the step, as a recording."""
    step = Step()
    layout_of(job, stored_parameters(job)).hold_resident(step)
    hold_reference(step, job)
    return step.record()


@lru_cache(maxsize=64)
def _workspaces(workspaces: tuple[tuple[str, str, int], ...]) -> Recording:
    """The library workspaces that exist from the step's beginning on, (name, thread, bytes) each, as a recording."""
    step = Step()
    step.hold_all(workspaces, Category.WORKSPACES)
    return step.record()


@lru_cache(maxsize=256)
def _optimizer_stepped(job: TrainingJob, step: str) -> Recording:
    """The optimizer step on one GPU that holds the whole network, as a recording."""
    recorded = Step()
    recorded.moment("before", Phase.BACKWARD)
    place_optimizer_step(recorded, job, layout_of(job, stored_parameters(job)), step)
    return recorded.record()


def paged_state_bytes(job: TrainingJob) -> int:
    """Bytes of the optimizer states that this rank keeps in managed memory, outside PyTorch's allocator (bitsandbytes)."""
    rule, options, layout = optimizer_rule(job), optimizer_options(job, "steady"), layout_of(job, stored_parameters(job))
    return sum(rule.paged(tensor, options) for tensor in layout.optimized())


def zero_host_memory(job: TrainingJob) -> HostMemory:
    """What a ZeRO job keeps on the host, for the rank that keeps most."""
    from peakcast.models.ledger.layouts.zero3 import Zero3
    from peakcast.models.ledger.layouts.zero12 import Zero12
    from peakcast.models.ledger.layouts.zero_host import host_memory

    layout = layout_of(job, stored_parameters(job))
    assert isinstance(layout, Zero12 | Zero3)
    return host_memory(layout, accumulates=job.gradient_accumulation_steps > 1)


# -- one micro-batch ----------------------------------------------------------------------------------------------------


def _hold_before_forward(timeline: Step, job: TrainingJob) -> None:
    """Hold the inputs and buffers that exist when the step begins."""
    joined = job.batch.form == "padding_free"
    tokens = job.num_tokens if joined else job.micro_batch_size * job.sequence_length
    hold_shared_inputs(timeline, job)
    targets = job.micro_batch_size * (job.decoder_sequence_length or job.sequence_length)
    timeline.hold("input_ids", Category.INPUTS, tokens * INT64, 0)
    timeline.hold("labels", Category.INPUTS, (tokens if joined else targets) * INT64, 0)
    if joined:
        timeline.hold("position_ids", Category.INPUTS, tokens * INT64, 0)
    elif job.batch.form == "masked" or conventions(job).get("trainer"):  # data collators send a mask of ones along
        timeline.hold("attention_mask", Category.INPUTS, tokens * INT64, 0)
    hold_buffers(timeline, job)


def _micro_batch(timeline: Step, job: TrainingJob, context: HFContext, *, keeps_gradients: bool, last: bool) -> Run:
    """Add forward, loss and backward of one micro-batch; returns the run of its head."""
    if job.architecture.kind == "encoder_decoder":
        from peakcast.models.ledger.huggingface.encoder_decoder import encoder_decoder_micro_batch

        loss = encoder_decoder_micro_batch(timeline, job, context, keeps_gradients=keeps_gradients, last=last)
        _hold_logits(timeline, job, target_context(context, job), loss, last)
        return loss
    if job.loss.kind == "kto":
        forward_beforehand(timeline, job)
    start, blocks = timeline.now, Blocks(job, context)
    if (network := blocks.network()) is not None:
        loss = timeline.run_forward(network, "network", keeps_gradients=keeps_gradients)
        timeline.run_backward(loss)
        _end_with_graph(timeline, [] if keeps_gradients else [loss])
        timeline.end_backward()
        _hold_logits(timeline, job, context, loss, last)
        return loss
    layers = range(job.architecture.num_hidden_layers)
    embedded = timeline.run_forward(blocks.embedding(), "embedding", keeps_gradients=keeps_gradients)
    runs = blocks.forward(timeline, layers, keeps_gradients=keeps_gradients)
    loss = timeline.run_forward(head(context), "head", keeps_gradients=keeps_gradients)
    checkpointed = {index: run for index, run in runs.items() if blocks.checkpointed[index]}
    returned = returned_cache_bytes(context) if conventions(job).get("caches_while_checkpointing") else 0
    if context.autocast:
        hold_cast_weights(timeline, checkpointed.values(), owned=False)
        others = [run for index, run in runs.items() if index not in checkpointed]
        hold_cast_weights(timeline, [*others, loss], owned=not context.saves_on_cpu)
    for run in checkpointed.values() if returned else ():  # the model's outputs refer to the cache
        born = run.forward_start + run.template.num_forward
        timeline.hold("past_key_values", Category.ACTIVATIONS, returned, born, timeline.now, run.module)
    bare = {0: runs[0]} if 0 not in checkpointed and attends_without_graph(runs[0]) else {}
    ungraphed = runs if job.offload.activations else bare | checkpointed  # their graphs save nothing on the GPU
    hold_attention_weights(timeline, blocks.contexts[0], ungraphed, runs)
    hold_embeddings(timeline, blocks.contexts, embedded, blocks.checkpointed[0], job.offload.activations, model_ends(loss))
    if job.loss.kind != "cross_entropy":
        reference_forward(timeline, job, context, start)
    timeline.run_backward(loss)
    hold_whole_head(timeline, job, loss)
    blocks.backward(timeline, runs, keeps_gradients=keeps_gradients)
    in_graph = family_of(job.architecture).eager_attention.adds_and_fills and not job.offload.activations
    masks_kept = checkpointed or "mask" in context.compiled or in_graph
    # no graph saves the mask that is added to scores, but a checkpoint keeps it as an argument
    readers = checkpointed if checkpointed and (job.attention == "eager" or len(checkpointed) < len(runs)) else runs
    dies = last_readers(blocks.contexts, readers, model_ends(loss)) if masks_kept else []
    read = last_rotations(blocks.contexts, runs, None if checkpointed else model_ends(loss))
    timeline.run_backward(embedded)
    if checkpointed and job.offload.activations:
        hold_leaf(timeline, blocks.contexts[0], embedded)
    if tied_in_graph(context):
        hold_for_tied_product(timeline, loss, context)
    if context.compiled.issuperset(("layers", "ends", "loss")) and not keeps_gradients:
        _end_with_graph(timeline, [loss, *runs.values(), embedded])
    timeline.end_backward()
    named = not family_of(job.architecture).masks.by_position
    if not named and job.offload.activations:  # the checkpoint saves the mask as a tensor, so it goes to the host
        dies = []
        hold_masks_from_host(timeline, blocks.contexts, checkpointed.values(), job.activation_checkpointing.use_reentrant)
    if named and job.activation_checkpointing.use_reentrant:  # the checkpoint's node keeps its arguments with the graph
        dies, read = [timeline.now] * len(dies), [timeline.now] * len(read)
    hold_rotary_tables(timeline, job, context, start, read)
    hold_masks(timeline, blocks.contexts, start, model_ends(loss), dies)
    _hold_logits(timeline, job, context, loss, last)
    return loss


def _end_with_graph(timeline: Step, runs: Sequence[Run]) -> None:
    """The gradients of `runs` are outputs of one graph: they are added to existing ones only after that graph has ended."""
    for run in runs:
        run.gradients_die = timeline.now


def _kept_logits(job: TrainingJob, context: HFContext) -> int:
    """Bytes of `outputs.logits`. Under autocast, accelerate's `convert_outputs_to_fp32` widens them to fp32."""
    return logits_bytes_kept_by_outputs(context, widened=bool(conventions(job).get("trainer")))


def _hold_logits(timeline: Step, job: TrainingJob, context: HFContext, loss: Run, last: bool) -> None:
    """Hold `outputs.logits`: a plain loop refers to them until the next forward returns; the Trainer drops them before
    backward or at its end, depending on its release."""
    if not conventions(job).get("outputs_dropped"):
        size = _kept_logits(job, context)
        dies = timeline.now if conventions(job).get("trainer") or not last else FOREVER
        born = loss.forward_start + loss.template.num_forward
        if "loss" in context.compiled and loss.backward_start is not None:  # until then the compiled loss saves them
            born = loss.backward_start + 1 + loss.template.in_backward.get("d_logits", 0)
        timeline.hold("outputs.logits", Category.LOGITS, size, born, dies, "head")
        for name, num_bytes in _kept_by_graph_of_outputs(job, context):
            timeline.hold(name, Category.ACTIVATIONS, num_bytes, timeline.now, dies, "embedding")


def _hold_previous_outputs(timeline: Step, job: TrainingJob, context: HFContext, start: int, ended: int) -> None:
    """Hold the last step's outputs during forward. A plain loop assigns `outputs` again only when the next forward has
    returned, so two sets of logits exist at once."""
    if not conventions(job).get("outputs_dropped") and not conventions(job).get("trainer"):
        target = target_context(context, job)
        timeline.hold("outputs.logits", Category.LOGITS, _kept_logits(job, target), start, ended, "head")
        for name, num_bytes in _kept_by_graph_of_outputs(job, target):
            timeline.hold(name, Category.ACTIVATIONS, num_bytes, start, ended, "embedding")
        if job.architecture.kind == "encoder_decoder":
            from peakcast.models.ledger.huggingface.encoder_decoder import outputs_of

            timeline.hold_all(outputs_of(job, context), Category.ACTIVATIONS, start, ended)


def _kept_by_graph_of_outputs(job: TrainingJob, context: HFContext) -> list[tuple[str, int]]:
    """(name, bytes) of what the graph still keeps after backward, as long as `outputs` refers to it. peft's
    enable_input_require_grads makes the embedding's output a leaf, which keeps its gradient; and nodes of reentrant
    checkpoints keep their arguments."""
    checkpointing = job.activation_checkpointing
    kept: list[tuple[str, int]] = []
    if checkpointing.mode == "none" or conventions(job).get("trainer"):
        return kept
    if job.finetuning.method != "full":
        kept += [("embedding.output", context.input_bytes), ("embedding.output.grad", context.input_bytes)]
    if checkpointing.use_reentrant and job.architecture.kind == "decoder":
        kept += arguments_of_layers(job, Blocks(job, context).contexts)
    return kept


def pinned_activation_bytes(job: TrainingJob) -> list[int]:
    """Sizes of the host copies of offloaded activations at the end of forward: the inputs of checkpointed layers or,
    without checkpointing, every saved tensor (`save_on_cpu` copies a tensor once for each operation that saves it, and
    copies parameters as well)."""
    checkpointing, blocks = job.activation_checkpointing, Blocks(job, block_context(job, None))
    if checkpointing.mode != "none":
        return [one.input_bytes for one, held in zip(blocks.contexts, blocks.checkpointed, strict=True) if held]
    templates = [blocks.embedding(), *(layer_template(layer) for layer in blocks.contexts), head(blocks.context)]
    return [size for template in templates for size in template.saved_bytes]
