"""A decoder layer that torch.compile compiles by itself: the operations of its two graphs, from which its buffers follow.

Forward saves what the partitioner chose: without checkpointing, what the kernels before and after each matrix product make;
nothing under full checkpointing; what the policy says under selective checkpointing. Backward recomputes the rest just
before it is first needed. Between matrix products everything elementwise is one kernel, and only its results are buffers.

Source: graphs that torch 2.13 lowers for transformers' Llama, Mistral, Qwen2 and Qwen3 (`TORCH_LOGS=output_code`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from peakcast.core.units import INT64
from peakcast.models.ledger.compiled.backward import LayerOps
from peakcast.models.ledger.compiled.float8 import Float8LayerOps, in_float8, inlined, recomputed_inputs
from peakcast.models.ledger.compiled.forward import adapted
from peakcast.models.ledger.compiled.graphs_in_turn import both_graphs
from peakcast.models.ledger.compiled.inductor_graph import InductorGraph
from peakcast.models.ledger.compiled.inductor_kernels import Op
from peakcast.models.ledger.compiled.ops import (
    INPUT,
    MASK,
    NARROWED,
    OUTPUT,
    PRODUCTS,
    SEEDS,
    Names,
    op,
    recomputed,
    wanted,
)
from peakcast.models.ledger.compiled.template import Given, compiled_template
from peakcast.models.ledger.huggingface.blocks.attention_kernels import attention_kernel
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import WHOLE
from peakcast.models.ledger.tape.template import OUTPUT_GRADIENT, Template
from peakcast.networks.families import family_of
from peakcast.timelines.timeline import Category


def is_compiled_alone(context: HFContext) -> bool:
    """Whether this module describes the graphs of the context's layer."""
    dense = "alone" in family_of(context.architecture).traces.compiled and not context.layer.routed
    plain = dense and (context.trainable or context.compiles_adapters)
    plain = plain and context.attention.implementation == "sdpa" and not context.packing.num_sequences
    whole = context.group == WHOLE and not (context.backward.in_two_parts or context.backward.saves_on_cpu)
    attends = attention_kernel(context) == "flash" or given_mask(context)
    return "layers" in context.compiled and plain and whole and attends


def given_mask(context: HFContext) -> bool:
    """Whether the layer's own graph makes a mask of numbers from the bool mask that it is given."""
    return context.layer.masked and context.divided_by_hooks


@lru_cache(maxsize=256)
def compiled_layer(context: HFContext, recomputes: bool) -> Template:
    """One layer, forward and backward: [micro_batch_size, sequence_length, hidden_size] in and out. `recomputes`:
    checkpointing is inside the compiled part, and `context.backward.cached_matmuls` says what it keeps. If it is around it,
    the context is `checkpointed`: the checkpoint holds the layer's input."""
    return _template(context, *layer_graphs(context, recomputes))


def layer_graphs(context: HFContext, recomputes: bool) -> tuple[InductorGraph, InductorGraph]:
    """The layer's forward and backward graphs. An input without a gradient, as of the first layer with adapters, is not
    saved: the sum after attention is, and what leads to no adapter has no backward."""
    sums_again = context.layer.input_requires_grad and "o" not in adapted(context)
    layer_ops = Float8LayerOps if in_float8(context) else LayerOps
    ops = layer_ops(context, sums_again=sums_again, recomputes=recomputes)
    forward, backward = ops.forward(), ops.backward()
    if not context.layer.input_requires_grad:
        backward = wanted([one for one in backward if one.name != "d_input"])
    if ops.drops:
        forward.insert(0, op(SEEDS, (), 2 * INT64))
    if given_mask(context):
        forward = with_masks(forward, [MASK], mask_bytes(context))
    if ops.casts:
        backward = [op(NARROWED, OUTPUT_GRADIENT, ops.hidden), *backward]
    kept = kept_of(context, forward, recomputes) - recomputed_inputs(forward)
    again = ops.forward(again=True)
    if given_mask(context):
        again = with_masks(again, [MASK], mask_bytes(context))
    everything = recomputed(again, backward, kept)
    return both_graphs(inlined(forward), inlined(everything), kept, {OUTPUT}, ops.parts_read)


def mask_bytes(context: HFContext) -> int:
    """Bytes of a mask that is added to scores: [micro_batch_size, 1, sequence_length, sequence_length]."""
    return context.batch * context.sequence**2 * context.precision.compute_bytes


def with_masks(inside: list[Op], masks: Sequence[str], num_bytes: int, reads: Names = ()) -> list[Op]:
    """The operations of a layer, with that which makes `masks` of what it `reads`, where one is first read."""
    at = next(place for place, each in enumerate(inside) if MASK in each.reads)
    made = op(MASK, reads, dict.fromkeys(masks, num_bytes))
    return [*inside[:at], made, *inside[at:]]


def kept_of(context: HFContext, forward: Sequence[Op], recomputes: bool) -> set[str]:
    """Names of what a layer's forward may save for backward; with checkpointing, only what the policy keeps."""
    if not recomputes:
        return {name for one in forward for name in one.writes}
    if not context.backward.cached_matmuls:
        return set()
    products = [one.name for one in forward if one.name in PRODUCTS]
    chosen = {name for index, name in enumerate(products) if index % context.backward.cached_matmuls == 0}
    return chosen | {name for one in forward if one.parts for name in one.writes}


def _template(context: HFContext, first: InductorGraph, second: InductorGraph) -> Template:
    """Both graphs as one block. Parameter gradients leave the backward graph when it ends."""
    hidden, owned = context.input_bytes, 0 if context.backward.checkpointed else context.input_bytes
    given = (
        Given(INPUT, Category.ACTIVATIONS, owned, False, read_again=context.layer.input_requires_grad),
        Given(OUTPUT_GRADIENT, Category.TEMPORARIES, hidden, True),
    )
    return compiled_template(first, second, given, input_bytes=hidden)
