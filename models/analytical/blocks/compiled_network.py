"""A decoder that torch.compile compiles whole, with its loss: one graph forward and one backward.

Its layers are those of `compiled_layer.py`, one after the other; what differs is what lies between them. Inductor schedules
all of backward at once, so a weight's gradient may wait until its end where that does not raise the peak.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from peakcast.models.analytical.blocks.compiled_backward import LayerOps
from peakcast.models.analytical.blocks.compiled_layer import FAMILIES, kept_of
from peakcast.models.analytical.blocks.compiled_ops import (
    FP32,
    INPUT,
    INT64,
    MASK,
    OF_HANDED_IN,
    OUTPUT,
    named,
    op,
    recomputed,
)
from peakcast.models.analytical.blocks.compiled_template import Given, compiled_template
from peakcast.models.analytical.blocks.hf_builder import HFContext
from peakcast.models.analytical.blocks.hf_traits import traits
from peakcast.models.analytical.blocks.inductor_graph import InductorGraph
from peakcast.models.analytical.blocks.inductor_kernels import Op
from peakcast.models.analytical.blocks.tensor_parallel import WHOLE
from peakcast.models.analytical.template import HANDED_IN, Template
from peakcast.timeline import Category

WHOLE_NETWORK = frozenset({"layers", "ends", "loss", "mask"})
TANGENT = "logits.tangent"
"""The gradient of the logits, which are a result of the graph beside the loss: zeros as large as they are."""


def is_compiled_whole(context: HFContext) -> bool:
    """Whether these are the graphs of the context's network."""
    dense = context.architecture.model_type in FAMILIES and context.architecture.moe is None
    plain = _trains_as_traced(context) and context.group == WHOLE and not context.saves_on_cpu
    whole_loss = context.loss == "cross_entropy" and not context.fused_loss
    return context.compiled == WHOLE_NETWORK and dense and plain and whole_loss


def _trains_as_traced(context: HFContext) -> bool:
    """Everything, or fp32 adapters alone."""
    tuning = context.finetuning
    plain = tuning.method == "lora" and not (tuning.quantization or tuning.dropout or context.autocast)
    return context.trainable or (plain and context.adapter_bytes == FP32)


@lru_cache(maxsize=64)
def compiled_network(kinds: tuple[HFContext, ...], layers: tuple[int, ...], again: tuple[bool, ...]) -> Template:
    """A network whose layer i is of the kind `kinds[layers[i]]` and, where `again[i]`, checkpointed: ids in, loss and
    logits out."""
    first, second = graphs(tuple(kinds[kind] for kind in layers), again)
    logits = first.size_of("logits")
    return compiled_template(first, second, [Given(TANGENT, Category.LOGITS, logits, True)], module_of=_module_of)


def _module_of(name: str) -> tuple[str, str]:
    layer, _, own = name.partition(".")
    if layer.isdecimal():
        return f"layers.{layer}", own
    return ("embedding" if layer.startswith("embed") else "head"), name


def graphs(layers: tuple[HFContext, ...], again: tuple[bool, ...]) -> tuple[InductorGraph, InductorGraph]:
    """Forward and backward of a network with these `layers`."""
    one, size = layers[0], layers[0].compute_bytes
    made = traits(one.architecture).scaled_embedding  # by an operation that could be repeated, as a lookup is not
    looked_up = one.trainable and not made  # a table that does not train is looked up again instead
    parts = [LayerOps(layer, sums_again=again[index] or (index == 0 and looked_up)) for index, layer in enumerate(layers)]
    stream = parts[0].stream
    embedded = [op("embedding", "", stream, wide=parts[0].casts)] if one.trainable else []
    forward = [*embedded, op("sequences", "", one.rows * INT64)]
    backward: list[Op] = []
    masks = _masks(one, len(layers))
    kept = {"embedding", "sequences", *masks}
    given, summed = "embedding", ""
    outer = {name: name for name in (*masks, "sequences", "final.partial")}
    for index, (layer, ops) in enumerate(zip(layers, parts, strict=True)):
        prefix, last = f"{index}.", index == len(layers) - 1
        above = "d_stream" if last else f"{index + 1}.d_input"
        inside = ops.forward()
        if index == 0:  # made where it is first read
            at = next(place for place, each in enumerate(inside) if MASK in each.reads)
            inside.insert(at, op(MASK, "sequences", writes=dict.fromkeys(masks, one.batch * one.sequence**2 * size)))
        outer[MASK] = masks[index]
        forward += named(inside, prefix, outer | {INPUT: given})
        kept |= {prefix + name for name in kept_of(layer, inside, again[index])}
        if again[index] and not last:
            kept.add(prefix + OUTPUT)
        names = outer | {INPUT: given} | {name: name.replace(HANDED_IN, above) for name in OF_HANDED_IN}
        back = ops.backward(is_result=False)
        if last and again[index]:
            back = _after_recomputation(layer, back)
        backward = named(back, prefix, names) + backward
        summed = f"{given} {prefix}o {prefix}down"
        given = prefix + OUTPUT
    head, head_back = _head(one, parts[0], given, summed if again[-1] else given)
    forward += head
    kept |= {name for each in head for name in each.writes}
    if any(again):
        kept.difference_update(masks)
    last_of_all = backward.pop()
    embedding = _embedding_back(one, last_of_all) if one.trainable else []
    everything = recomputed(forward, _wanted([*head_back, *backward, *embedding]), kept)
    sizes = {name: num_bytes for each in forward for name, num_bytes in each.writes.items()}
    sizes |= {f"{index}.{name}": size for index, each in enumerate(parts) for name, size in each.parts_read.items()}
    needed = {name for each in everything for name in each.reads} & kept
    first = InductorGraph(forward, {}, needed | {"logits", "loss"})
    inputs = {name: num_bytes for name, num_bytes in sizes.items() if name in needed}
    return first, InductorGraph(everything, inputs)


def _masks(context: HFContext, layers: int) -> list[str]:
    """Of each layer the mask: those that attend through a window have one of their own, also where it hides nothing."""
    every = traits(context.architecture).full_attention_every
    return [f"{MASK}.full" if every and (index + 1) % every == 0 else MASK for index in range(layers)]


def _wanted(ops: list[Op]) -> list[Op]:
    """Those of `ops` that a result needs."""
    read: set[str] = set()
    found = []
    for one in reversed(ops):
        if one.is_result or not read.isdisjoint(one.writes):
            found.append(one)
            read.update(one.reads)
    return found[::-1]


def _after_recomputation(context: HFContext, backward: list[Op]) -> list[Op]:
    """Of the layer that is first computed again: its attention gets a mask that is written out for every head, and what it
    computed is read for the final norm too, so that the sums over rows of both norms are one kernel."""
    size = context.batch * context.architecture.num_attention_heads * context.sequence**2 * context.compute_bytes
    found = []
    for one in backward:
        if one.name == "d_attention":
            found.append(op("mask_of_heads", MASK, size))
            one = replace(one, reads=tuple("mask_of_heads" if name == MASK else name for name in one.reads))
        elif one.name == "norm_2.partial":
            one = replace(one, fuses=("final.partial",))
        found.append(one)
    return found


def _head(context: HFContext, ops: LayerOps, given: str, given_again: str) -> tuple[list[Op], list[Op]]:
    """Final norm, lm_head and loss, forward and backward, which finds what the norm read in `given_again`."""
    rows, architecture = context.rows, context.architecture
    logits = rows * architecture.vocab_size * context.compute_bytes
    weight = architecture.vocab_size * architecture.hidden_size
    cast = [op("lm_head.cast", "", weight * context.compute_bytes)] if ops.casts else []
    given_head, capped = "final.norm lm_head.cast" if cast else "final.norm", architecture.final_logit_softcapping is not None
    product = "lm_head.result" if capped else "logits"
    through = ops.back("lm_head", "d_logits final.norm", "d_final_norm", "d_logits", ops.hidden, weight)
    if architecture.tie_word_embeddings:  # its weight's gradient comes at the end, with the embedding's
        through = [each for each in through if not each.is_result]
    forward = [
        op("final.rstd", given, rows * FP32, wide=True, fuses=given),
        op("final.norm", f"{given} final.rstd", ops.hidden, fuses="final.rstd"),
        *cast,
        op(product, given_head, logits),
        *([op("logits", product, logits)] if capped else []),
        op("labels", "", context.batch * (context.sequence + 1) * INT64),
        op("loss.max", "logits", rows * FP32, wide=True, fuses="logits" if capped else ""),
        op("loss.sum", "logits", rows * FP32, wide=True, fuses="loss.max"),
        op("loss.log", "loss.sum", rows * FP32, wide=True, fuses="loss.max", replaces="loss.sum"),
        op("loss", "logits loss.max loss.log labels", FP32),
    ]
    of_norm = f"d_final_norm {given_again} final.rstd"
    of_loss = f"logits loss.max loss.log labels {TANGENT}"
    if capped:
        of_logits = [op("d_capped", of_loss, logits), op("d_logits", f"d_capped {product}", logits, fuses="d_capped")]
    else:
        of_logits = [op("d_logits", of_loss, logits)]
    backward = [
        *of_logits,
        *through,
        *ops.summed("final.weight", "final.partial", of_norm, architecture.hidden_size),
        ops.stream_gradient("d_stream", of_norm, f"d_final_norm {given_again}"),
    ]
    return forward, backward


def _embedding_back(context: HFContext, last: Op) -> list[Op]:
    """The embedding's gradient: rows added up in fp32 (`_decomp` embedding_dense_backward), by their kernel."""
    elements = context.architecture.vocab_size * context.architecture.hidden_size
    name, wide = "embed_tokens.weight.grad", context.weight_bytes == FP32
    tied = context.architecture.tie_word_embeddings
    table = name if wide and not tied else "embed_tokens.table"
    added = op("embed_tokens.rows", f"{' '.join(last.reads)} {table}", 0, is_result=True)  # in place
    ops, size = [op(table, "", elements * FP32, wide=True, is_result=table == name), added], elements * context.weight_bytes
    if tied and wide:
        return [*ops, op(name, f"{table} embed_tokens.rows lm_head.grad", size, wide=True, is_result=True)]
    if tied:  # the head's product and the sum are one operation (`_inductor/fx_passes/post_grad.py` addmm)
        narrow = op("embed_tokens.narrow", f"{table} embed_tokens.rows", size)
        return [*ops, narrow, op(name, "embed_tokens.narrow d_logits final.norm", size, is_result=True)]
    return ops if wide else [*ops, op(name, f"{table} embed_tokens.rows", size, is_result=True)]
