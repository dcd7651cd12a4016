"""What CUDA graphs of Megatron-LM's steps keep. Graphs are recorded after a few steps that run without them, so a run has
two more kinds of step:

- **captured**: while graphs are recorded, all that graphed parts make in a step is allocated once more, in a memory pool
  that nothing else can use, and nothing else of a step exists.
- **replayed**: what graphed parts make is then addresses in that pool. The allocator counts it as reserved, but no longer
  as allocated. Their inputs, and the gradients of their outputs, stay allocated for the rest of the run.

With `cuda-graph-impl=local`, graphs of layers are recorded when the first step's backward is done, before there are
optimizer states, and all later steps replay them, so "steady" is a replayed step too. What one graph makes for the next is
in the pool. Only what comes from outside has a tensor of its own, which all graphs share in turn; and there is a copy of a
layer's main gradients while it is recorded (megatron-core 0.16.1 `transformer/cuda_graphs.py` `TensorReusePool`,
`create_fwd_graph`).

Sources: megatron-core 0.17.1 `transformer/cuda_graphs.py` `TECudaGraphHelper` (`_get_sample_arguments`: inputs are tensors
of their own, reused once their backward has run; `_start_capturing` and `_finish_capturing` empty the cache),
`transformer/transformer_layer.py` `get_layer_static_inputs` and `_get_submodules_under_cudagraphs`, `full_cuda_graph.py`;
Transformer Engine 2.8 `graph.py` `_make_graphed_callables` (all graphs share one pool; with
`_reuse_graph_input_output_buffers`, outputs and gradients become weak references, and outputs that look alike share one
gradient). Recording calls layers one after the other, so each has an output beside the next one's input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.core.texts import Texts
from peakcast.core.units import DTYPE_BYTES
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts.module_tree import BlockKind, block_of, layer_index
from peakcast.models.ledger.megatron.inputs import inputs, reads_batches
from peakcast.models.ledger.megatron.parameters import Parameter
from peakcast.models.ledger.megatron.received import Span
from peakcast.models.ledger.megatron.share import RankShare
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import Step
from peakcast.models.ledger.tape.template import BLOCK_INPUT, Template
from peakcast.timelines.timeline import Category, Phase, Timeline

WHOLE_STEP, OF_INFERENCE = "full_iteration", "full_iteration_inference"
POOL = 16
"""Added to the number of a stream for what is allocated there in the graphs' pool: the allocator never gives blocks of one
pool to another."""
_ROUTED = ("moe_router", "moe_preprocess", "moe")
_PARTS = ("attn", "mlp", *_ROUTED)
"""The parts of a layer by their names in `cuda-graph-scope`."""
_OF_MARK = {Mark.FEED_FORWARD: "mlp", Mark.ROUTER: "moe_router", Mark.EXPERTS: "moe", Mark.PERMUTATION: "moe_preprocess"}
"""Mark -> the part of the layer to which marked operations belong; of several marks the last one counts. Operations without
one belong to attention."""
_EVERY = -1
"""In place of a part: the input of a layer, which any part with a graph reads."""

Mask = npt.NDArray[np.bool_]


def graphed_steps(job: TrainingJob) -> tuple[str, ...]:
    """The kinds of step that a job of Megatron-LM has because of graphs, in order; none without graphs, nor with those that
    are not modelled."""
    return ("captured", "replayed") if _has_graphs(conventions(job)) else ()


def graphs_whole_step(convention: Mapping[str, Any]) -> bool:
    """Whether one graph has all of a step but its optimizer."""
    return convention.get("cuda_graph_impl") == "local" and convention.get("cuda_graph_scope") == WHOLE_STEP


def graphs_own_layers(convention: Mapping[str, Any]) -> bool:
    """Whether megatron-core records graphs of layers itself, after the first step's backward."""
    scope = convention.get("cuda_graph_scope")
    return convention.get("cuda_graph_impl") == "local" and scope not in (WHOLE_STEP, OF_INFERENCE)


def _has_graphs(convention: Mapping[str, Any]) -> bool:
    scope = convention.get("cuda_graph_scope")
    of_layers = convention.get("cuda_graph_impl") == "transformer_engine" and scope not in (WHOLE_STEP, OF_INFERENCE)
    return of_layers or graphs_whole_step(convention) or graphs_own_layers(convention)


def hold_read_ahead(step: Step, share: RankShare) -> None:
    """Hold the micro-batches that a graph of a whole step reads, from the first step on. The rank that reads batches copies
    all of a step's micro-batches to the GPU (`StaticBufferLoader`); the current one is already part of the step."""
    others = share.job.gradient_accumulation_steps - 1
    for chunk in share.chunks if reads_batches(share) else ():
        for tensor in inputs(share, chunk):
            step.hold(tensor.name, Category.INPUTS, others * tensor.num_bytes, 0, module="cuda_graph")


def hold_inputs_of_graphs(step: Step, share: RankShare, spans: Sequence[Span]) -> None:
    """Hold the inputs of layers' graphs: for each layer of each micro-batch in flight a hidden state and, if the layer has
    attention, a mask; and the one gradient buffer that all these graphs share."""
    if graphs_whole_step(share.convention):
        return
    states, masks = _in_flight(share, spans)
    if graphs_own_layers(share.convention):
        states, masks = min(states, 1), min(masks, int(reads_batches(share)))
    job, context = share.job, share.context
    mask_bytes = context.batch * context.sequence * job.sequence_length
    step.hold("graph_inputs", Category.ACTIVATIONS, states * context.stream_bytes, 0, module="cuda_graph")
    step.hold("graph_attention_masks", Category.INPUTS, masks * mask_bytes, 0, module="cuda_graph")
    step.hold("graph_output_gradient", Category.TEMPORARIES, min(states, 1) * context.stream_bytes, 0, module="cuda_graph")


def hold_gradient_copies(step: Step, share: RankShare, parameters: Sequence[Parameter]) -> None:
    """Hold the copy of main gradients that exists while a layer is recorded; it is as large as those of the largest
    layer."""
    layers = dict[str, int]()
    for parameter in parameters:
        if _covers_part(share, parameter.module, _EVERY):
            layers[parameter.module] = layers.get(parameter.module, 0) + parameter.numel
    size = max(layers.values(), default=0) * int(DTYPE_BYTES[share.job.precision.gradients])
    step.hold("graph_gradient_copies", Category.GRADIENTS, size, 0, module="cuda_graph")


def _in_flight(share: RankShare, spans: Sequence[Span]) -> tuple[int, int]:
    """The most layers with graphs, and the most of these with graphs of their attention, that are between their forward and
    their backward. Without pipeline, graphs of one micro-batch serve all."""
    graphed, attending = [0] * len(share.chunks), [0] * len(share.chunks)
    for place, chunk in enumerate(share.chunks):
        for layer in [*chunk.layers, *_predicting(share, chunk.is_last)]:
            parts = [part for part in _parts(share, layer) if _covers(share, part)]
            graphed[place] += bool(parts)
            attending[place] += "attn" in parts
    states = masks = most_states = most_masks = 0
    for span in spans:
        sign = 1 if span.turn.forward else -1
        states, masks = states + sign * graphed[span.turn.chunk], masks + sign * attending[span.turn.chunk]
        most_states, most_masks = max(most_states, states), max(most_masks, masks)
    return most_states, most_masks


def _predicting(share: RankShare, is_last: bool) -> list[int]:
    """For each layer of multi-token prediction the index of the network's last layer, which has the same parts."""
    architecture = share.job.architecture
    return [architecture.num_hidden_layers - 1] * (architecture.num_nextn_predict_layers if is_last else 0)


def _parts(share: RankShare, layer: int) -> tuple[str, ...]:
    """The parts of a layer that can be in a graph, by their names in `cuda-graph-scope`."""
    context = share.layer_context(layer)
    feed_forward = _ROUTED if context.experts is not None else ("mlp",)
    return {"": ("attn", *feed_forward), "mamba": ("mamba",), "attention": ("attn",), "mlp": feed_forward}[context.part]


def _covers(share: RankShare, part: str) -> bool:
    """Whether graphs have this part of a layer. Without a scope they have whole layers; the scope of experts includes their
    router."""
    scope = str(share.convention.get("cuda_graph_scope") or "").split()
    return not scope or part in scope or ("moe" in scope and part in _ROUTED)


def graphed_bytes_of(step: Step, share: RankShare) -> int:
    """The most that graphed parts have at once in a steady step."""
    timeline = step.timeline()
    return _only(timeline, _in_graphs(step, timeline, share)).peak().num_bytes


def captured(step: Step, share: RankShare) -> Timeline:
    """While graphs are recorded: of a steady step's tensors those that stay between steps and, in the pool, those of
    graphed parts."""
    timeline = step.timeline()
    inside, end = _in_graphs(step, timeline, share), len(timeline.phases)
    stays = (timeline.born == 0) & (timeline.dies >= end)
    streams = np.zeros(len(inside), dtype=np.int8) if timeline.streams is None else timeline.streams
    in_pool = replace(timeline, streams=np.where(inside, streams + POOL, streams).astype(np.int8))
    return _only(in_pool, inside | stays)


def replayed(step: Step, share: RankShare) -> Timeline:
    """While graphs run: a steady step's tensors without those of graphed parts."""
    timeline = step.timeline()
    return _only(timeline, ~_in_graphs(step, timeline, share))


def _in_graphs(step: Step, timeline: Timeline, share: RankShare) -> Mask:
    """Which tensors of a steady `step` graphed parts make. [num_entries]. Those of a layer that predicts further tokens
    count as made by the head."""
    end = len(timeline.phases)
    made: Mask = (timeline.born > 0) & (timeline.dies < end) & (timeline.categories != Category.INPUTS)
    if graphs_whole_step(share.convention):
        began = timeline.phases[np.minimum(timeline.born, end - 1)]
        whole: Mask = made & (began <= Phase.BACKWARD)
        return whole
    parts = step.placed().described(_parts_of)
    modules = Texts.of(timeline.modules)
    pairs, which = np.unique(np.stack([modules.numbers[: len(parts)], parts]), axis=1, return_inverse=True)
    covered = [_covers_part(share, module, int(part)) for module, part in zip(Texts(pairs[0]), pairs[1], strict=True)]
    made[: len(parts)] &= np.array(covered, dtype=bool)[which.reshape(-1)]
    made[len(parts) :] = False
    return made


def _parts_of(template: Template) -> npt.NDArray[np.int64]:
    """The part of a layer that makes each entry, as a place in `_PARTS`, or `_EVERY`. [num_entries]"""
    parts = np.zeros(template.num_entries, dtype=np.int64)
    for mark, part in _OF_MARK.items():
        parts[template.made_by(mark)] = _PARTS.index(part)
    parts[template.operations == BLOCK_INPUT] = _EVERY
    return parts


def _covers_part(share: RankShare, module: str, part: int) -> bool:
    """Whether graphs have what the part at this place in `_PARTS` makes in `module`."""
    if block_of(module) is not BlockKind.LAYER:
        return False
    parts = _parts(share, layer_index(module))
    if part == _EVERY:
        return any(_covers(share, one) for one in parts)
    return _covers(share, parts[0] if len(parts) == 1 else _PARTS[part])


def _only(timeline: Timeline, keep: Mask) -> Timeline:
    """The timeline with only the entries of `keep`."""
    return replace(
        timeline,
        names=Texts(Texts.of(timeline.names).numbers[keep]),
        modules=Texts(Texts.of(timeline.modules).numbers[keep]),
        categories=timeline.categories[keep],
        num_bytes=timeline.num_bytes[keep],
        born=timeline.born[keep],
        dies=timeline.dies[keep],
        streams=None if timeline.streams is None else timeline.streams[keep],
        reusable=None if timeline.reusable is None else timeline.reusable[keep],
    )
