"""A decoder that torch.compile compiles as a whole, with its loss: one graph forward and one backward.

Its layers have the operations of `layer.py`, one after the other, but no graph ends between them. Inductor orders all of
backward at once, so it may compute a weight's gradient as late as the end, if that does not raise the peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple

from peakcast.core.units import FP32, INT64
from peakcast.models.ledger.compiled.backward import LayerOps, StreamGradient
from peakcast.models.ledger.compiled.float8 import (
    FAR_IN_LAST,
    ROWS,
    Float8LayerOps,
    in_float8,
    inlined,
    kept_late,
    recomputed_inputs,
)
from peakcast.models.ledger.compiled.graphs_in_turn import Graph, GraphsInTurn, both_graphs
from peakcast.models.ledger.compiled.inductor_kernels import Op
from peakcast.models.ledger.compiled.layer import kept_of, mask_bytes, with_masks
from peakcast.models.ledger.compiled.ops import (
    INPUT,
    MASK,
    OF_OUTPUT_GRADIENT,
    OUTPUT,
    SEEDS,
    Names,
    op,
    prefixed,
    recomputed,
    wanted,
)
from peakcast.models.ledger.compiled.template import Given, Place, compiled_template
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import WHOLE
from peakcast.models.ledger.tape.template import OUTPUT_GRADIENT, Template
from peakcast.networks.families import family_of
from peakcast.networks.windows import attends_to_everything
from peakcast.timelines.timeline import Category

WHOLE_NETWORK = frozenset({"layers", "embedding", "final_norm", "loss", "mask", "network"})
TANGENT = "logits.tangent"
"""The gradient of the logits, which the graph returns besides the loss: zeros of the same size."""

HIDDEN_TANGENT = "hidden_states.tangent"
"""The gradient of the final norm's output, which the graph returns if the loss is a graph of its own."""


def is_compiled_whole(context: HFContext) -> bool:
    """Whether this module describes the graphs of the context's network."""
    dense = "alone" in family_of(context.architecture).traces.compiled and context.architecture.moe is None
    plain = _trains_as_traced(context) and context.group == WHOLE and not context.backward.saves_on_cpu
    whole_loss = context.loss.kind == "cross_entropy" and not context.kernels.fused_loss
    return context.compiled == WHOLE_NETWORK and dense and plain and whole_loss


def _trains_as_traced(context: HFContext) -> bool:
    """Whether the network trains as one of those that were traced: whole, or with fp32 adapters alone."""
    tuning = context.finetuning
    plain = tuning.method == "lora" and not (tuning.quantization or tuning.dropout or context.precision.autocast)
    plain = plain and not (context.architecture.fused_qkv or context.architecture.fused_gate_up)
    return context.trainable or (plain and context.adapters.weight_bytes == FP32)


@lru_cache(maxsize=64)
def compiled_network(kinds: tuple[HFContext, ...], layers: tuple[int, ...], again: tuple[bool, ...]) -> Template:
    """The template of a whole network, from token ids to loss and logits. Layer i has the context `kinds[layers[i]]`;
    `again[i]`: whether it is checkpointed."""
    first, second, places = network_graphs(tuple(kinds[kind] for kind in layers), again)
    if family_of(kinds[0].architecture).ends.loss_apart:
        given = Given(HIDDEN_TANGENT, Category.TEMPORARIES, first.size_of("norm_final"), True, born=1)
    else:
        given = Given(TANGENT, Category.LOGITS, first.size_of("logits"), True)
    return compiled_template(first, second, [given], places=places)


class NetworkGraphs(NamedTuple):
    """The graphs of a network, and where the buffers of its embedding and its layers belong."""

    forward: Graph
    backward: Graph
    places: Mapping[str, Place]


def network_graphs(layers: tuple[HFContext, ...], again: tuple[bool, ...]) -> NetworkGraphs:
    """The graphs of a network with these `layers`."""
    one = layers[0]
    network, parts = _before_head(layers, again)
    head, head_back = _head(one, parts[-1][0], network.given, network.summed if again[-1] else (network.given,))
    loss, loss_back = _loss(one)
    apart = family_of(one.architecture).ends.loss_apart
    after = head if apart else [*head, *loss]
    forward = [*network.forward, *after, *network.late]
    kept = network.kept | {name for each in (*head, *loss) for name in each.writes}
    embedding = _embedding_back(one, network.backward)
    network.places |= _of_embedding(embedding)
    everything = [*([] if apart else loss_back), *head_back, *network.backward, *embedding]
    kept -= recomputed_inputs(forward)
    everything = inlined(recomputed(network.repeated + after, wanted(everything), kept))
    forward = inlined(forward)
    seen = {f"{index}.{name}": size for index, (each, *_) in enumerate(parts) for name, size in each.parts_read.items()}
    first, second = both_graphs(forward, everything, kept, {"logits"} if apart else {"logits", "loss"}, seen)
    if not apart:
        return NetworkGraphs(first, second, network.places)
    loss_first, loss_second = both_graphs(loss, loss_back, kept, {"loss"}, {"logits": first.size_of("logits")})
    return NetworkGraphs(GraphsInTurn([first, loss_first]), GraphsInTurn([loss_second, second]), network.places)


def _before_head(layers: tuple[HFContext, ...], again: tuple[bool, ...]) -> tuple[_LayersInTurn, list[LayerParts]]:
    """The operations of the embedding and of all layers, together and layer by layer."""
    one = layers[0]
    embedded, reads = _embedded(one, len(layers))
    made = family_of(one.architecture).ends.scales_embedding or len(reads) > 1  # computed, so it can be recomputed
    looked_up = one.trainable and not made  # rows of a frozen table are looked up again instead
    parts = [
        _layer(layer, again[index] or (index == 0 and looked_up), again[index], reads if index == 0 else (INPUT,))
        for index, layer in enumerate(layers)
    ]
    masks = _masks(one, len(layers))
    of_masks = partial(with_masks, masks=masks, num_bytes=mask_bytes(one), reads=("sequences",))
    ops, inside, repeated, back = parts[0]
    parts[0] = ops, of_masks(inside), of_masks(repeated), back
    before = [*embedded, op("sequences", (), one.rows * INT64)]
    network = _LayersInTurn(
        forward=before,
        repeated=[*before],
        places=_of_embedding(before),
        kept={*reads, "positions", "sequences", *masks},
        outer={name: name for name in (*reads, *masks, SEEDS, "sequences", "norm_final.partial", ROWS)},
    )
    for index, (layer, part) in enumerate(zip(layers, parts, strict=True)):
        network.add(layer, part, masks[index], again=again[index], last=index == len(layers) - 1)
    if any(again):
        network.kept.difference_update(masks)
    return network, parts


def _of_embedding(ops: Sequence[Op]) -> dict[str, Place]:
    """The places of the buffers that `ops` of the embedding make."""
    return {name: Place("embedding", name) for one in ops for name in one.writes}


LayerParts = tuple[LayerOps, list[Op], list[Op], list[Op]]
"""A layer, its operations forward, the same as backward may run them again, and those backward."""


@lru_cache(maxsize=64)
def _layer(context: HFContext, sums_again: bool, recomputes: bool, given: Names) -> LayerParts:
    """The operations of one kind of layer; cached, because a network has many layers of a kind."""
    layer_ops = Float8LayerOps if in_float8(context) else LayerOps
    ops = layer_ops(context, sums_again=sums_again, recomputes=recomputes, given=given)
    return ops, ops.forward(), ops.forward(again=True), ops.backward(is_result=False)


@dataclass(slots=True)
class _LayersInTurn:
    """The operations of a network's layers, which are added one by one."""

    forward: list[Op]
    repeated: list[Op]
    """The operations of forward, as backward may run them again."""
    kept: set[str]
    """Names of what forward may save for backward."""
    outer: dict[str, str]
    """Names of buffers that layers read or write and that are not their own -> the names that these have here."""
    places: dict[str, Place] = field(default_factory=dict)
    """By name here of a buffer that the embedding or a layer makes, where it belongs."""
    late: list[Op] = field(default_factory=list)
    """The operations that forward runs at its end: it keeps what only backward reads."""
    backward: list[Op] = field(default_factory=list)
    given: str = "embedding"
    """The last layer's output."""
    summed: Names = ()
    """The terms of that output: the layer's input and what its two halves add to it."""
    number: int = 0
    """How many layers there are so far."""

    def add(self, layer: HFContext, part: LayerParts, mask: str, *, again: bool, last: bool) -> None:
        """Add a layer with its operations. `mask`: the name of its mask; `again`: whether it is checkpointed."""
        (_, inside, repeated, back), prefix = part, f"{self.number}."
        above = "d_stream" if last else f"{self.number + 1}.d_input"
        self.outer[MASK] = mask
        at_once, late = kept_late(inside)
        self.forward += self._here(at_once, self.outer | {INPUT: self.given})
        self.late += self._here(late, self.outer | {INPUT: self.given})
        self.kept |= {prefix + name for name in kept_of(layer, inside, again)}
        if again and not last:
            self.kept.add(prefix + OUTPUT)
        above_names = {name: name.replace(OUTPUT_GRADIENT, above) for name in OF_OUTPUT_GRADIENT}
        if last and again:
            back = _after_recomputation(layer, back)
            repeated = [replace(one, fuses=()) if one.name in FAR_IN_LAST else one for one in repeated]
        self.repeated += self._here(repeated, self.outer | {INPUT: self.given})
        self.backward[:0] = self._here(back, self.outer | {INPUT: self.given} | above_names)
        self.summed = (self.given, f"{prefix}o", f"{prefix}down")
        self.given = prefix + OUTPUT
        self.number += 1

    def _here(self, ops: Sequence[Op], others: Mapping[str, str]) -> list[Op]:
        """`ops` of the layer that is being added, with the names that they have in the network. `others`: the buffers among
        theirs that are not the layer's."""
        here, block = prefixed(ops, f"{self.number}.", others), f"layers.{self.number}"
        for one, renamed in zip(ops, here, strict=True):
            both = zip(one.writes, renamed.writes, strict=True)
            self.places |= {new: Place(block, own) for own, new in both if own not in others}
        return here


def _masks(context: HFContext, layers: int) -> list[str]:
    """The name of each layer's mask. Layers with a sliding window have a mask of their own, even if it hides nothing."""
    kinds = attends_to_everything(context.architecture)
    return [MASK if kind == kinds[0] else f"{MASK}.other" for kind in kinds[:layers]]


def _after_recomputation(context: HFContext, backward: list[Op]) -> list[Op]:
    """The backward of the layer that is recomputed first. Its attention gets a mask that is written out for every head. The
    final norm reads the same recomputed buffers, so the sums over rows of both norms are one kernel."""
    size = context.batch * context.architecture.num_attention_heads * context.sequence**2 * context.precision.compute_bytes
    found, far = [], FAR_IN_LAST if in_float8(context) else ()
    for one in backward:
        if one.name == "d_attention":
            found.append(op("mask_of_heads", MASK, size))
            one = replace(one, reads=tuple("mask_of_heads" if name == MASK else name for name in one.reads))
        elif one.name == "norm_2.partial":
            one = replace(one, fuses=("norm_final.partial",))
        elif one.name in far:
            one = replace(one, fuses=())
        found.append(one)
    return found


def _embedded(context: HFContext, layers: int) -> tuple[list[Op], Names]:
    """The operations before the first layer, and the buffers that this layer reads: the embeddings and, with learned
    positions, all buffers from which its input is computed."""
    architecture, rows = context.architecture, context.rows
    if not context.trainable:
        return [], ("embedding",)
    stream = rows * architecture.hidden_size * context.stream_bytes
    embedded = op("embedding", (), stream, wide=context.stream_bytes > context.precision.compute_bytes)
    if architecture.position_embedding != "learned":
        return [embedded], ("embedding",)
    ops = [
        op("positions", (), context.sequence * INT64),
        op("embed_positions", "positions", stream // context.batch),
        *([op(SEEDS, (), (2 * layers + 1) * INT64)] if architecture.hidden_dropout else []),
        embedded,
    ]
    if not architecture.embedding_dropout:
        return ops, ("embedding", "embed_positions")
    ops.append(op("embedding.dropped", SEEDS, rows * architecture.hidden_size, fuses="embedding"))
    return ops, ("embedding", "embed_positions", "embedding.dropped")


def _head(context: HFContext, ops: LayerOps, given: str, given_again: Names) -> tuple[list[Op], list[Op]]:
    """The final norm and the lm_head, forward and backward. `given_again`: what backward reads as the norm's input."""
    architecture = context.architecture
    logits = context.rows * architecture.vocab_size * context.precision.compute_bytes
    weight = architecture.vocab_size * architecture.hidden_size
    cast = [op("lm_head.cast", (), weight * context.precision.compute_bytes)] if ops.casts else []
    capped = architecture.final_logit_softcapping is not None
    product = "lm_head" if capped else "logits"
    through = ops.back("lm_head", ("d_logits", "norm_final"), "d_norm_final_of_logits", "d_logits", ops.hidden, weight)
    if architecture.tie_word_embeddings:  # its weight's gradient comes at the end, with the embedding's
        through = [each for each in through if not each.is_result]
    forward = [
        *ops.norm("final", (given,), (given,), ("rstd_final",)),
        *cast,
        op(product, ("norm_final", "lm_head.cast") if cast else "norm_final", logits),
        *([op("logits", product, logits)] if capped else []),
    ]
    product_gradient = "d_norm_final_of_logits"
    of_logits = (product_gradient, HIDDEN_TANGENT) if family_of(architecture).ends.loss_apart else (product_gradient,)
    replaced = (product_gradient, *given_again)
    return forward, [*through, *ops.through_norm("final", of_logits, given_again, StreamGradient("d_stream", (), replaced))]


def _loss(context: HFContext) -> tuple[list[Op], list[Op]]:
    """Cross entropy, forward and backward."""
    architecture, rows = context.architecture, context.rows
    logits = rows * architecture.vocab_size * context.precision.compute_bytes
    capped = architecture.final_logit_softcapping is not None
    of_loss = ("logits", "loss.max", "loss.log", "labels")
    forward = [
        op("labels", (), context.batch * (context.sequence + 1) * INT64),
        op("loss.max", "logits", rows * FP32, wide=True, fuses="logits" if capped else ()),
        op("loss.sum", "logits", rows * FP32, wide=True, fuses="loss.max"),
        op("loss.log", "loss.sum", rows * FP32, wide=True, fuses="loss.max", replaces="loss.sum"),
        op("loss", of_loss, FP32),
    ]
    apart = family_of(architecture).ends.loss_apart
    reads = of_loss if apart else (*of_loss, TANGENT)
    if not capped:
        d_logits = op("d_logits", reads, logits)
        return forward, [d_logits.leaving() if apart else d_logits]
    return forward, [op("d_capped", reads, logits), op("d_logits", ("d_capped", "lm_head"), logits, fuses="d_capped")]


def _embedding_back(context: HFContext, backward: list[Op]) -> list[Op]:
    """The embedding's gradient: rows are summed in fp32 (`_decomp` embedding_dense_backward), by the kernel that would make
    the first layer's gradient. That one is removed from `backward` unless positions read it too."""
    at = max(index for index, each in enumerate(backward) if each.name == "0.d_input")
    if not context.trainable:
        del backward[at]
        return []
    architecture, learned = context.architecture, context.architecture.position_embedding == "learned"
    last = backward[at] if learned else backward.pop(at)
    elements = architecture.vocab_size * architecture.hidden_size
    of, wide = "embed_tokens.weight", context.precision.weight_bytes == FP32
    tied, name, reads = architecture.tie_word_embeddings, f"{of}.grad", last.reads
    if learned:
        reads = ("0.d_input", "embedding.dropped")
    in_fp32 = wide and not tied  # then the table of sums is the gradient itself
    table = name if in_fp32 else "embed_tokens.table"
    sums = op(table, (), elements * FP32, wide=True)
    sums = sums.leaving(of) if in_fp32 else sums
    ops = [sums, op(ROWS, (*reads, table), 0, fuses="0.d_input").leaving()]  # in place
    size = elements * context.precision.weight_bytes
    filled: Names = (table, ROWS)
    if learned:
        ops += _positions_back(context)
    if in_fp32:
        return ops
    if tied and wide:
        return [*ops, op(name, (*filled, "lm_head.grad"), size, wide=True).leaving(of)]
    if tied:  # the lm_head's product and the sum are one operation (`_inductor/fx_passes/post_grad.py` addmm)
        ops.append(op("embed_tokens.narrow", filled, size))
        filled = ("embed_tokens.narrow", "d_logits", "norm_final")
    return [*ops, op(name, filled, size).leaving(of)]


def _positions_back(context: HFContext) -> list[Op]:
    """The gradient of learned positions, which is computed as the embedding's is."""
    elements = context.architecture.max_position_embeddings * context.architecture.hidden_size
    of, table, size = "embed_positions.weight", "embed_positions.table", elements * context.precision.weight_bytes
    return [
        op(table, (), elements * FP32, wide=True),
        op("embed_positions.rows", ("0.d_input", "positions", table), 0),
        op(f"{of}.grad", (table, "embed_positions.rows"), size).leaving(of),
    ]
