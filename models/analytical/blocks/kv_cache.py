"""Keys and values of earlier tokens: what a layer's cache does in one forward. What it keeps is held by the step.

Source: transformers 5.17 cache_utils.py DynamicLayer, StaticLayer (DynamicCache of 4.x concatenates alike).
"""

from __future__ import annotations

from peakcast.models.analytical.blocks.hf_builder import BlockBuilder
from peakcast.models.analytical.blocks.hf_context import HFContext
from peakcast.models.analytical.blocks.hf_traits import attention_key_heads
from peakcast.models.analytical.tape import Tensor

CACHES = ("key_cache", "value_cache")
FP32 = 4
INT64 = 8


def layer_cache_bytes(context: HFContext) -> tuple[int, int]:
    """Bytes of a layer's keys and of its values after this forward. Shapes: [batch, num_key_value_heads, length, head_dim]
    each, with the tokens so far (dynamic) or all that there will be (static); of multi-latent attention the latent
    and the rotated part, as one head each (transformers 5.17 models/deepseek_v3/modeling_deepseek_v3.py)."""
    architecture, mla, tokens = context.architecture, context.architecture.mla, context.batch * context.key_length
    keys = values = attention_key_heads(architecture) * architecture.head_dim
    if mla is not None:
        keys, values = mla.kv_lora_rank, mla.qk_rope_head_dim
    return tokens * keys * context.compute_bytes, tokens * values * context.compute_bytes


def update_cache(build: BlockBuilder, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`past_key_values.update(k, v)`: the cached tensors, which live elsewhere; k and v live until both are stored."""
    context, cached = build.context, []
    positions = 2 * context.sequence * INT64 if context.cache == "static" else 0  # index_copy_ at cache_position
    for name, size in zip(CACHES, layer_cache_bytes(context), strict=True):
        stored = build.tape.operation(name, [k, v], 0, forward_temporary_bytes=positions)
        stored.num_bytes = size
        cached.append(stored)
    return cached[0], cached[1]


def returned_cache_bytes(context: HFContext) -> int:
    """Bytes that a layer's keys and values keep when its forward returns them as `past_key_values`: they are views of the
    fused projection's result, all of which stays. bitsandbytes returns the dtype that it was given, autocast's fp32 norms.

    Source: transformers 4.48.1 models/gpt_bigcode/modeling_gpt_bigcode.py, `present = key_value`; bitsandbytes 0.43
    nn/modules.py Linear4bit.forward.
    """
    architecture, widened = context.architecture, context.autocast and context.finetuning.quantization is not None
    columns = architecture.query_size + 2 * architecture.key_value_size
    return context.rows * columns * (FP32 if widened else context.compute_bytes)
