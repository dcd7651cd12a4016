"""Scaled dot product attention on fake tensors: the chooser sees no GPU and would fall to the math path, so the operator
that a GPU would run is called directly. A function is replaced, not a mode entered: a mode is off inside backward, where
checkpointing recomputes.
"""

from __future__ import annotations

from typing import Any

import torch


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Flash attention without a mask, the memory-efficient kernel with one. Shapes: [batch, heads, sequence, head_dim]."""
    if attn_mask is None:
        if key.shape[1] != query.shape[1] and not enable_gqa:
            return _math(query, key, value, dropout_p, is_causal, scale)
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    bias = attn_mask
    if bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype)
    bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


def _math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Any:
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, None, dropout_p, is_causal, scale=scale)[0]


def install() -> None:
    """Use `fused_attention` for every call in this process, and keep transformers from building a mask it does not need."""
    torch.nn.functional.scaled_dot_product_attention = fused_attention
    try:
        import transformers.masking_utils as masks
    except ImportError:
        return
    if hasattr(masks, "find_packed_sequence_indices"):
        masks.find_packed_sequence_indices = lambda position_ids: None  # fake tensors look packed to it: a b·s·s mask
