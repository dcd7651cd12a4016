"""Tensors that a Hugging Face model's own forward holds outside its blocks: buffers, embeddings in local variables, masks,
rotary tables, and the lm_head's half of a tied table's gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from peakcast.core.units import DTYPE_BYTES, FP32
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions, mixes_precision
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.attention_kernels import flex_block_mask_bytes
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.embedding import embedding_variables, hands_on_itself
from peakcast.models.ledger.huggingface.blocks.hybrid import layer_template
from peakcast.models.ledger.huggingface.blocks.traits import (
    has_mask_of_heads,
    kinds_of_layers,
    kinds_of_masks,
)
from peakcast.models.ledger.layouts.gradient_tensors import lm_head_gradients
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.networks.families import family_of
from peakcast.networks.rotary import rotated_width
from peakcast.networks.windows import attends_to_everything
from peakcast.timelines.timeline import Category


def hold_buffers(timeline: Step, job: TrainingJob) -> None:
    """Hold the network's large buffers: older modelling code registers a causal mask for the longest sequence, or tables of
    positions in every layer. Where a program has replaced the token table after it made the optimizer, the table that was
    replaced, and the gradient of the new one, which no optimizer sets to None."""
    family, longest = family_of(job.architecture), job.architecture.max_position_embeddings
    layers = [f"layers.{index}" for index in range(job.architecture.num_hidden_layers)]
    in_layers = family.masks.buffer_per_layer or conventions(job).get("causal_masks_in_layers")
    buffers = [("causal_mask", "", longest**2)] * family.masks.buffer
    buffers += [("attention.bias", layer, longest**2) for layer in layers if in_layers]
    tables = longest * rotated_width(job.architecture) * _element_bytes(job, FP32) * family.rotary.tables_of_all_positions
    buffers += [("attention.embed_positions", layer, tables) for layer in layers if tables]
    if conventions(job).get("rotary_tables_in_layers") and job.architecture.position_embedding == "rope":
        size = longest * rotated_width(job.architecture) * _element_bytes(job, int(DTYPE_BYTES[job.precision.parameters]))
        names = ("rotary_emb.cos_cached", "rotary_emb.sin_cached")
        buffers += [(name, layer, size) for layer in layers for name in names]
    timeline.hold_all(buffers, Category.PARAMETERS, 0)
    if conventions(job).get("table_made_again") and job.task == "train":
        table = job.architecture.vocab_size * job.architecture.hidden_size * int(DTYPE_BYTES[job.precision.parameters])
        timeline.hold("embed_tokens.weight.before", Category.PARAMETERS, table, 0, module="embedding")
        timeline.hold("embed_tokens.weight.grad", Category.GRADIENTS, table, 0, module="embedding")


def _element_bytes(job: TrainingJob, made_with: int) -> int:
    """Bytes of an element of a buffer of floating-point numbers that was made with `made_with`. FSDP1 casts them to what it
    computes in (torch 2.4 `distributed/fsdp/_runtime_utils.py` `_lazy_init`, `MixedPrecision.buffer_dtype`, which
    accelerate sets)."""
    if job.parallelism.sharding == "fsdp1" and mixes_precision(job):
        return int(DTYPE_BYTES[job.precision.wide_compute])
    return made_with


def hold_embeddings(
    timeline: Step, layers: Sequence[HFContext], embedded: BlockRun, checkpointed: bool, offloads: bool, dies: int
) -> None:
    """Hold the embeddings that variables of the model's forward refer to, until its last norm is done. `checkpointed`:
    whether the first layer is checkpointed; `offloads`: whether that layer's input is offloaded to the host."""
    one = layers[0]
    normed = one.architecture.embedding_norm and one.architecture.kind == "decoder"
    if normed and one.table_trains and not one.backward.saves_on_cpu:
        return  # the norm saves it
    is_input, sizes = embedding_variables(layers[0])
    born = embedded.forward_start + embedded.template.num_forward
    if is_input:
        if offloads and checkpointed and not layers[0].table_trains and hands_on_itself(layers[0]):
            return  # a leaf (`hold_leaf`)
        if not offloads and (checkpointed or layer_template(layers[0]).keeps_input):
            return  # the checkpoint or the graph keeps it anyway
        born += layer_template(layers[0]).num_forward
    elif layers[0].layer.input_requires_grad and not (layers[0].table_trains or layers[0].neftune):
        sizes = sizes[1:]  # a leaf that requires a gradient, which its own node keeps (noise makes another tensor of it)
    for size in sizes:
        timeline.hold("inputs_embeds", Category.ACTIVATIONS, size, born, dies, "embedding")


def hold_leaf(timeline: Step, first: HFContext, embedded: BlockRun) -> None:
    """Hold the embedding's output until now, the end of backward, if peft's `enable_input_require_grads` makes it a leaf:
    the leaf's node keeps it on the GPU, although the checkpoint has a copy on the host."""
    if not first.table_trains and hands_on_itself(first):
        born = embedded.forward_start + embedded.template.num_forward + layer_template(first).num_forward
        timeline.hold("embedding.output", Category.ACTIVATIONS, first.input_bytes, born, timeline.now, "embedding")


def model_ends(loss: BlockRun) -> int:
    """The instant of the lm_head, or of a loss that includes it: then the model below it has returned, and the variables of
    its forward are gone."""
    return loss.forward_start + min(loss.template.forward_marks[Mark.LM_HEAD][0], loss.template.loss_from)


def hold_tied_gradient(timeline: Step, loss: BlockRun, dies: int) -> None:
    """Hold the lm_head's part of a tied table's gradient until `dies`: it waits for the embedding's, and the sum of both is
    added to the existing `.grad`."""
    template = loss.template
    if loss.backward_start is None:
        return
    for index in lm_head_gradients(template):
        born, size = loss.backward_start + int(template.dies[index]), int(template.num_bytes[index])
        timeline.hold("lm_head.weight.grad", Category.TEMPORARIES, size, born, dies, "head")


def hold_for_tied_product(timeline: Step, loss: BlockRun, context: HFContext) -> None:
    """Hold, until backward ends, what the gradient of a tied table in a compiled graph is computed from: the final norm's
    output and the gradient of the logits, whose matrix product comes last."""
    token, architecture, ends = context.rows * context.precision.compute_bytes, context.architecture, timeline.now
    timeline.hold("final_norm", Category.ACTIVATIONS, token * architecture.hidden_size, model_ends(loss) + 1, ends)
    if loss.backward_start is not None:
        born = loss.backward_start + 1 + loss.template.in_backward["lm_head"]
        timeline.hold("logits.gradient", Category.LOGITS, token * architecture.vocab_size, born, ends)


def last_readers(layers: Sequence[HFContext], runs: Mapping[int, BlockRun], ended: int | None = None) -> list[int]:
    """For each kind of layer, in the order of the kinds' first layers: the instant after the backward that runs last of its
    layers in `runs`; `ended` if `runs` has none of them."""
    kinds, dies = attends_to_everything(layers[0].architecture), []
    for kind in dict.fromkeys(kinds):
        run = next((runs[index] for index, one in enumerate(kinds) if one == kind and index in runs), None)
        last = run and (run.recomputation or run)
        dies.append((last.backward_start or 0) + last.template.num_backward if last else ended or 0)
    return dies


def mask_bytes(layers: Sequence[HFContext]) -> tuple[list[int], bool]:
    """Bytes of the model's attention masks, one for each kind of layer, and whether layers take them as an argument.

    Eager attention has masks in the embeddings' dtype. sdpa has bool masks that all sequences share, unless the batch needs
    one for each. Flash attention uses the batch's own mask.
    """
    one = layers[0]
    scores = one.sequence**2
    family = family_of(one.architecture)
    kinds, element = kinds_of_masks(one.architecture), one.precision.weight_bytes if one.attention.mask_is_additive else 1
    if one.architecture.kind == "encoder":
        return [], False  # nothing is masked without padding
    if "network" in one.compiled:
        return [one.batch * scores * one.precision.compute_bytes], True
    if family.eager_attention.adds_and_fills:
        biases = one.architecture.num_attention_heads * one.architecture.max_position_embeddings * FP32
        return [one.batch * scores + biases], True
    attention = one.attention.implementation
    if attention == "eager":
        return [one.batch * scores * one.precision.weight_bytes] * kinds, True
    if attention == "sdpa" and has_mask_of_heads(one.architecture):
        return [one.batch * one.architecture.num_attention_heads * scores * one.precision.weight_bytes], True
    if attention == "flex":
        return [flex_block_mask_bytes(one.batch, one.sequence)], True
    if attention == "sdpa" and one.packing.mask_of_batch:
        return [one.batch * scores * element] * kinds, True
    if attention == "flash_attention_2" and one.packing.valid_rows:  # a bool for each token: [batch, sequence]
        return [one.batch * one.sequence], True
    taken = list(dict.fromkeys(each.layer.masked for each in layers))  # one per kind, in the order of their first layers
    if attention != "sdpa" or not (any(taken) or family.masks.for_both_kinds):
        return [], any(taken)
    size = scores * element * (one.batch if one.packing.comes_with_mask else 1)
    return [size * masked for masked in taken] if any(taken) else [size], any(taken)


def hold_masks(timeline: Step, layers: Sequence[HFContext], start: int, ended: int, dies: Sequence[int]) -> None:
    """Hold the masks of `mask_bytes` until the model's forward has `ended`; those that layers take as an argument, until
    `dies`."""
    sizes, taken = mask_bytes(layers)
    for size, end in itertools.zip_longest(sizes, dies[: len(sizes) * taken], fillvalue=ended):
        timeline.hold("attention_mask", Category.INPUTS, size, start, end)


def hold_masks_from_host(
    timeline: Step, layers: Sequence[HFContext], checkpointed: Iterable[BlockRun], reentrant: bool
) -> None:
    """Hold the copies of a mask that a checkpoint saved and offloaded: each recomputed layer gets its own copy. Under a
    reentrant checkpoint a variable refers to it until the end of the layer's backward."""
    sizes, taken = mask_bytes(layers)
    for run in checkpointed if taken else ():
        if again := run.recomputation:
            ends = again.forward_start + again.template.num_forward
            ends = (again.backward_start or ends) + again.template.num_backward if reentrant else ends
            timeline.hold("attention_mask", Category.INPUTS, sizes[0], again.forward_start, ends, run.module)


def arguments_of_layers(job: TrainingJob, layers: Sequence[HFContext]) -> list[tuple[str, int]]:
    """(name, bytes) of the tensors that the model passes to every layer by keyword. A reentrant checkpoint does not save
    these as tensors; its node keeps them, as part of the call, as long as the graph exists (torch `utils/checkpoint.py`,
    `ctx.run_function`)."""
    sizes, taken = mask_bytes(layers)
    named = taken and not family_of(job.architecture).masks.by_position
    tables = [("rotary", size) for _, _, size in _rotary_tables_of(job, layers[0])]
    return [("attention_mask", size) for size in sizes[: kinds_of_layers(job.architecture)] if named] + tables


def attention_weights_bytes(layer: HFContext) -> int:
    """Bytes of the attention weights that a layer returns; 0 if its family or its attention returns none. With flash
    attention the layer returns attention's output in their place."""
    family = family_of(layer.architecture)
    if not layer.returns_weights or layer.attention.implementation not in ("eager", "flash_attention_2"):
        return 0
    if layer.attention.implementation == "flash_attention_2":
        return layer.rows * layer.architecture.query_size * layer.precision.compute_bytes
    wide = layer.precision.autocast and family.eager_attention.softmax == "wide"
    element = FP32 if wide else layer.precision.compute_bytes
    return layer.rows * layer.architecture.num_attention_heads * layer.keys * element


def attends_without_graph(run: BlockRun) -> bool:
    """Whether a layer's attention saves nothing for backward, because neither its input nor a projection trains."""
    return not run.template.dies_backward[run.template.made_by(Mark.ATTENTION)].any()


def hold_attention_weights(
    timeline: Step, layer: HFContext, first_runs: Mapping[int, BlockRun], layers: Mapping[int, BlockRun]
) -> None:
    """Hold the attention weights that a layer of `first_runs` returned, which no graph saves, while the next of `layers`
    runs."""
    size = attention_weights_bytes(layer)
    for index, run in first_runs.items() if size else ():
        if index + 1 in layers:
            born, after = run.forward_start + run.template.num_forward, layers[index + 1]
            ends = after.forward_start + after.template.num_forward
            timeline.hold("attention_weights", Category.ACTIVATIONS, size, born, ends, run.module)


def hold_cast_weights(timeline: Step, runs: Iterable[BlockRun], loss: BlockRun, *, owned: bool) -> None:
    """Hold until autocast's context is left, at the end of forward, the narrow copies of weights that autocast caches:
    those of blocks without a graph and, if graphs own what they save (`owned`), those that no graph saves (an adapter's
    whose input needs no gradient). `loss`: the run of head and loss."""
    widened = loss.template.forward_marks.get(Mark.WIDENED_OUTPUTS, ())
    left = loss.forward_start + widened[0] if widened else timeline.now
    for run in runs:
        template, born = run.template, run.forward_start + run.template.num_forward
        kept = template.dies_backward if owned else np.zeros_like(template.dies_backward)
        made = template.allocated & ~template.born_backward  # a block's input is not, though it may be born then
        casts = made & np.isin(template.born, template.forward_marks.get(Mark.CACHED_CAST, ()))
        size = int(template.num_bytes[casts & ~kept].sum())
        timeline.hold("autocast_cache", Category.TEMPORARIES, size, born, left, run.module)


def _rotary_tables_of(job: TrainingJob, context: HFContext) -> list[tuple[str, str, int]]:
    """(name, module, bytes) of the rotary tables that the model computes for a micro-batch and passes to all layers."""
    if "network" in context.compiled:  # each kernel recomputes them
        return []
    # where ranks share a sequence, each sequence of a batch has positions of its own
    tokens = context.rows if context.ring.ranks > 1 else context.sequence
    return rotary_tables(job.architecture, tokens, context.precision.weight_bytes)


def last_rotations(layers: Sequence[HFContext], runs: Mapping[int, BlockRun], ended: int | None) -> list[int]:
    """For each kind of layer, the instant from which nothing refers to its rotary tables. `ended`: the end of the model's
    forward; None if layers are recomputed, because they then read the tables in backward."""
    one, family = layers[0], family_of(layers[0].architecture)
    dies = last_readers(layers, runs)
    if ended is None or "layers" in one.compiled:
        return dies
    # the host, or every layer, has copies; where positions are biases of ALiBi, Falcon makes tables that no layer reads
    unread = one.backward.saves_on_cpu or family.rotary.tables_per_layer or has_mask_of_heads(one.architecture)
    if unread:
        return [ended] * len(dies)
    if Mark.ROTATION not in runs[0].template.backward_marks:  # the first layer's queries and keys need no gradient
        kinds = attends_to_everything(layers[0].architecture)
        after = runs.get(kinds.index(kinds[0], 1) if kinds[0] in kinds[1:] else len(kinds))
        dies[0] = (after.backward_start or 0) + after.template.num_backward if after else ended
    return dies


def hold_rotary_tables(timeline: Step, job: TrainingJob, context: HFContext, start: int, dies: Sequence[int] = ()) -> None:
    """Hold the cosines and sines of every position, which all layers of a kind share, until `dies`, or until now."""
    for index, (name, _, size) in enumerate(_rotary_tables_of(job, context)):
        timeline.hold(name, Category.ACTIVATIONS, size, start, dies[index // 2] if dies else timeline.now)


def rotary_tables(architecture: Architecture, tokens: int, weight_bytes: int) -> list[tuple[str, str, int]]:
    """(name, module, bytes) of the rotary tables of `tokens` positions, as the model computes them for all layers."""
    mla, family = architecture.mla, family_of(architecture)
    makes_tables = architecture.position_embedding == "rope" or has_mask_of_heads(architecture)
    if not makes_tables or family.rotary.tables_of_all_positions:
        return []
    width = mla.qk_rope_head_dim if mla else rotated_width(architecture)
    if family.rotary.complex:
        return [("rotary.frequencies", "", tokens * width * FP32)]
    width //= 1 + family.rotary.in_halves
    size = tokens * width * (FP32 if family.rotary.products == "promoted" else weight_bytes)
    sets = min(family.rotary.tables, kinds_of_layers(architecture))
    return [("rotary.cos", "", size), ("rotary.sin", "", size)] * sets
