"""Forward, loss and backward of one micro-batch: its blocks placed on the step, and what else holds tensors meanwhile.

Python variables, autocast's cache and checkpoints keep tensors alive beyond the block that made them. Some of these tensors
live until a moment that no block marks. Their order matters: they are held when the step has reached that moment, with
`timeline.now` as their end. The lives of all others follow from instants of blocks, so they can be held at any later time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from peakcast.jobs.conventions import conventions, scores_tokens
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.attention_kernels import attention_kernel
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.head import head
from peakcast.models.ledger.huggingface.blocks.kv_cache import returned_cache_bytes, widened_cache_bytes
from peakcast.models.ledger.huggingface.blocks.token_table import tied_in_graph
from peakcast.models.ledger.huggingface.layers import Blocks
from peakcast.models.ledger.huggingface.model import (
    attends_without_graph,
    hold_attention_weights,
    hold_cast_weights,
    hold_embeddings,
    hold_for_tied_product,
    hold_leaf,
    hold_masks,
    hold_masks_from_host,
    hold_rotary_tables,
    last_readers,
    last_rotations,
    model_ends,
)
from peakcast.models.ledger.huggingface.outputs import hold_cache_until_loss, hold_outputs
from peakcast.models.ledger.huggingface.preference import forward_beforehand, hold_whole_head, reference_forward
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.models.ledger.tape.template import Template
from peakcast.networks.families import family_of
from peakcast.timelines.timeline import Category


def run_micro_batch(timeline: Step, job: TrainingJob, context: HFContext, *, keeps_gradients: bool, last: bool) -> BlockRun:
    """Add one micro-batch and return the run of its head. `keeps_gradients`: its gradients are the first, to which those of
    later micro-batches are added; `last`: no other follows in this step."""
    layers: Mapping[int, BlockRun] = {}
    if job.architecture.kind == "encoder_decoder":
        from peakcast.models.ledger.huggingface.encoder_decoder import encoder_decoder_micro_batch

        loss = encoder_decoder_micro_batch(timeline, job, context, keeps_gradients=keeps_gradients, last=last)
    else:
        if job.loss.kind == "kto":
            forward_beforehand(timeline, job)
        blocks = Blocks(job, context)
        network = blocks.network()
        if network is None:
            parts = _BlockByBlock(timeline, job, context, blocks, keeps_gradients)
            loss, layers = parts.run(), parts.runs
        else:
            loss = _compiled_whole(timeline, network, keeps_gradients)
    hold_outputs(timeline, job, context, loss, last, layers)
    return loss


def _compiled_whole(timeline: Step, network: Template, keeps_gradients: bool) -> BlockRun:
    """Add a network that is compiled as one block; returns its run."""
    run = timeline.run_forward(network, "network", keeps_gradients=keeps_gradients)
    timeline.run_backward(run)
    _add_gradients_at_end(timeline, [] if keeps_gradients else [run])
    timeline.end_backward()
    return run


def _add_gradients_at_end(timeline: Step, runs: Iterable[BlockRun]) -> None:
    """The gradients of `runs` are outputs of one compiled graph, which are added to existing ones after it has ended."""
    for run in runs:
        run.gradients_die = timeline.now


@dataclass(slots=True)
class _BlockByBlock:
    """A micro-batch of a decoder or encoder: embedding, layers, and the head with the loss."""

    timeline: Step
    job: TrainingJob
    context: HFContext
    blocks: Blocks
    keeps_gradients: bool
    start: int = 0
    """The instant at which the micro-batch begins."""
    embedded: BlockRun = field(init=False)
    runs: dict[int, BlockRun] = field(init=False)
    """The forward of each layer."""
    loss: BlockRun = field(init=False)
    """The run of the head."""
    checkpointed: dict[int, BlockRun] = field(init=False)
    """The layers in `runs` that are recomputed before their backward."""

    def run(self) -> BlockRun:
        """Add everything, in the order in which the framework runs it; returns the run of the head."""
        self._forward()
        self._hold_while_forward_runs()
        self._hold_variables_of_model()
        if self.job.loss.kind != "cross_entropy" or scores_tokens(self.job):
            reference_forward(self.timeline, self.job, self.context, self.start)
        self._backward()
        self._hold_arguments_of_layers()
        return self.loss

    def _forward(self) -> None:
        timeline, blocks, keeps = self.timeline, self.blocks, self.keeps_gradients
        self.start = timeline.now
        self.embedded = timeline.run_forward(blocks.embedding(), "embedding", keeps_gradients=keeps)
        self.runs = blocks.forward(timeline, range(self.job.architecture.num_hidden_layers), keeps_gradients=keeps)
        self.loss = timeline.run_forward(head(self.context), "head", keeps_gradients=keeps)
        self.checkpointed = {index: run for index, run in self.runs.items() if blocks.checkpointed[index]}

    def _hold_while_forward_runs(self) -> None:
        """Hold what is freed when the model's call returns: the weights that autocast has cast and cached, and the cache of
        keys and values that older releases fill even in training, to which the model's outputs refer."""
        timeline, context, checkpointed = self.timeline, self.context, self.checkpointed
        if context.precision.autocast:
            hold_cast_weights(timeline, checkpointed.values(), self.loss, owned=False)
            others = [run for index, run in self.runs.items() if index not in checkpointed]
            hold_cast_weights(timeline, [*others, self.loss], self.loss, owned=not context.backward.saves_on_cpu)
        hold_cache_until_loss(timeline, self.job, context, self.loss, self.runs)
        if conventions(self.job).get("caches_while_checkpointing"):
            returned = returned_cache_bytes(context)
            for run in checkpointed.values():
                born = run.forward_start + run.template.num_forward
                timeline.hold("past_key_values", Category.ACTIVATIONS, returned, born, timeline.now, run.module)
            widened = widened_cache_bytes(context)
            for run in checkpointed.values():  # made with the logits' copy, when the model has returned
                held = timeline.now - 1, timeline.now
                timeline.hold("past_key_values.to_float32", Category.ACTIVATIONS, widened, *held, run.module)

    def _hold_variables_of_model(self) -> None:
        """Hold what variables of the model's own forward refer to: the attention weights that a layer returned, until the
        next layer has run, and the embeddings, until the last norm is done."""
        contexts, runs, checkpointed = self.blocks.contexts, self.runs, self.checkpointed
        offloads = self.job.offload.activations
        bare = {0: runs[0]} if 0 not in checkpointed and attends_without_graph(runs[0]) else {}
        ungraphed = runs if offloads else bare | checkpointed  # their graphs save nothing on the GPU
        hold_attention_weights(self.timeline, contexts[0], ungraphed, runs)
        first_checkpointed = self.blocks.checkpointed[0]
        hold_embeddings(self.timeline, contexts, self.embedded, first_checkpointed, offloads, model_ends(self.loss))

    def _backward(self) -> None:
        timeline, context = self.timeline, self.context
        timeline.run_backward(self.loss)
        hold_whole_head(timeline, self.job, self.loss)  # until the head's backward has ended
        self.blocks.backward(timeline, self.runs, keeps_gradients=self.keeps_gradients)
        timeline.run_backward(self.embedded)
        # until the embedding's backward, the last of the graph's nodes, has ended
        if self.checkpointed and self.job.offload.activations:
            hold_leaf(timeline, self.blocks.contexts[0], self.embedded)
        if tied_in_graph(context):
            hold_for_tied_product(timeline, self.loss, context)
        if context.compiled.issuperset(("layers", "embedding", "loss")) and not self.keeps_gradients:
            _add_gradients_at_end(timeline, [self.loss, *self.runs.values(), self.embedded])
        timeline.end_backward()
        self._hold_attributes_of_graph()

    def _hold_attributes_of_graph(self) -> None:
        """Hold what nodes of the graph have as attributes from the end of their block's backward to that of the last."""
        for run in (*(run for index, run in self.runs.items() if index not in self.checkpointed), self.loss):
            ended = (run.backward_start or 0) + run.template.num_backward
            for size in run.template.graph_bytes:
                self.timeline.hold("attribute of graph", Category.ACTIVATIONS, size, ended, self.timeline.now, run.module)

    def _hold_arguments_of_layers(self) -> None:
        """Hold the masks and the rotary tables, which the model makes once and passes to every layer. Variables of its
        forward refer to them until it returns, layers' graphs and checkpoints until their backward."""
        timeline, job, contexts = self.timeline, self.job, self.blocks.contexts
        reentrant, offloads = job.activation_checkpointing.use_reentrant, job.offload.activations
        masks = self._last_readers_of_masks()
        tables = last_rotations(contexts, self.runs, None if self.checkpointed else model_ends(self.loss))
        by_position = family_of(job.architecture).masks.by_position
        if by_position and offloads:  # the checkpoint saves the mask as a tensor, so it goes to the host
            masks = []
            hold_masks_from_host(timeline, contexts, self.checkpointed.values(), reentrant)
        elif not by_position and reentrant:  # the checkpoint's node keeps its arguments by keyword with the graph
            masks, tables = [timeline.now] * len(masks), [timeline.now] * len(tables)
        hold_rotary_tables(timeline, job, self.context, self.start, tables)
        hold_masks(timeline, contexts, self.start, model_ends(self.loss), masks)

    def _last_readers_of_masks(self) -> list[int]:
        """For each kind of layer, the instant from which no layer refers to its mask; empty if only the model's forward
        does. No graph saves a mask that is added to scores, but a checkpoint keeps it as an argument."""
        job, checkpointed, runs = self.job, self.checkpointed, self.runs
        biased = attention_kernel(self.blocks.contexts[0]) == "efficient" and self.context.saves_mask_of_heads
        in_graph = (family_of(job.architecture).eager_attention.adds_and_fills or biased) and not job.offload.activations
        if not (checkpointed or "network" in self.context.compiled or in_graph):
            return []
        some = checkpointed and (job.attention == "eager" or len(checkpointed) < len(runs))
        return last_readers(self.blocks.contexts, checkpointed if some else runs, model_ends(self.loss))
