"""The ledger of generation with Hugging Face transformers, on one GPU or on a rank of tensor parallelism: weights, prefill,
the growing cache, decoding.

All of it is phase FORWARD; the labels say "prefill" and "decode". Source: transformers 5.17 generation/utils.py `_prefill`
and `_sample`, cache_utils.py. There is no graph, so a tensor is freed after its last reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from peakcast.catalog import Device
from peakcast.core.units import FP32, INT64
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.embedding import embedding, embedding_variables
from peakcast.models.ledger.huggingface.blocks.head import next_token_head
from peakcast.models.ledger.huggingface.blocks.kv_cache import CACHES, CacheTurn, cache_turn, layer_cache_bytes
from peakcast.models.ledger.huggingface.blocks.layer import decoder_layer
from peakcast.models.ledger.huggingface.blocks.traits import kinds_of_masks, rotates, window_of
from peakcast.models.ledger.huggingface.model import attention_weights_bytes, hold_buffers, rotary_tables
from peakcast.models.ledger.huggingface.stored_parameters import quantised_shapes
from peakcast.models.ledger.parameters.quantization import scratch_bytes
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import FOREVER, Step
from peakcast.models.ledger.tape.template import Template
from peakcast.models.ledger.tape.workspaces import FORWARD_THREAD, training_workspaces
from peakcast.networks.families import family_of
from peakcast.timelines.timeline import Category, Timeline

MAX_DECODE_FORWARDS = 64
"""How many decoding forwards are on the timeline: all if there are fewer, else evenly spread ones and always the last two,
since the next to last makes a cache while the one before still exists. Each forward is like its neighbour with a longer
cache, so the peak is exact. Reserved memory depends on the history in between: 64 of 511 forwards are within 0.5 % of what
was measured (optimum-benchmark), as are all 511."""


class LayerTurn(NamedTuple):
    """What every layer of one kind does in a forward."""

    template: Template
    made: tuple[tuple[str, int, int], ...]
    """For each of a layer's caches: its name, the instant of the layer from which it exists, its bytes."""
    replaced: tuple[int, ...]
    """For each of them: the instant from which the cache no longer refers to the tensor it replaces."""
    returned_bytes: int
    """Bytes of the attention weights, which a variable of the model's loop refers to until the next layer returns its
    own."""


@lru_cache(maxsize=1)
def inference_ledger(
    job: TrainingJob, context: HFContext, weights: tuple[tuple[str, str, int], ...], device: Device | None
) -> Timeline:
    """Every tensor of a generation of `job` on one rank: a prompt of `inference.prompt_length` tokens (null:
    sequence_length) and `inference.new_tokens` more (null: 1, prefill alone). `weights`: (name, module, bytes)."""
    still = replace(context.architecture, attention_dropout=0.0, hidden_dropout=0.0, embedding_dropout=0.0)  # model.eval()
    context = replace(context, architecture=still)
    timeline = Step()
    timeline.hold_all(weights, Category.PARAMETERS)
    hold_buffers(timeline, job)
    unpacked = scratch_bytes(str(conventions(job).get("gptq_kernel", "")), quantised_shapes(job))
    timeline.hold("exllama.scratch", Category.WORKSPACES, unpacked, 0)
    alone = [entry for entry in training_workspaces(device, job) if entry[1] == FORWARD_THREAD]
    timeline.hold_all(alone, Category.WORKSPACES)
    generation = _Generation(job, context, timeline)
    timeline.hold("input_ids", Category.INPUTS, generation.prompt * generation.token_bytes, 0)  # the caller's own
    generation.run_forward(0)
    decoding_from = timeline.now
    for past in _decoded(generation.prompt, generation.full):
        generation.run_forward(past)
    generation.hold_last_caches()
    return replace(timeline.timeline(), decoding_from=decoding_from)


class _Generation:
    """A generation on a timeline, and what each forward leaves to the next: caches and logits."""

    def __init__(self, job: TrainingJob, context: HFContext, timeline: Step) -> None:
        self._job, self._context, self._timeline = job, context, timeline
        self.prompt = job.inference.prompt_length or job.sequence_length
        self.full = self.prompt + (job.inference.new_tokens or 1) - 1
        """Number of tokens in the cache at the end; the last token is generated but never an input."""
        self.token_bytes = job.micro_batch_size * INT64
        self._static = job.inference.cache == "static"
        layers = range(job.architecture.num_hidden_layers)
        self._windows = [window_of(job.architecture, layer) for layer in layers]
        routed = [job.architecture.is_moe_layer(layer) for layer in layers]
        rotated = [rotates(job.architecture, layer) for layer in layers]
        self._kinds = list(zip(self._windows, routed, rotated, strict=True))
        """What tells one layer from another: its window, whether it has experts, whether it rotates queries and keys."""
        self._caches = {(layer, name): (0, 0) for layer in layers for name in CACHES}
        """By layer and name: the instant from which the cache exists, and its bytes."""
        chosen = conventions(job)
        self._logits_kept = str(chosen.get("generate_logits", "last"))
        self._keeps_last = bool(chosen.get("generation_keeps_last_cache"))
        """Whether the caches that a forward replaces stay until it has returned."""
        self._logits_before = 0
        """Bytes of the last forward's logits, to which variables refer until the next forward's exist."""

    def run_forward(self, past: int) -> None:
        """Run the model once, after `past` tokens: over the whole prompt, or over one token."""
        timeline, start, caches_before = self._timeline, self._timeline.now, dict(self._caches)
        forward = replace(self._context, sequence=1 if past else self.prompt)
        turns = {
            window: cache_turn(window, past, forward.sequence, self.full, static=self._static)
            for window in dict.fromkeys(self._windows)
        }
        follows = self._static and past > 0
        seen = {window: _with_cache(forward, window, turn, past, follows=follows) for window, turn in turns.items()}
        timeline.run_without_graph(embedding(forward), "embedding")
        embedded = timeline.now
        first_ends = self._run_layers(turns, seen)
        ends = self._run_head(forward, start)
        is_input, sizes = embedding_variables(forward)  # if it is the first layer's input, that layer holds it meanwhile
        for size in sizes:
            timeline.hold("inputs_embeds", Category.ACTIVATIONS, size, first_ends if is_input else embedded, ends)
        if None not in seen:  # the model also makes the mask of full attention, although no layer uses it
            seen[None] = _with_cache(forward, None, turns[self._windows[0]], past, follows=follows)
        _hold_inputs_of_the_model(timeline, seen, start, ends)
        for (layer, name), (born, size) in caches_before.items() if self._keeps_last and past else ():
            timeline.hold(name, Category.KV_CACHE, size, born, timeline.now, f"layers.{layer}")
        for name in ("input_ids", "attention_mask") if past else ("attention_mask",):
            timeline.hold(name, Category.INPUTS, (past + forward.sequence) * self.token_bytes, start, timeline.now)
        stage = "decode" if past else "prefill"
        own = timeline.labels[start:]
        staged = {label: f"{stage} {label}" for label in set(own)}
        timeline.labels[start:] = [staged[label] for label in own]

    def _run_layers(self, turns: Mapping[int | None, CacheTurn], seen: Mapping[int | None, HFContext]) -> int:
        """Run all layers, given what caches do and what layers see, by window. Returns the instant at which the first
        layer ends."""
        timeline, first_ends, returned = self._timeline, self._timeline.now, 0
        runs = {
            (window, routed, turned): _layer_turn(_like(seen[window], routed=routed, rotates=turned), turns[window].kept)
            for window, routed, turned in dict.fromkeys(self._kinds)
        }
        for layer, kind in enumerate(self._kinds):
            begins, before = timeline.now, returned
            _run_layer(timeline, runs[kind], layer, self._caches, lets_go=not self._keeps_last)
            returned = runs[kind].returned_bytes
            timeline.hold("attention_weights", Category.ACTIVATIONS, before, begins, timeline.now, f"layers.{layer - 1}")
            first_ends = timeline.now if layer == 0 else first_ends
        return first_ends

    def _run_head(self, forward: HFContext, start: int) -> int:
        """Run the head of a forward that began at instant `start`. Returns the instant at which the model's own forward
        has its result."""
        head = next_token_head(forward, self._logits_kept)
        begins = self._timeline.run_without_graph(head, "head").forward_start
        named = begins + head.forward_marks[Mark.NEXT_TOKEN_LOGITS][0] + 1
        self._timeline.hold("next_token_logits", Category.LOGITS, self._logits_before, start, named, "head")
        rows = forward.rows if self._logits_kept == "all" else self._job.micro_batch_size
        self._logits_before = rows * self._job.architecture.vocab_size * FP32
        return begins + head.forward_marks[Mark.LAST_POSITION][0]

    def hold_last_caches(self) -> None:
        """Hold the caches of the last forward, which the caller keeps."""
        for (layer, name), (born, size) in self._caches.items():
            self._timeline.hold(name, Category.KV_CACHE, size, born, FOREVER, f"layers.{layer}")


def _decoded(prompt: int, full: int) -> list[int]:
    """Tokens in the cache before each decoding forward on the timeline, ascending; the last is `full` - 1."""
    count = full - prompt
    if count <= MAX_DECODE_FORWARDS:
        return list(range(prompt, full))
    spread = MAX_DECODE_FORWARDS - 1
    return [*(prompt + (count - 2) * i // (spread - 1) for i in range(spread)), full - 1]


def _layer_turn(context: HFContext, length: int) -> LayerTurn:
    """A layer's forward, after which its cache keeps `length` tokens. A dynamic cache is concatenated, so its old and new
    keys exist together; a static one is made once."""
    template = decoder_layer(context)
    keys, values = (template.forward_marks[mark][0] for mark in CACHES.values())
    grows, sizes = context.cache.does in ("grows", "slides"), layer_cache_bytes(context, length)
    updated = (keys, values) if grows else (keys, keys)
    made = tuple(zip(CACHES, updated, sizes, strict=True))
    replaced = (updated if context.cache.does == "grows" else (values, values)) if grows else ()
    return LayerTurn(template, made, replaced, attention_weights_bytes(context))


def _run_layer(
    timeline: Step, turn: LayerTurn, layer: int, caches: dict[tuple[int, str], tuple[int, int]], *, lets_go: bool
) -> None:
    """Run `layer` and record its caches. `lets_go`: whether nothing else refers to the caches that they replace."""
    module = f"layers.{layer}"
    start = timeline.run_without_graph(turn.template, module).forward_start
    for index, (name, now, size) in enumerate(turn.made):
        born, before = caches[layer, name]
        if before and turn.replaced and lets_go:
            ends = start + turn.replaced[index] + 1
            timeline.hold(name, Category.KV_CACHE, before, born, ends, module)
        if turn.replaced or not before:
            caches[layer, name] = (start + now, size)


def _with_cache(context: HFContext, window: int | None, turn: CacheTurn, past: int, *, follows: bool) -> HFContext:
    """The context of a layer with a `window` (or None), given what its cache does. `follows`: whether a static cache
    already contains a prompt.

    Source: transformers 5.17 masking_utils.py `_ignore_causal_mask_sdpa`, `flash_attention_mask`; sdpa_attention.py:
    without a mask, a prompt reads of a static cache only the part that has been filled.
    """
    always = family_of(context.architecture).masks.always
    masked = always or follows or (window is not None and turn.length >= window)
    part = {"sdpa": not masked, "flash_attention_2": True}.get(context.attention.implementation, False)
    keys = min(past + context.sequence, turn.length) if part and turn.does == "stores" else turn.length
    cache = replace(context.cache, does=turn.does, length=turn.length, key_length=keys)
    return _like(replace(context, cache=cache), masked=masked)


def _like(context: HFContext, **changes: Any) -> HFContext:
    """`context` with these changes to its `layer`."""
    return replace(context, layer=replace(context.layer, **changes))


def _hold_inputs_of_the_model(timeline: Step, seen: Mapping[int | None, HFContext], start: int, ends: int) -> None:
    """Hold what the model's own forward makes for all layers and keeps until it returns: masks [micro_batch_size, 1,
    sequence, keys], bool if sdpa needs one and additive for eager, one for each kind of layer; and rotary tables."""
    one = next(iter(seen.values()))
    architecture = one.architecture
    kinds = [seen[None], seen.get(architecture.sliding_window, one)][-kinds_of_masks(architecture) :]
    if family_of(architecture).masks.for_both_kinds:  # the second has a window of 0, which every length exceeds
        kinds[-1] = _like(kinds[-1], masked=True)
    for kind in kinds:
        bools = int(kind.attention.implementation == "sdpa" and kind.layer.masked)
        size = kind.precision.compute_bytes if kind.attention.implementation == "eager" else bools
        timeline.hold("causal_mask", Category.TEMPORARIES, kind.rows * kind.cache.length * size, start, ends)
    tables = rotary_tables(architecture, one.sequence, one.precision.weight_bytes)
    timeline.hold_all([*tables, ("position_ids", "", one.sequence * INT64)], Category.TEMPORARIES, start, ends)
