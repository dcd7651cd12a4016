"""The ledger of generation with Hugging Face transformers on one GPU: weights, prefill, the growing cache, decoding.

All of it is phase FORWARD; the labels say "prefill" and "decode". Source: transformers 5.17 generation/utils.py `_prefill`
and `_sample`, cache_utils.py; run without a graph, so a tensor dies after its last reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from peakcast.catalog import Device
from peakcast.conventions import conventions
from peakcast.models.analytical.blocks.hf_context import HFContext
from peakcast.models.analytical.blocks.hf_ends import embedding, embedding_variables, next_token_head
from peakcast.models.analytical.blocks.hf_layer import decoder_layer
from peakcast.models.analytical.blocks.hf_traits import kinds_of_masks, traits
from peakcast.models.analytical.blocks.kv_cache import CACHES, layer_cache_bytes
from peakcast.models.analytical.hf_model import attention_weights_bytes, hold_buffers
from peakcast.models.analytical.step import FOREVER, Step
from peakcast.models.analytical.workspaces import training_workspaces
from peakcast.spec import TrainingJob
from peakcast.timeline import Category, Timeline

FP32 = 4
INT64 = 8
MAX_DECODE_FORWARDS = 32
"""Decoding forwards on the timeline: all where there are fewer, else evenly spread, the last always. Every one is like its
neighbour with a longer cache, so the peak is exact; the allocator's history of the ones between is not replayed."""


def inference_ledger(
    job: TrainingJob, context: HFContext, weights: Sequence[tuple[str, str, int]], device: Device | None
) -> Timeline:
    """Every tensor of a generation of `job` on one GPU: a prompt of `inference.prompt_length` (null: sequence_length)
    tokens and `inference.new_tokens` more (null: 1, prefill alone). `weights`: (name, module, bytes)."""
    still = replace(context.architecture, attention_dropout=0.0, hidden_dropout=0.0, embedding_dropout=0.0)  # model.eval()
    context = replace(context, architecture=still)
    timeline = Step()
    timeline.hold_all(weights, Category.PARAMETERS)
    hold_buffers(timeline, job)
    timeline.hold_all(training_workspaces(device, job.versions)[:1], Category.WORKSPACES)  # no autograd thread
    prompt, new = job.inference.prompt_length or job.sequence_length, job.inference.new_tokens or 1
    for name in ("input_ids", "attention_mask"):
        timeline.hold(name, Category.INPUTS, job.micro_batch_size * (prompt + new) * INT64, 0)
    full = prompt + new - 1  # the last token is never fed
    static = job.inference.cache == "static"
    # a static cache is seen whole, but by sdpa's prefill, which without a mask takes what was given (sdpa_attention.py)
    sees_prompt = context.attention == "sdpa" and not traits(context.architecture).always_masked
    layers = range(job.architecture.num_hidden_layers)
    caches = {(layer, name): (0, 0) for layer in layers for name in CACHES}  # born, bytes
    for past in (0, *_decoded(prompt, full)):
        sequence = 1 if past else prompt
        forward = replace(
            context,
            sequence=sequence,
            cache=job.inference.cache,
            key_length=full if static and (past or not sees_prompt) else past + sequence,
            masked=static and past > 0,
        )
        start = timeline.now
        timeline.run_without_graph(embedding(forward), "embedding")
        embedded = first_ends = timeline.now
        returned = 0
        for layer in layers:
            run = replace(forward, routed=job.architecture.is_moe_layer(layer))
            begins, before = timeline.now, returned
            returned = _run_layer(timeline, run, layer, caches, full if static else 0)
            timeline.hold("attention_weights", Category.ACTIVATIONS, before, begins, timeline.now, f"layers.{layer - 1}")
            first_ends = timeline.now if layer == 0 else first_ends
        head = next_token_head(forward, str(conventions(job).get("generate_logits", "last")))
        begins = timeline.run_without_graph(head, "head").forward_start
        ends = begins + head.forward_labels.index("last_position")
        is_input, sizes = embedding_variables(forward)  # the first layer's input, which that layer has meanwhile
        for size in sizes:
            timeline.hold("inputs_embeds", Category.ACTIVATIONS, size, first_ends if is_input else embedded, ends)
        _hold_inputs_of_the_model(timeline, forward, start, ends)
        if past:  # the variable names the last forward's copy until it names this one's
            chosen = begins + head.forward_labels.index("next_token_logits") + 1
            size = job.micro_batch_size * job.architecture.vocab_size * FP32
            timeline.hold("next_token_logits", Category.LOGITS, size, start, chosen, "head")
        stage = "decode" if past else "prefill"
        timeline.labels[start:] = [f"{stage} {label}" for label in timeline.labels[start:]]
    for (layer, name), (born, size) in caches.items():
        timeline.hold(name, Category.ACTIVATIONS, size, born, FOREVER, f"layers.{layer}")
    return timeline.timeline()


def _decoded(prompt: int, full: int) -> list[int]:
    """Tokens in the cache before each decoding forward that is shown, ascending; the last is `full` - 1."""
    count = full - prompt
    shown = min(count, MAX_DECODE_FORWARDS)
    return [full - 1 - (count - 1) * i // max(shown - 1, 1) for i in reversed(range(shown))]


def _run_layer(
    timeline: Step, context: HFContext, layer: int, caches: dict[tuple[int, str], tuple[int, int]], length: int
) -> int:
    """One layer's forward. A dynamic cache is concatenated: a layer's old and new keys meet; a static one of `length`
    tokens is made once. Returns the bytes of the attention weights that the model's loop names until the next layer's."""
    grows, cached = not length, replace(context, key_length=length or context.key_length)
    template = decoder_layer(context)
    start = timeline.run_without_graph(template, f"layers.{layer}").forward_start
    for name, size in zip(CACHES, layer_cache_bytes(cached), strict=True):
        born, before = caches[layer, name]
        now = start + template.forward_labels.index(name if grows else CACHES[0])
        if before and grows:
            timeline.hold(name, Category.ACTIVATIONS, before, born, now + 1, f"layers.{layer}")
        if grows or not before:
            caches[layer, name] = (now, size)
    return attention_weights_bytes(context)


def _hold_inputs_of_the_model(timeline: Step, context: HFContext, start: int, ends: int) -> None:
    """What the model's own forward makes for all layers and keeps until it returns: the mask, cos and sin [1, sequence,
    head_dim]."""
    architecture, size = context.architecture, context.compute_bytes
    if context.attention == "eager":  # additive masks [micro_batch_size, 1, sequence, keys], as generate() passes one along
        mask = context.rows * context.key_length * size
        timeline.hold_all([("causal_mask", "", mask)] * kinds_of_masks(architecture), Category.TEMPORARIES, start, ends)
    if architecture.position_embedding == "rope":
        width = int(architecture.head_dim * traits(architecture).rotary_fraction)
        size = FP32 if traits(architecture).rotary == "promoted" else size
        for name in ("rotary.cos", "rotary.sin"):
            timeline.hold(name, Category.TEMPORARIES, context.sequence * width * size, start, ends)
