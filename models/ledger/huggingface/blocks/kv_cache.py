"""Keys and values of earlier tokens: what a layer's cache does in one forward. The step holds the tensors that it keeps.

Source: transformers 5.17 cache_utils.py DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from peakcast.core.units import FP32, INT64
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.context import Cache, HFContext
from peakcast.models.ledger.huggingface.blocks.traits import attention_key_heads
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Tensor
from peakcast.models.ledger.tape.template import Template
from peakcast.timelines.timeline import Category

IN_TRAINING = ("copies", "refers")
"""What caches do in training (`CacheTurn.does`)."""
CACHES = {"key_cache": Mark.KEY_CACHE, "value_cache": Mark.VALUE_CACHE}
"""Names of a layer's caches, and of the operations that update them."""


class CacheTurn(NamedTuple):
    """What a layer's cache does in one forward."""

    does: str
    """"grows": old and new tensors are concatenated, and the result is kept; "slides": the same, but values are
    concatenated too before the old keys are freed; "stores": new tensors are written into the kept ones; "rolls": they are
    written into a copy shifted by one, which is copied back; "passes": attention gets the new tensors, and the last tokens
    are kept; in training, "copies": an empty cache and the new tensors are concatenated; "refers": the cache has the new
    tensors themselves."""
    length: int
    """Number of tokens that attention gets."""
    kept: int
    """Number of tokens that it keeps. A window of a longer dynamic cache is a view, so all of the cache stays until it next
    grows."""


def cache_turn(window: int | None, past: int, sequence: int, full: int, *, static: bool) -> CacheTurn:
    """What the cache of a layer with a `window` (or None) does when `sequence` tokens follow `past` tokens; `full`: the
    number of tokens at the end."""
    if not static:
        length = (past if window is None else min(past, window - 1)) + sequence
        return CacheTurn("grows" if window is None else "slides", length, length)
    kept = full if window is None else min(window, full)
    if past >= kept:
        return CacheTurn("rolls", kept, kept)
    if past + sequence > kept:
        return CacheTurn("passes", sequence, kept)
    return CacheTurn("stores", kept, kept)


def cache_in_training(job: TrainingJob, convention: Mapping[str, Any]) -> Cache:
    """What the cache does in `job`'s training. Networks switch it off where they checkpoint, and encoders have none."""
    latent, kinds = bool(convention.get("latent_cache", True)), (job.architecture.kind, job.loss.kind)
    off = job.compile or job.activation_checkpointing.mode != "none" or kinds != ("decoder", "cross_entropy")
    if off or not convention.get("outputs_have_cache"):
        return Cache(latent=latent)
    does = "copies" if convention.get("cache_concatenates") else "refers"
    widened = bool(convention.get("returns_cache_as_tuples") and convention.get("autocast"))
    return Cache(does=does, latent=latent, length=job.sequence_length, widened=widened)


def layer_cache_bytes(context: HFContext, length: int) -> tuple[int, int]:
    """Bytes of a layer's keys and of its values for `length` tokens. Shapes: [batch, num_key_value_heads, length, head_dim]
    each. With multi-latent attention: the latent and the rotated part, as one head each (transformers 5.17
    models/deepseek_v3/modeling_deepseek_v3.py), or in earlier releases all heads."""
    architecture, mla, tokens = context.architecture, context.architecture.mla, context.batch * length
    keys = values = attention_key_heads(architecture) * architecture.head_dim
    if mla is not None and context.cache.latent:
        keys, values = mla.kv_lora_rank, mla.qk_rope_head_dim
    elif mla is not None:
        heads = architecture.num_attention_heads
        keys, values = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), heads * mla.v_head_dim
    return tokens * keys * context.precision.compute_bytes, tokens * values * context.precision.compute_bytes


def update_cache(build: BlockBuilder, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`past_key_values.update(k, v)`: the cached tensors, which the step holds; k and v live until both are stored."""
    context, tape, cached = build.context, build.tape, []
    if context.cache.does in IN_TRAINING:
        return _cached_in_training(build, k, v)
    sizes = layer_cache_bytes(context, context.cache.length)
    if context.cache.does == "passes":
        for name, mark in CACHES.items():
            with tape.marked(mark):
                tape.operation(name, [k, v], 0)
        return k, v
    rolled = []
    if context.cache.does == "rolls":
        rolled = [tape.operation(f"{name}.rolled", [k, v], size) for name, size in zip(CACHES, sizes, strict=True)]
    positions = 2 * context.sequence * INT64 if context.cache.does == "stores" else 0  # index_copy_ at cache_position
    for (name, mark), size in zip(CACHES.items(), sizes, strict=True):
        with tape.marked(mark):
            stored = tape.operation(name, [k, v, *rolled], 0, forward_temporary_bytes=positions)
        stored.num_bytes = size
        cached.append(stored)
    return cached[0], cached[1]


def _cached_in_training(build: BlockBuilder, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The cached tensors, to which the model's outputs refer. An empty cache has the dtype of the first keys, so that
    concatenating widens values too where autocast has left rotated keys in fp32 (transformers 4.56-5.17 cache_utils.py
    `DynamicLayer.lazy_initialization`)."""
    context, tape = build.context, build.tape
    narrow_keys, narrow_values = layer_cache_bytes(context, context.sequence)
    if context.cache.does == "copies":
        wide = narrow_values // context.precision.compute_bytes * FP32 if k.num_bytes > narrow_keys else 0
        k, v = ops.copy(tape, k, "key_cache"), tape.operation("value_cache", [v], max(v.num_bytes, wide))
    for tensor, narrow in ((k, narrow_keys), (v, narrow_values)):
        tape.mark_made(Mark.CACHED, tensor)
        if tensor.num_bytes <= narrow:
            tape.mark_made(Mark.CACHED_NARROW, tensor)
    build.variables.extend((k, v))
    return k, v


def cached_bytes(template: Template) -> tuple[int, int]:
    """Bytes of what a layer has cached in training that its graph does not save as well, and of what it saves."""
    marked = np.isin(template.born, template.forward_marks.get(Mark.CACHED, ()))
    made = marked & template.allocated & ~template.born_backward & (template.categories == int(Category.ACTIVATIONS))
    saved = template.dies_backward
    return int(template.num_bytes[made & ~saved].sum()), int(template.num_bytes[made & saved].sum())


def narrow_cache_widened_bytes(context: HFContext, template: Template) -> int:
    """Bytes of the fp32 copies that accelerate makes under autocast of the keys and values that a layer has cached, if the
    model returns them as tuples (accelerate 1.0 utils/operations.py `convert_to_fp32`, which leaves objects alone)."""
    narrow = len(template.forward_marks.get(Mark.CACHED_NARROW, ()))
    one = sum(layer_cache_bytes(context, context.sequence)) // 2
    return narrow * one // context.precision.compute_bytes * FP32 if context.cache.widened else 0


def returned_cache_bytes(context: HFContext) -> int:
    """Bytes that stay alive when a layer's forward returns its keys and values as `past_key_values`: they are views of the
    fused projection's output, all of which stays. bitsandbytes returns the dtype of its input, which under autocast is that
    of the fp32 norms.

    Source: transformers 4.48.1 models/gpt_bigcode/modeling_gpt_bigcode.py, `present = key_value`; bitsandbytes 0.43
    nn/modules.py Linear4bit.forward.
    """
    architecture = context.architecture
    columns = architecture.query_size + 2 * architecture.key_value_size
    return context.rows * columns * (FP32 if _projects_to_float32(context) else context.precision.compute_bytes)


def widened_cache_bytes(context: HFContext) -> int:
    """Bytes of the fp32 copy of a layer's keys and values that accelerate makes under autocast of all that the model
    returns; 0 if there is none.

    Source: accelerate 0.33.0 utils/operations.py, ConvertOutputsToFp32.
    """
    converts = context.precision.autocast and not _projects_to_float32(context)
    return context.rows * 2 * context.architecture.key_value_size * FP32 if converts else 0


def _projects_to_float32(context: HFContext) -> bool:
    return context.precision.autocast and context.finetuning.quantization is not None
